"""A user's own kernels: CUDA C compiled by NVRTC, launched with checked arguments."""

from __future__ import annotations

from typing import Any

from cudiff.backend import get_cupy
from cudiff.cuda import compiler, launch
from cudiff.cuda.device import current_device
from cudiff.cuda.signature import Source

_FILE = "your_kernel.cu"


class Kernel:
    """A function of a CUDA C source, called as `kernel(grid, block, *args, T=x.dtype)`.

    source: defines functions that begin `extern "C" __global__ void`. kernels/common/common.cuh is included before it,
    with `bf16`, `half`, `i64`, `to_float` and `from_float<T>`; it may include "map.cuh" and the other headers of
    kernels/common. name: of the function; optional if there is only one.

    It may be called in a `Function`, and in a function that `capture` records. Raises ValueError for a source without
    such a function.
    """

    def __init__(self, source: str, name: str | None = None):
        self._common, self._rest = compiler.expanded(source)
        self._declared = Source(_FILE, self._common + self._rest)
        names = Source(_FILE, source).kernels
        if not names or 'extern "C"' not in source:
            raise ValueError('the source defines no kernel: begin one with extern "C" __global__ void name(...) {')
        if name is None and len(names) > 1:
            raise ValueError(f"the source defines {', '.join(names)}: give the name of one")
        self.name = name or names[0]
        if self.name not in names:
            raise ValueError(f"the source has no kernel '{self.name}' but {', '.join(names)}")
        self._launchable: dict[tuple, launch.Kernel] = {}

    def __call__(self, grid: int | tuple[int, ...], block: int | tuple[int, ...], *args: Any, shared: int = 0,
                 **constants: Any) -> None:
        """Launch on the current stream. The kernel begins when the one before has ended.

        grid, block: the number of blocks and of threads in a block, or a tuple of up to three. args: C-contiguous CuPy
        arrays, None for a null pointer, and numbers: a Python int is an `int`, a float a `float`, np.int64 an `i64`.
        shared: bytes of dynamic shared memory. constants: names that the source uses without defining them. Numbers
        become macros, dtypes become types. The source is compiled once for each set of values.

        Raises TypeError, which names the parameter, for an argument that the function does not take, and CudiffError
        with the compiler's message if the source does not compile.
        """
        named = compiler.c_names(_FILE, constants)
        key = (get_cupy().cuda.runtime.getDevice(), *sorted(named.items()))
        kernel = self._launchable.get(key)
        if kernel is None:
            text = compiler.with_types(self._common, self._rest, named)
            cubin = compiler.cubin_of(_FILE, text, current_device().architecture, named)
            function = compiler.loaded(cubin).get_function(self.name)
            signature = self._declared.signature(self.name, named)
            kernel = self._launchable[key] = launch.Kernel(function, signature, overlaps=False)
        if compiler.compiles_ahead():
            return
        grid, block = (sizes if isinstance(sizes, tuple) else (sizes,) for sizes in (grid, block))
        for arg in args:
            if hasattr(arg, "flags") and not arg.flags.c_contiguous:
                raise ValueError(f"{self.name} takes whole arrays, not a view of shape {arg.shape}: copy it first")
        kernel(grid, block, args, shared_mem=shared)

    def check(self, *args: Any, **constants: Any) -> None:
        """Raise TypeError if a call with arguments of these types would. Nothing is launched."""
        kinds, _ = launch.pack(args)
        self._declared.signature(self.name, compiler.c_names(_FILE, constants)).check(kinds)

    def compile(self, architecture: str, **constants: Any) -> str:
        """Compile for an architecture such as "sm_80", which needs no GPU. Returns the compiler's log, with registers.

        Raises CudiffError with the compiler's message if the source does not compile.
        """
        named = compiler.c_names(_FILE, constants)
        text = compiler.with_types(self._common, self._rest, named)
        return compiler.compile_text(_FILE, text, architecture, named)[1]
