"""Reading the state_dict in a file that `torch.save` wrote, without PyTorch and without running what the file says.

Such a file is a zip: `data.pkl` describes the tensors, `data/<key>` holds the values of each storage. A pickle is a
program for a small stack machine that may call anything. Here its opcodes are interpreted to inert records, and the
only names it may use are those that a plain state_dict needs.
"""

from __future__ import annotations

import math
import os
import pickletools
import struct
import zipfile
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import bfloat16
from cudiff.errors import CudiffError
from cudiff.files import opened

STORAGES = {
    "torch.DoubleStorage": np.dtype("<f8"), "torch.FloatStorage": np.dtype("<f4"),
    "torch.HalfStorage": np.dtype("<f2"), "torch.BFloat16Storage": bfloat16,
    "torch.LongStorage": np.dtype("<i8"), "torch.IntStorage": np.dtype("<i4"),
    "torch.ShortStorage": np.dtype("<i2"), "torch.CharStorage": np.dtype("i1"),
    "torch.ByteStorage": np.dtype("u1"), "torch.BoolStorage": np.dtype("?"),
}
_ORDERED_DICT = "collections.OrderedDict"
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_NAMESPACE = "argparse.Namespace"  # trainers keep their command lines beside the weights
_KNOWN = {_ORDERED_DICT, _REBUILD_TENSOR, _REBUILD_PARAMETER, _NAMESPACE, *STORAGES}


class _Global(NamedTuple):
    """A name from `_KNOWN`; nothing is ever imported."""

    name: str


class _Namespace:
    """The options of a command line, of which nothing is kept."""


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str
    numel: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


# A state_dict takes some 40 opcodes and 300 bytes a tensor.
_MOST_OPCODES, _LONGEST_PICKLE, _MOST_AXES = 200_000, 2**24, 32
# What zipfile raises over damaged bytes, besides its own error.
_ZIP_ERRORS = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error)


def read_torch(path: str | os.PathLike, key: str | None = None) -> dict[str, np.ndarray]:
    """The tensors of a state_dict by name, in PyTorch's layout.

    key: which part, where the file holds several state_dicts by name ("model", "ema"). Raises CudiffError where the
    file is missing, truncated or damaged, holds anything but tensors, or refers to any code.
    """
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            return _read_archive(path, archive, key)
    except _ZIP_ERRORS as error:
        raise CudiffError(
            f"{path} is truncated, or was written by PyTorch before 1.6 ({str(error)[:200]}): "
            "copy it again, or load it with PyTorch and save it again"
        ) from None


def _read_archive(path: str | os.PathLike, archive: zipfile.ZipFile, key: str | None) -> dict[str, np.ndarray]:
    files = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in files if name.endswith("/data.pkl")]
    if len(pickles) != 1 or len(files) != len(archive.infolist()):
        raise CudiffError(f"{path} is a zip file, but not one that torch.save wrote: name another file")
    if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in files.values()):
        raise CudiffError(f"{path} is compressed or encrypted, which torch.save never does: save it again with PyTorch")
    if sum(info.file_size for info in files.values()) > os.path.getsize(path):
        raise CudiffError(f"{path} is damaged: it holds more than its own size; copy it again")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in files and archive.read(f"{folder}byteorder") != b"little":
        raise CudiffError(f"{path} was written on a big-endian machine: save it again on a little-endian one")
    if files[pickles[0]].file_size > _LONGEST_PICKLE:
        raise CudiffError(f"{path} describes its tensors in over {_LONGEST_PICKLE >> 20} MiB: save a plain state_dict")
    state = _choose(path, _interpret(path, archive.read(pickles[0])), key)
    sizes = (math.prod(tensor.shape) * tensor.storage.dtype.itemsize for tensor in state.values())
    if sum(sizes) > 2 * os.path.getsize(path):  # views of one storage that are not contiguous become copies
        raise CudiffError(f"{path} is damaged: its tensors are larger than the file; copy it again")
    storages: dict[_Storage, np.ndarray] = {}
    for name, tensor in state.items():
        storage = tensor.storage
        if storage not in storages:
            info = files.get(f"{folder}data/{storage.key}")
            if info is None or info.file_size != storage.numel * storage.dtype.itemsize:
                raise CudiffError(f"{path} is damaged: the values of {name[:80]} are missing or of another size")
            storages[storage] = np.frombuffer(archive.read(info), storage.dtype)
    return {name: _view(path, name, tensor, storages[tensor.storage]) for name, tensor in state.items()}


def _view(path: str | os.PathLike, name: str, tensor: _Tensor, values: np.ndarray) -> np.ndarray:
    """A tensor out of its storage, every bound checked; read-only, and a copy only where it is not contiguous."""
    size = math.prod(tensor.shape)
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.strides, strict=True))
    if size > values.size and 0 in tensor.strides:
        raise CudiffError(f"{path}: {name[:80]} of shape {tensor.shape} repeats its values: save tensor.contiguous()")
    if size > values.size or (size and tensor.offset + reach >= values.size):
        raise CudiffError(f"{path} is damaged: {name[:80]} of shape {tensor.shape} reaches beyond its values")
    if not size:
        return np.empty(tensor.shape, values.dtype)
    strides = [stride * values.itemsize for stride in tensor.strides]
    view = np.lib.stride_tricks.as_strided(values[tensor.offset :], tensor.shape, strides, writeable=False)
    return np.ascontiguousarray(view).reshape(tensor.shape)


