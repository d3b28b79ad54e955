"""CUDA C as C++ that g++ compiles: what only CUDA's compiler knows is replaced, the rest stays as it stands."""

from __future__ import annotations

import itertools
import re
import subprocess
from typing import Any

from cudiff.cuda.compiler import CTYPES

_ALIGNED = r"(?:__attribute__\(\(aligned\((\d+)\)\)\)\s*)?"
_BRACKETS = r"\((?:[^()]|\([^()]*\))*\)"


def translated(source: str, constants: dict[str, Any], arch: int) -> str:
    """What `compiler.source` gives, compiled with these constants for an `arch` such as 900, after g++'s preprocessor.

    Its `asm` statements are calls of `emulator::ptx`, its shared variables lie in the block's shared memory, and behind
    each kernel stands an ENTRY (threads.h), with the launch bounds and the cluster that the kernel declares.
    """
    defines = {name: value for name, value in constants.items() if value not in CTYPES.values()}
    defines |= {"__CUDA_ARCH__": arch, "__align__(n)": "__attribute__((aligned(n)))"}
    options = ["-E", "-P", "-x", "c++", *(f"-D{name}={value}" for name, value in defines.items())]
    done = subprocess.run(["g++", *options, "-"], input=source, capture_output=True, text=True, check=True)
    return '#include "ptx.h"\n' + _with_entries(_with_shared(_with_calls(done.stdout)))


def _sections(text: str, start: int) -> tuple[list[str], int]:
    """The parts of an `asm` statement, whose bracket opens at `start`, between colons; and where the bracket closes."""
    bounds, depth, i = [start], 0, start
    while True:
        if text[i] == '"':
            i = re.compile(r'"(?:[^"\\]|\\.)*"').match(text, i).end() - 1
        elif text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
        if depth == 0 or (depth == 1 and text[i] == ":"):
            bounds.append(i)
        if depth == 0:
            return [text[a + 1 : b].strip() for a, b in itertools.pairwise(bounds)], i
        i += 1


def _with_calls(text: str) -> str:
    parts, at = [], 0
    for found in re.finditer(r"\basm\b\s*(?:volatile\b\s*)?\(", text):
        sections, end = _sections(text, found.end() - 1)
        operands = ", ".join(filter(None, sections[1:3]))
        values = re.sub(r'"[=+]?[a-z]"\s*(?=\()', "", operands)
        empty = sections[0] == '""'  # holds the compiler back
        parts += [text[at : found.start()], "(void)0" if empty else f"emulator::ptx<{sections[0]}>({values})"]
        at = end + 1
    return "".join(parts) + text[at:]


def _with_shared(text: str) -> str:
    text = re.sub(rf"extern\s+__shared__\s+{_ALIGNED}([\w ]+?)\s+(\w+)\[\];",
                  r"static \2*& \3 = (\2*&)emulator::dynamic_shared;", text)

    def declared(found: re.Match) -> str:
        alignment, kind, declarators = found.groups()
        lines = []
        for declarator in re.split(r",(?![^\[]*\])", declarators):
            name, extents = re.fullmatch(r"\s*(\w+)\s*(.*)", declarator, re.DOTALL).groups()
            bytes = f"sizeof({name}_type), {alignment or f'alignof({kind})'}"
            lines += [f"typedef {kind} {name}_type{extents}; static char {name}_key;",
                      f"{name}_type& {name} = *({name}_type*)emulator::static_shared(&{name}_key, {bytes});"]
        return " ".join(lines)

    return re.sub(rf"__shared__\s+{_ALIGNED}([\w<>]+(?:<[^;]*?>)?)\s+([^;]+);", declared, text)


def _with_entries(text: str) -> str:
    entries = []
    for head in re.findall(r'extern "C"\s+__global__(.*?)\{', text, re.DOTALL):
        bounds = re.search(rf"__launch_bounds__\s*({_BRACKETS})", head)
        cluster = re.search(r"__cluster_dims__\s*\((.*?)\)", head)
        name = re.search(r"(\w+)\s*\(", re.sub(rf"__(?:launch_bounds|cluster_dims)__\s*{_BRACKETS}", "", head)).group(1)
        threads = bounds.group(1)[1:-1].split(",")[0] if bounds else 1024
        entries.append(f"ENTRY({name}, {threads}, {cluster.group(1) if cluster else '1, 1, 1'})\n")
    text = re.sub(rf"__(?:launch_bounds|cluster_dims)__\s*{_BRACKETS}|__global__", "", text)
    return text + "".join(entries)
