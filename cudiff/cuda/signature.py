"""The parameters of each kernel, parsed from its source, and the check of a launch's arguments against them.

A launch passes only addresses and bytes: without the check a kernel would read an array of another dtype as its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import bfloat16, float16, float32, int32, int64

Kind = Any
"""The type of an argument: a GPU array's dtype, a struct's number of bytes, otherwise the Python type."""

_ELEMENTS: dict[str, tuple[np.dtype, ...]] = {
    "float": (float32,), "float2": (float32,), "bf16": (bfloat16,), "half": (float16,), "int": (int32,),
    "u32": (np.dtype(np.uint32), int32), "i64": (int64,), "u8": (np.dtype(np.uint8), np.dtype(np.bool_)),
}
"""The array dtypes that a pointer to each C type accepts. A pointer to another C type accepts every dtype."""

_VALUES: dict[str, tuple[type, ...]] = {
    "int": (int, bool, np.bool_, np.int32), "u32": (np.uint32,), "i64": (np.int64,), "u64": (np.uint64,),
    "float": (float, np.float32), "double": (np.float64,),
}
_SIZES = {"int": 4, "u32": 4, "i64": 8, "u64": 8, "float": 4, "double": 8, "u8": 1, "bf16": 2, "half": 2}


class Parameter(NamedTuple):
    """A kernel's parameter: a value of the C type `type`, or a pointer to such values. bytes: its own size."""

    name: str
    type: str
    pointer: bool
    bytes: int

    def accepts(self, kind: Kind) -> bool:
        if self.pointer:
            takes = _ELEMENTS.get(self.type)
            return kind is type(None) or (isinstance(kind, np.dtype) and (takes is None or kind in takes))
        if self.type in _VALUES:
            return isinstance(kind, type) and kind in _VALUES[self.type]
        return type(kind) is int and kind == self.bytes

    def __str__(self) -> str:
        if self.pointer:
            takes = " or ".join(map(str, _ELEMENTS.get(self.type, ())))
            return f"an array of {takes}" if takes else "an array"
        values = " or ".join(_named(t) for t in _VALUES.get(self.type, ()))
        return values or f"a struct of {self.bytes} bytes"


def _named(kind: Kind) -> str:
    if isinstance(kind, np.dtype):
        return f"an array of {kind}"
    if type(kind) is int:
        return f"{kind} bytes of the host"
    if kind is type(None):
        return "None"
    return f"np.{kind.__name__}" if issubclass(kind, np.generic) else f"a Python {kind.__name__}"


class Signature(NamedTuple):
    """A kernel's file, name and parameters."""

    file: str
    name: str
    parameters: tuple[Parameter, ...]

    def check(self, kinds: Sequence[Kind]) -> None:
        """Raises TypeError if the kernel does not take arguments of these kinds."""
        if len(kinds) != len(self.parameters):
            raise TypeError(f"{self} takes {len(self.parameters)} arguments, not {len(kinds)}")
        for parameter, kind in zip(self.parameters, kinds, strict=True):
            if not parameter.accepts(kind):
                raise TypeError(f"{self} takes {parameter} for '{parameter.name}', not {_named(kind)}")

    def out_of_range(self, values: Sequence[Any]) -> OverflowError:
        """The error for arguments of the right kinds of which a value is out of range."""
        for parameter, value in zip(self.parameters, values, strict=True):
            if parameter.type == "int" and not parameter.pointer and not -(2**31) <= value < 2**31:
                return OverflowError(f"{self} takes 32 bits for '{parameter.name}': {value} does not fit")
        return OverflowError(f"{self} got a number that does not fit: {values}")

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


class Source:
    """The kernels of a file with its own headers expanded. A constant may define a parameter's type, such as T."""

    def __init__(self, file: str, text: str):
        text = re.sub(r"//.*", "", text).replace("\\\n", " ")
        self._file = file
        self._macros = dict(re.findall(r"^#define (\w+) (.*)", text, re.MULTILINE))
        self._structs = {name: (int(align or 1), fields) for align, name, fields in re.findall(_STRUCT, text)}
        self._calls: dict[str, str] = {}  # for each kernel that a macro defines, the start of the call
        self._heads = dict(re.findall(_KERNEL, re.sub(_MACRO, "", text)))
        for macro, parameter, body in re.findall(_MACRO, text):
            for name in re.findall(rf"^{macro}\((\w+)", text, re.MULTILINE):
                heads = re.findall(_KERNEL, re.sub(rf"\b{parameter}(##|\b)", name, body))
                self._heads.update(heads)
                self._calls.update((kernel, f"{macro}({name},") for kernel, _ in heads)

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels."""
        return list(self._heads)

    def call_of(self, kernel: str) -> str:
        """The start of the macro call that defines this kernel; "" for a kernel defined without a macro."""
        return self._calls.get(kernel, "")

    def with_one_call(self, text: str, call: str) -> str:
        """`text` without the macro calls that define kernels, except `call`."""
        others = tuple(set(self._calls.values()) - {call})
        return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(others))

    def signature(self, name: str, constants: dict[str, Any]) -> Signature:
        """The signature of the kernel `name` compiled with these constants. Raises ValueError if the file has none."""
        if name not in self._heads:
            raise ValueError(f"{self._file} has no kernel '{name}' but {', '.join(self._heads)}")
        head, expanded = self._heads[name], ""
        while head != expanded:
            head, expanded = re.sub(r"\w+", lambda word: self._macros.get(word[0], word[0]), head), head
        parameters = (self._parameter(words, constants) for words in head.split(","))
        return Signature(self._file, name, tuple(parameters))

    def _parameter(self, text: str, constants: dict[str, Any]) -> Parameter:
        type, pointer, name = _declared(text)
        type = str(constants.get(type, type))
        return Parameter(name, type, pointer, 8 if pointer else self._layout(type, constants)[0])

    def _layout(self, type: str, constants: dict[str, Any]) -> tuple[int, int]:
        """The size and the alignment in bytes of a value of a C type."""
        if type in _SIZES:
            return _SIZES[type], _SIZES[type]
        align, fields = self._structs[type]
        end = 0
        for field in filter(str.strip, fields.split(";")):
            first, *more = field.split(",")
            type, _, _ = _declared(first)
            for text in (first, *(f"{type} {name}" for name in more)):
                _, pointer, name = _declared(text)
                size, unit = (8, 8) if pointer else self._layout(type, constants)
                _, *count = name.rstrip("]").split("[")
                end = -(-end // unit) * unit + size * (int(constants.get(count[0], count[0])) if count else 1)
                align = max(align, unit)
        return -(-end // align) * align, align


# Only a struct's data members are matched. They come before its functions.
_STRUCT = re.compile(r"struct (?:__align__\((\d+)\) )?(\w+) \{([^{}]*?)(?:__device__|\})")
_MACRO = re.compile(r"^#define (\w+)\((\w+).*?\) +(.*__global__.*)", re.MULTILINE)
_KERNEL = re.compile(r"__global__[^{;]*?(\w+)\(([^()]*)\)\s*\{")


def _declared(text: str) -> tuple[str, bool, str]:
    """Of a declaration: the type, whether it is a pointer to it, and the name."""
    words = re.sub(r"\b(const|__restrict__|__grid_constant__)\b", " ", text)
    type, name = words.replace("*", " ").rsplit(maxsplit=1)
    return type.strip(), "*" in words, name