def _choose(path: str | os.PathLike, content: Any, key: str | None) -> dict[str, _Tensor]:
    """The state_dict that `content` is, or the one under `key` in it."""
    items = content.items() if isinstance(content, dict) else ()
    parts = {str(name): value for name, value in items if _is_state(value)}
    if key is not None:
        if key not in parts:
            raise CudiffError(f"{path} holds no state_dict '{key}': {_offer(parts)}")
        return parts[key]
    if not _is_state(content):
        raise CudiffError(f"{path} is not one plain state_dict: {_offer(parts)}")
    return content


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(
        isinstance(name, str) and isinstance(tensor, _Tensor) for name, tensor in value.items()
    )


def _offer(parts: dict[str, Any]) -> str:
    if parts:
        names = [repr(name[:40]) for name in list(parts)[:10]]
        return f"choose from its parts {', '.join(names)} with key (--key)"
    return "write one with torch.save(model.state_dict(), path)"


def _interpret(path: str | os.PathLike, program: bytes) -> Any:
    """The object that a pickle describes, made of plain containers and the records above."""
    try:
        return _Machine(path).run(program)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, UnicodeError, OverflowError) as error:
        raise CudiffError(f"{path} is damaged: its pickle makes no sense ({str(error)[:200]}); copy it again") from None


class _Machine:
    """The stack machine of pickle, as far as torch.save uses it (Python's Lib/pickletools.py says what each does)."""

    def __init__(self, path: str | os.PathLike):
        self.path = path
        self.stack: list[Any] = []
        self.marks: list[int] = []  # how high the stack was at each
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(program)):
            if count == _MOST_OPCODES:
                raise CudiffError(f"{self.path} holds more than a state_dict would: save only the weights")
            if opcode.name == "STOP":
                return self.stack.pop()
            if opcode.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _LITERALS:
                self.stack.append(argument)
            else:
                step = getattr(self, f"op_{opcode.name.lower()}", None)
                if step is None:
                    raise CudiffError(f"{self.path} uses the pickle opcode {opcode.name}, which no state_dict needs")
                step(argument)
        raise ValueError("it does not end")

    def op_proto(self, version: int) -> None: ...

    def op_frame(self, length: int) -> None: ...

    def op_mark(self, _: None) -> None:
        self.marks.append(len(self.stack))

    def op_empty_dict(self, _: None) -> None:
        self.stack.append({})

    def op_empty_list(self, _: None) -> None:
        self.stack.append([])

    def op_memoize(self, _: None) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def op_binput(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    op_long_binput = op_binput

    def op_binget(self, index: int) -> None:
        self.stack.append(self.memo[index])

    op_long_binget = op_binget

    def op_tuple(self, _: None) -> None:
        self.stack.append(tuple(self.pop_to_mark()))

    def op_tuple1(self, _: None) -> None:
        self.stack[-1:] = [(self.stack[-1],)]

    def op_tuple2(self, _: None) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def op_tuple3(self, _: None) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def op_append(self, _: None) -> None:
        self.extend([self.stack.pop()])

    def op_appends(self, _: None) -> None:
        self.extend(self.pop_to_mark())

    def op_setitem(self, _: None) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.update([key, value])

    def op_setitems(self, _: None) -> None:
        self.update(self.pop_to_mark())

    def op_global(self, names: str) -> None:
        self.find(names.replace(" ", ".", 1))

    def op_stack_global(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name that is no text")
        self.find(f"{module}.{name}")

    def op_binpersid(self, _: None) -> None:
        kind, storage, key, _location, numel = self.stack.pop()
        if kind != "storage" or storage.name not in STORAGES or type(key) is not str:
            raise ValueError("a reference to something other than a storage")
        self.stack.append(_Storage(STORAGES[storage.name], key, _sizes(numel)[0]))

    def op_reduce(self, _: None) -> None:
        """A call, of one of the three functions that a state_dict needs."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if function.name == _ORDERED_DICT and arguments == ():
            self.stack.append({})
        elif function.name == _REBUILD_TENSOR:
            storage, offset, shape, strides = arguments[:4]
            if len(arguments) > 6 and arguments[6]:  # {"neg": True}, {"conj": True}
                raise ValueError("a view whose values are to be negated: save tensor.resolve_neg()")
            if type(storage) is not _Storage or not len(shape) == len(strides) <= _MOST_AXES:
                raise ValueError("a tensor without a storage or with strides that do not fit")
            self.stack.append(_Tensor(storage, _sizes(offset)[0], _sizes(*shape), _sizes(*strides)))
        elif function.name == _REBUILD_PARAMETER and type(arguments[0]) is _Tensor:
            self.stack.append(arguments[0])
        else:
            raise ValueError("a call with other arguments than usual")

    def op_newobj(self, _: None) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if kind.name != _NAMESPACE or arguments != ():
            raise ValueError("an object of another kind than usual")
        self.stack.append(_Namespace())

    def op_build(self, _: None) -> None:
        """Attributes of an object: the version numbers that state_dict() adds, or options of a command line."""
        attributes, target = self.stack.pop(), self.stack[-1]
        if type(target) is _Namespace and type(attributes) is dict:
            return
        if type(target) is not dict or type(attributes) is not dict or set(attributes) != {"_metadata"}:
            raise ValueError("attributes of something other than a state_dict")

    def find(self, name: str) -> None:
        if name not in _KNOWN:
            raise CudiffError(
                f"{self.path} refers to {name[:80]!r}, and cudiff runs no code out of files: "
                "save only the weights, torch.save(model.state_dict(), path)"
            )
        self.stack.append(_Global(name))

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        if start > len(self.stack):
            raise ValueError("a mark that is gone")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("entries for something other than a list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        if type(target) is not dict or not all(type(key) in (str, int) for key in keys):
            raise ValueError("entries for something other than a dict, or under strange names")
        target.update(zip(keys, items[1::2], strict=True))


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
}


def _sizes(*numbers: Any) -> tuple[int, ...]:
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError("sizes that are none")
    return numbers
