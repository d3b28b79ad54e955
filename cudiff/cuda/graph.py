"""Graph capture: a function's kernels are recorded once as a CUDA graph and replayed, which saves the host's time for
each launch."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cudiff.backend import Array, get_cupy
from cudiff.cuda.compiler import compiling_ahead
from cudiff.cuda.exchange import release_workspace
from cudiff.cuda.memory import Arena
from cudiff.errors import CudiffError
from cudiff.function import reads_noted
from cudiff.precision import tf32_allowed
from cudiff.tensor import Tensor, grad_enabled

_mode = threading.local()
_state = 0  # counts the changes that invalidate recordings


def record_again() -> None:
    """Invalidate all recordings: each captured function is recorded anew at its next call. To be called when something
    changes that Python may branch on in one. Does nothing inside a captured function: changes there are replayed.
    """
    global _state
    if not getattr(_mode, "busy", False):
        _state += 1


def recording_state() -> int:
    """A number that `record_again` changes. A graph recorded at another number is not launched again."""
    return _state


_FORBIDDEN = (
    "the function cannot be captured: in it nothing may be read from the GPU (.item(), .numpy(), if on a tensor), "
    "copied to it, or waited for"
)


def capture(fn: Callable, warmup: int | Callable = 3, device: str | None = None, precompile: bool = False) -> Captured:
    """Record `fn` as one CUDA graph. Its results are the same, and a call takes the host the time of one launch.

    The first `warmup` calls run `fn` eagerly, so that kernels are compiled and memory is allocated. The next call
    records a graph and launches it. Later calls launch the graph. Every call does the work of one call of `fn`. On the
    CPU `fn` is simply called.

    Parameters
    ----------
    fn : callable
        Takes Tensors (or None), positionally. It may change tensors that it holds (parameters, counters), in place.
        It must not read from the device (`.item()`, `.numpy()`), nor copy host arrays there. Python does not run in a
        replay: numbers and branches stay as recorded, and what changes from call to call has to be in tensors.
        If it uses a second stream, it has to keep that stream's arrays until the stream has joined, and the stream
        until it returns: memory and streams are reused as soon as Python frees them.
    warmup : int, at least 1, or callable
        A number of calls, or a function that replaces them: it is called once with `fn`'s arguments, its result is
        dropped, and the first call records. It has to launch all kernels of `fn`, and create what `fn` keeps for later.
    device : {"cpu", "cuda"}, optional
        The default is the device of the tensors passed. Required if `fn` is called without tensors.
    precompile : bool
        Before the first call, run `fn` or the function `warmup` once without work on the GPU, to compile all kernels in
        parallel: those of a training step of the U-Net take 3 s on 16 cores, 19 s on one. Use it only for a function
        that keeps no Python state between calls: gradients have to exist already (`Module.flatten`).

    Returns
    -------
    Captured
        Called as `fn` is. It keeps one graph for each combination of argument shapes, dtypes and `allow_tf32`; each has
        its own warm-up. Arguments are copied to the graph's inputs. Once recorded, the result is always the same
        object, overwritten by the next call.
        Every graph is warmed up and recorded anew after one of these changes outside a captured function: a parameter
        was frozen, thawed, moved or replaced; 16-bit weights were assigned; a module's attribute was set to another
        value; of a tensor that `fn` read, such as a buffer, `data` were set.

    Raises CudiffError if `fn` does what cannot be captured or changes an argument, for a captured function called
    within another, and on a GPU for an argument whose gradient is recorded: a graph reads a copy of it.
    """
    return Captured(fn, warmup, device, precompile)


class Captured:
    """A function and its graphs; see `capture`."""

    def __init__(self, fn: Callable, warmup: int | Callable = 3, device: str | None = None, precompile: bool = False):
        if not callable(warmup) and warmup < 1:
            raise ValueError("capture needs at least 1 warm-up call: kernels are compiled in it")
        self.fn, self.warmup, self.device, self.precompile = fn, warmup, device, precompile
        self._recordings: dict[tuple, _Recording] = {}

    def __call__(self, *args: Tensor | None) -> Any:
        return self.fn(*args) if self._device(args) == "cpu" else self._recording(args)(args)

    def needs(self, *args: Tensor | None) -> tuple[int, bool]:
        """Bytes of GPU memory that the graph for such arguments takes, and whether the GPU has them.

        Requires `precompile`, which finds both before the first call, without a launch. Returns 0 bytes on the CPU, and
        if precompiling failed, as the real recording may too.
        """
        if self._device(args) == "cpu":
            return 0, True
        recording = self._recording(args)
        return recording.needed, recording.fits

    def _recording(self, args: tuple[Tensor | None, ...]) -> _Recording:
        """The recording for such arguments, made now if there is none or it was invalidated."""
        if getattr(_mode, "busy", False):
            raise CudiffError("a captured function was called within another: capture the outer one only")
        if grad_enabled() and any(arg is not None and arg.requires_grad for arg in args):
            raise CudiffError(
                "an argument of a captured function requires a gradient, which a graph would not give it: call it "
                "within cudiff.no_grad() or with x.detach(), and take gradients inside of the function"
            )
        signature = (tf32_allowed(), *(None if arg is None else (arg.shape, arg.dtype) for arg in args))
        if signature not in self._recordings or not self._recordings[signature].is_current():
            self._recordings[signature] = _Recording(self.fn, self.warmup)
            if self.precompile:
                self._recordings[signature].precompile(args)
        return self._recordings[signature]

    def forget(self) -> None:
        """Drop the graphs and their memory; the next call warms up and records anew."""
        self._recordings.clear()

    @property
    def pool_bytes(self) -> int:
        """Bytes of GPU memory that the graphs hold for arrays made in them. It does not shrink."""
        return sum(recording.arena.total_bytes() for recording in self._recordings.values())

    def _device(self, args: tuple[Tensor | None, ...]) -> str:
        for arg in args:
            if arg is not None and not isinstance(arg, Tensor):
                kind = type(arg).__name__
                raise CudiffError(f"a captured function takes Tensors, not {kind}: a graph would freeze its value")
        devices = {arg.device for arg in args if arg is not None} | ({self.device} if self.device else set())
        if len(devices) != 1:
            what = "tensors of different devices" if devices else "no Tensor: name its device, capture(fn, device=...)"
            raise CudiffError(f"a captured function got {what}")
        return devices.pop()


class _Recording:
    """The state of one signature: stream, arena, the number of eager calls left, and the graph once it is recorded."""

    needed, fits = 0, True  # set by `precompile`: bytes of its arena, and whether the GPU has them
    read: Sequence[tuple[weakref.ref[Tensor], Array]] = ()  # tensors that are there after `fn`, and their arrays

    def __init__(self, fn: Callable, warmup: int | Callable):
        cuda = get_cupy().cuda
        self.fn, self.state = fn, _state
        self.eager_calls = 0 if callable(warmup) else warmup
        self.warmup = warmup if callable(warmup) else None  # None once it has run
        # Non-blocking: a stream that synchronises with the default one would, while capturing, forbid all work there.
        self.stream = cuda.Stream(non_blocking=True)
        self.before, self.after = (cuda.Event(disable_timing=True) for _ in range(2))
        self.arena = Arena()
        weakref.finalize(self, release_workspace, cuda.runtime.getDevice(), self.stream.ptr).atexit = False
        self.graph: Any = None
        self.inputs: list[Tensor | None] = []
        self.result: Any = None

    def __call__(self, args: tuple[Tensor | None, ...]) -> Any:
        if self.eager_calls > 0:
            self.eager_calls -= 1
            before = [None if arg is None else arg.data for arg in args]
            with self._private():
                result = self.fn(*args)
            if any(arg is not None and arg.data is not array for arg, array in zip(args, before, strict=True)):
                raise CudiffError("a captured function changed an argument, which a graph has a copy of: let it hold "
                                  "the tensor that it changes, or return new values")
            return result
        if self.warmup is not None:
            with self._private():
                self.warmup(*args)
            self.warmup = None
        if self.graph is None:
            self._record(args)
        for static, arg in zip(self.inputs, args, strict=True):
            if static is not None and arg is not None and static.data is not arg.data:
                static.data[...] = arg.data
        self.graph.launch()  # on the caller's stream: in order with its other work
        return self.result

    def is_current(self) -> bool:
        """Whether nothing has changed that a graph does not follow: `record_again`, and arrays of what it reads."""
        return self.state == _state and all([getattr(ref(), "_data", array) is array for ref, array in self.read])

    def _run(self) -> None:
        with reads_noted() as found:
            self.result = self.fn(*self.inputs)
        self.read = list({id(x): (ref, x._data) for ref in found if (x := ref()) is not None}.values())

    def precompile(self, args: tuple[Tensor | None, ...]) -> None:
        """Compile the kernels under a capture that is discarded. Its arrays show how much memory the real one takes.
        Errors are ignored: the real call raises them."""
        self.arena.precompiling = True
        with self._private(), contextlib.suppress(Exception):
            inputs = self._like(args)
            self.stream.begin_capture()
            try:
                with compiling_ahead():
                    (self.warmup or self.fn)(*inputs)
                self.needed = self.arena.needed
            finally:
                self.stream.end_capture()
        self.arena.precompiling = False
        self.fits = self.arena.needed <= self.arena.total_bytes()
        if not self.fits:
            self.needed = self.arena.needed  # a lower bound if `fn` failed
            self.arena = Arena()  # drop the addresses without memory; the real call raises

    def _like(self, args: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Tensors that a graph reads in place of the arguments, uninitialised."""
        return [None if x is None else Tensor(get_cupy().empty_like(x.data)) for x in args]

    def _record(self, args: tuple[Tensor | None, ...]) -> None:
        with self._private():
            self.inputs = self._like(args)
            self.stream.begin_capture()
            try:
                self._run()
            except BaseException as error:
                with contextlib.suppress(RuntimeError):  # the error has invalidated the capture: this only ends it
                    self.stream.end_capture()
                if "captur" in str(error).lower() and not isinstance(error, CudiffError):
                    raise CudiffError(_FORBIDDEN) from error
                raise
            try:
                self.graph = self.stream.end_capture()
            except RuntimeError as error:
                raise CudiffError(_FORBIDDEN) from error

    @contextlib.contextmanager
    def _private(self) -> Iterator[None]:
        """Use this recording's own stream and memory, in order with the caller's work before and after."""
        cuda = get_cupy().cuda
        caller = cuda.get_current_stream()
        self.before.record(caller)
        self.stream.wait_event(self.before)
        _mode.busy = True
        try:
            with self.stream, cuda.using_allocator(self.arena.allocate):
                yield
        finally:
            _mode.busy = False
            self.after.record(self.stream)
            caller.wait_event(self.after)
