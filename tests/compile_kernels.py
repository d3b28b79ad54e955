"""Compile every kernel by NVRTC for every architecture, without a GPU: `python -m tests.compile_kernels [stem ...]`.

With the constants of tests/variants.txt. Of each row Hopper takes so many variants that every two values of different
constants meet in one, Ampere and Blackwell the first; with `--all` these three take the row's whole product, of which a
changed kernel must spill no registers either. Turing takes the first, in half for bf16: its products of floats take
long to compile. An architecture that runs what another runs takes the first of a file. A kernel fails that spills
registers, whose asynchronous products the compiler makes wait for each other, or whose parameters are not those that a
launch is checked against.
"""

import itertools
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cudiff.cuda.compiler import compile_text, declarations, kernel_folder, kernel_path, source

ARCHITECTURES = {  # by the folder
    "portable": ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"),
    "sm90": ("sm_90a",),
}
ALIKE = ("sm_86", "sm_89", "sm_120")  # the first two to sm_80, the last to sm_100


def _table() -> dict[str, list[dict[str, list[str]]]]:
    """tests/variants.txt: by the file's stem, of each row the constants with their values."""
    _, *blocks = Path(__file__).with_name("variants.txt").read_text().split("\n\n")
    found = {}
    for block in blocks:
        (stem,), *lines = (line.split() for line in block.strip().split("\n"))
        names, *rows = lines or [[], []]  # without constants there is one variant
        found[stem] = [dict(zip(names, (values.split(",") for values in row), strict=True)) for row in rows]
    return found


VARIANTS = _table()


def variants(stem: str, arch: str, whole: bool = True) -> list[dict[str, str]]:
    """The `-D` sets that a file is compiled with for an architecture; `whole`: the product of each row."""
    sets = []
    for row in VARIANTS[stem][: 1 if arch in ALIKE else None]:
        choices = list(itertools.product(*row.values()))
        if arch in (*ALIKE, "sm_75") or not (whole or arch == "sm_90a"):
            choices = choices[:1]
        elif not whole:
            choices = _each_pair(choices)
        sets += [dict(zip(row, choice, strict=True)) for choice in choices]
    return sets if arch != "sm_75" else list(map(dict, dict.fromkeys(map(_on_turing, sets))))


def _each_pair(choices: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """So many of a product that every value, and every two of different constants, are in one: the best one first."""
    pairs = {choice: set(itertools.product(enumerate(choice), repeat=2)) for choice in choices}
    missing, found = set().union(*pairs.values()), []
    while missing or not found:
        found.append(max(choices, key=lambda choice: len(missing & pairs[choice])))
        missing -= pairs[found[-1]]
    return found


def _on_turing(chosen: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Its networks compute in half, float is multiplied as it is, products have two stages, and a warp of attention has
    one tile."""
    given = {name: "half" if value == "bf16" else value for name, value in chosen.items()}
    limits = {"STAGES": "2", "MT": "1", "TF32_PRODUCTS": "1"}
    return tuple((name, min(value, limits.get(name, value))) for name, value in given.items())


def jobs(stems: list[str], everything: bool = False) -> list[tuple[str, str, dict[str, str]]]:
    found = []
    for path in sorted(kernel_folder().glob("*/*.cu")):
        if not stems or path.stem in stems:
            for arch in ARCHITECTURES[path.parent.name]:
                found += [(path.stem, arch, chosen) for chosen in variants(path.stem, arch, everything)]
    return found


def compiled_parameters(cubin: bytes) -> dict[str, list[int]]:
    """The bytes of each parameter of each kernel of a cubin: an ELF file, in whose sections .nv.info.KERNEL an entry
    (format, attribute, size) of format 4 and attribute 0x17 holds (index, ordinal, offset, flags and size << 18); where
    there are more than 4 KiB of them, attribute 0x45 holds (index, ordinal, offset, size)."""
    (start,), (count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<I20xQQ", cubin, start + 64 * i) for i in range(count)]
    found = {}
    for name, offset, size in sections:
        first = sections[names][1] + name
        section = cubin[first : cubin.index(b"\0", first)].decode()
        if section.startswith(".nv.info."):
            at, sizes = offset, {}
            while at < offset + size:
                format, attribute, length = struct.unpack_from("<BBH", cubin, at)
                if format == 4 and attribute in (0x17, 0x45):
                    ordinal, packed = struct.unpack_from("<4xH2xI", cubin, at + 4)
                    sizes[ordinal] = packed >> 18 if attribute == 0x17 else packed
                at += 4 + (length if format == 4 else 0)
            found[section.removeprefix(".nv.info.")] = [sizes[i] for i in range(len(sizes))]
    return found


def declared_parameters(stem: str, constants: dict[str, str]) -> dict[str, list[int]]:
    """The same as a launch is checked against."""
    declared = declarations(stem)
    return {name: [p.bytes for p in declared.signature(name, constants).parameters] for name in declared.kernels}


def compile_source(stem: str, arch: str, constants: dict[str, str]) -> tuple[bytes, str]:
    """`compile_text` of a kernel file."""
    return compile_text(kernel_path(stem), source(stem, constants), arch, constants)


def main() -> int:
    verbose = "-v" in sys.argv
    stems = [argument for argument in sys.argv[1:] if not argument.startswith("-")]

    def compile_job(job):
        try:
            cubin, log = compile_source(*job)
        except Exception as error:
            return job, str(error), ""
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
        problem = "spills registers" if any(spills) else "waits after each wgmma" if "C75" in log else ""
        if compiled_parameters(cubin) != declared_parameters(job[0], job[2]):
            problem = f"has the parameters {compiled_parameters(cubin)}, not {declared_parameters(job[0], job[2])}"
        return job, problem, log

    failures = 0
    work = jobs(stems, "--all" in sys.argv)
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
