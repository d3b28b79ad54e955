"""Compile every kernel by NVRTC for every architecture, without a GPU: `python -m tests.compile_kernels [stem ...]`.

Each `.cu` file names its `-D` constants in lines `// variants: T=float,bf16 FLAG=0,1`: the product of each line is
compiled, of which an architecture that runs what another runs takes the first only. `// architectures: sm_90a` limits a
file. A kernel fails that spills registers, or whose asynchronous products the compiler makes wait for each other.
"""

import itertools
import re
import sys
from concurrent.futures import ThreadPoolExecutor

from cudiff.cuda.module import compile_source, kernel_folder

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
ALIKE = ("sm_86", "sm_89", "sm_120")  # the first two to sm_80, the last to sm_100


def variants(text: str, arch: str) -> list[dict[str, str]]:
    """The `-D` sets that a file's `// variants:` lines name, for an architecture."""
    sets = []
    for line in re.findall(r"^// variants:(.*)$", text, re.MULTILINE):
        names, values = zip(*(item.split("=") for item in line.split()), strict=True) if line.strip() else ((), ())
        choices = list(itertools.product(*(v.split(",") for v in values)))[: 1 if arch in ALIKE else None]
        sets += [dict(zip(names, choice, strict=True)) for choice in choices]
    return sets or [{}]


def architectures(text: str) -> tuple[str, ...]:
    limited = re.search(r"^// architectures:(.*)$", text, re.MULTILINE)
    return tuple(limited.group(1).split()) if limited else ARCHITECTURES


def jobs(stems: list[str]) -> list[tuple[str, str, dict[str, str]]]:
    found = []
    for path in sorted(kernel_folder().glob("*.cu")):
        if not stems or path.stem in stems:
            text = path.read_text()
            found += [(path.stem, arch, chosen) for arch in architectures(text) for chosen in variants(text, arch)]
    return found


def main() -> int:
    verbose = "-v" in sys.argv
    stems = [argument for argument in sys.argv[1:] if not argument.startswith("-")]

    def compile_job(job):
        try:
            _, log = compile_source(*job)
        except Exception as error:
            return job, str(error), ""
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
        problem = "spills registers" if any(spills) else "waits after each wgmma" if "C75" in log else ""
        return job, problem, log

    failures = 0
    work = jobs(stems)
    with ThreadPoolExecutor() as pool:
        for job, problem, log in pool.map(compile_job, work):
            if problem:
                failures += 1
                print(f"{job[0]}.cu {job[1]} {job[2]}: {problem}")
            if verbose:
                print(job, *re.findall(r"Compiling entry function '(\w+)'|(Used \d+ registers)", log))
    print(f"{len(work) - failures} passed, {failures} failed")
    return 1 if failures or not work else 0


if __name__ == "__main__":
    sys.exit(main())
