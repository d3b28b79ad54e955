"""Which mutants of kernels are the same program: `python -m tests.mutate --kernels ... | python -m tests.equivalent`.

Trivial compiler equivalence (Papadakis, Jia, Harman and Le Traon, ICSE 2015): NVRTC compiles a mutant and the original
with each row of tests/variants.txt of each kernel file that its text is part of. Where the compiled code is the same
everywhere, no test can tell them apart. No GPU is needed. A mutant that is not found the same may still be equivalent.
"""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from cudiff.cuda import compiler
from cudiff.errors import CudiffError
from tests.compile_kernels import ARCHITECTURES, VARIANTS, variants
from tests.mutants import ROOT, Mutant, kernel_mutants

LIMIT = 300  # seconds for one mutant, after which it counts as another program
_NAMES = (".symtab", ".strtab", ".shstrtab", ".debug", ".note")  # sections of names, lines and the compiler's version


def architecture() -> str:
    """NVRTC's name for this machine's GPU; Hopper's where there is none. Asks no driver: that would end forking."""
    if not shutil.which("nvidia-smi"):
        return "sm_90a"
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    capability = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0].replace(".", "")
    return f"sm_{capability}a" if capability == "90" else f"sm_{capability}"


def code(cubin: bytes) -> dict[str, list[tuple]]:
    """What a cubin, an ELF file, has by the names of its sections: kind, flags, info (a kernel's registers among them),
    size and bytes. Without names of variables, lines, and the place of a section in the file."""
    (start,), (count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQ8xQQ4xI", cubin, start + 64 * i) for i in range(count)]
    found: dict[str, list[tuple]] = {}
    for name, kind, flags, offset, size, info in sections:
        first = sections[names][3] + name
        title = cubin[first : cubin.index(b"\0", first)].decode()
        if not title.startswith(_NAMES):
            held = b"" if kind == 8 else cubin[offset : offset + size]  # 8: no bytes in the file, as of shared memory
            found.setdefault(title, []).append((kind, flags, info, size, held))
    return found


def sources(tree: Path, stem: str) -> tuple[str, str]:
    """`compiler.expanded` of a kernel file of this tree."""
    with mock.patch.object(compiler, "kernel_file", lambda name: next((tree / "kernels").glob(f"*/{name}"))):
        return compiler.expanded(compiler.kernel_file(f"{stem}.cu").read_text())


@functools.lru_cache(256)
def _original(stem: str, arch: str, constants: tuple[tuple[str, str], ...]) -> dict[str, list[tuple]]:
    text = compiler.with_types(*sources(ROOT, stem), dict(constants))
    return code(compiler.compile_text(f"{stem}.cu", text, arch, dict(constants))[0])


def is_equivalent(mutant: Mutant, arch: str, limit: float = LIMIT) -> bool:
    """Whether the code is the same in all variants; False where `limit` seconds do not show it."""
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        shutil.copytree(ROOT / "kernels", tree / "kernels")
        (tree / mutant.path).write_text(mutant.apply((ROOT / mutant.path).read_text()))
        for path in sorted((tree / "kernels").glob("*/*.cu"), key=lambda path: len(VARIANTS[path.stem])):
            stem, (common, rest) = path.stem, sources(tree, path.stem)
            if (common, rest) == sources(ROOT, stem) or arch not in ARCHITECTURES[path.parent.name]:
                continue
            for constants in variants(stem, arch):
                if time.monotonic() > deadline:
                    return False
                text = compiler.with_types(common, rest, constants)
                try:
                    cubin, _ = compiler.compile_text(path.name, text, arch, constants)
                except CudiffError:
                    return False
                if code(cubin) != _original(stem, arch, tuple(constants.items())):
                    return False
    return True


def survivors(output: str) -> list[Mutant]:
    """The mutants that tests.mutate says of survived."""
    told = set(re.findall(r"^SURVIVED +[\d.]+ s  (.*)$", output, re.MULTILINE))
    return [mutant for mutant in kernel_mutants() if mutant.told in told]


def main() -> int:
    arch = architecture()
    for mutant in survivors(sys.stdin.read()):
        start = time.monotonic()
        how = "EQUIVALENT" if is_equivalent(mutant, arch) else "ANOTHER"
        print(f"{how:10} {time.monotonic() - start:5.1f} s  {mutant.told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
