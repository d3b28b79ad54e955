"""Messages between the processes of a run, and the watch over them. Process 0 listens, each other one calls it.

A message is a line of JSON; nothing else is read. Between processes of one machine it stays on loopback.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import selectors
import socket
import sys
import threading
import time
from typing import Any, NoReturn

from cudiff.distributed.launch import LAUNCHER, LOOPBACK, Place
from cudiff.errors import CudiffError

TICK = 0.2
"""Seconds between two looks at who is still there."""

HALT = 1.0
"""Seconds without a look after which this process, and the others with it, may have been halted."""

WORD = 2.0
"""Seconds in which who has lost another waits for the cause, and an answer is waited for."""

PORTS = 16
LONGEST = 2**20


def listen(place: Place, port: int | None = None) -> socket.socket:
    """Process 0's socket, at the first free one of the `PORTS` after the place's port, which torchrun holds itself."""
    host = LOOPBACK if place.local_size == place.size else place.address
    for candidate in range(place.port + 1, place.port + 1 + PORTS) if port is None else (port,):
        with contextlib.suppress(OSError, UnicodeError, OverflowError):  # what is no name, and beyond the last port
            return socket.create_server((host, candidate), backlog=place.size)
    raise CudiffError(f"process 0 cannot listen at {host}, ports {place.port + 1} to {place.port + PORTS}: set "
                      "MASTER_ADDR to a name of its machine and MASTER_PORT to a number before free ones")


def accept(server: socket.socket, place: Place, timeout: float) -> dict[int, socket.socket]:
    """The connections of all other processes, by rank. Raises CudiffError where some do not come."""
    found: dict[int, socket.socket] = {}
    until = time.monotonic() + timeout
    with server:
        while len(found) < place.size - 1:
            server.settimeout(max(0.1, until - time.monotonic()))
            try:
                caller, _ = server.accept()
            except TimeoutError:
                missing = sorted({*range(1, place.size)} - {*found})
                raise CudiffError(f"processes {missing} of {place.size} did not come within {timeout:.0f} s") from None
            rank = _greeting(caller, place)
            if rank is None or rank in found:
                caller.close()
                continue
            caller.sendall(_line({"welcome": place.job}))
            found[rank] = caller
    return found


def call(place: Place, timeout: float) -> dict[int, socket.socket]:
    """The connection to process 0, which may not be there yet. Raises CudiffError where it does not answer."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        for port in range(place.port + 1, place.port + 1 + PORTS):
            with contextlib.suppress(OSError, ValueError, OverflowError):
                caller = socket.create_connection((place.address, port), WORD)
                caller.sendall(_line({"cudiff": place.job, "rank": place.rank, "size": place.size}))
                if json.loads(_one_line(caller)) == {"welcome": place.job}:
                    return {0: caller}
                caller.close()
        time.sleep(0.1)
    raise CudiffError(f"process 0 did not answer at {place.address}, ports {place.port + 1} to {place.port + PORTS}, "
                      f"within {timeout:.0f} s: is MASTER_ADDR its machine's name?")


def _greeting(caller: socket.socket, place: Place) -> int | None:
    """The rank of who calls; None for a stranger."""
    caller.settimeout(WORD)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        words = json.loads(_one_line(caller))
        rank = words.get("rank")
        ours = (words.get("cudiff"), words.get("size")) == (place.job, place.size)
        if ours and type(rank) is int and 0 < rank < place.size:
            return rank
    return None


def _one_line(caller: socket.socket) -> bytes:
    """A line of up to 1000 bytes, read so that nothing after it is taken."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 1000 and (byte := caller.recv(1)):
        line += byte
    return line


def _line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Wire:
    """The connections of a process, and a thread that watches them.

    A process that is gone, one that has failed, one that while `armed` makes no `beat` for `timeout` seconds and a
    launcher that is gone end all: every process leaves by `os._exit`, whatever its main thread waits for, and the first
    cause is told once, by process 0 where it is there. What `litter` names is removed before.
    """

    def __init__(self, place: Place, sockets: dict[int, socket.socket], timeout: float):
        self.place, self.timeout, self._sockets = place, timeout, sockets
        self._inbox: dict[int, queue.SimpleQueue] = {rank: queue.SimpleQueue() for rank in sockets}
        self._lost: dict[int, float] = {}
        self._failing: tuple[float, int, str] | None = None
        self._sending, self._telling = threading.Lock(), threading.Lock()
        self.armed = self._closed = self._waits = False
        self._told = 0.0
        self.litter: list[str] = []
        for connection in sockets.values():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.beat()
        self._thread = threading.Thread(target=self._watch, name="cudiff.distributed", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def beat(self) -> None:
        """Say that the main thread goes on. Process 0 tells the others, which wait while it alone draws a preview."""
        self._beat = now = time.monotonic()
        if self.armed and self.place.rank == 0 and now > self._told + TICK:
            self._told = now
            for rank in self._sockets:
                self._send(rank, {"beat": None})

    def exchange(self, value: Any, last: bool = False) -> list[Any]:
        """What every process gave, by rank; waits for all. value: anything that JSON holds. After the `last` exchange
        nobody watches any more."""
        json.dumps(value)  # what it does not hold is told before anybody waits for it
        self._waits = True
        if self.place.rank:
            self._send(0, {"value": value, "last": last})
            values = self._inbox[0].get()
        else:
            found = {rank: self._inbox[rank].get() for rank in range(1, self.place.size)}
            for rank, message in found.items():
                if message["last"] != last:
                    left, other = (0, rank) if last else (rank, 0)
                    self.fail(2, f"cudiff: process {left} of {self.place.size} has left the group, by close() or the "
                                 f"end of its block, and process {other} works on: all make the same calls")
            values = [value, *(message["value"] for message in found.values())]
            for rank in self._sockets:
                self._send(rank, {"values": values, "last": last})
            self._closed = last
        self._waits = False
        self.beat()
        return values

    def close(self) -> None:
        """Part from the others, once all have come here."""
        self.exchange(None, last=True)
        self._thread.join()
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """The program ends without `close`: say so, as MPI has a process wait for all others before it ends."""
        if getattr(sys, "last_value", None) is not None:
            self.fail(1, "")  # its traceback is told
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def fail(self, code: int, text: str) -> NoReturn:
        """End all processes with an exit code; `text` is told unless another one has failed before."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()  # `os._exit` does not
        self._begin_to_fail(code, text)
        threading.Event().wait()  # the watch ends the process
        raise AssertionError

    def _begin_to_fail(self, code: int, text: str) -> None:
        if self.place.rank == 0:
            self._end(code, text)
        if self._failing is None:
            self._failing = time.monotonic() + WORD, code, text
            self._send(0, {"failed": [code, text]})

    def _end(self, code: int, text: str) -> NoReturn:
        """Tell `text` and leave, and on process 0 have the others leave.

        They leave after it is told and at the same time: mpiexec throws away what a process says after another one has
        ended, and kills who is late, whose 9 is then the exit code.
        """
        self._telling.acquire()  # and keep it: the first cause alone is told
        with contextlib.suppress(OSError, ValueError):
            if sys.stdout.isatty():
                os.write(1, b"\r\x1b[?25h")  # rich hides the cursor while it shows a bar
            os.write(2, f"{text}\n".encode(errors="replace") if text else b"")
        if self.place.rank == 0:
            for rank in self._sockets:
                self._send(rank, {"end": code})
        self._exit(code)

    def _exit(self, code: int) -> NoReturn:
        for path in self.litter:
            with contextlib.suppress(OSError):
                os.unlink(path)
        os._exit(code)

    def _send(self, rank: int, message: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # who is gone is noticed by reading
            self._sockets[rank].sendall(_line(message))

    def _watch(self) -> None:
        rests = dict.fromkeys(self._sockets, b"")
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            looked = time.monotonic()
            while not self._closed:
                for key, _ in selector.select(TICK):
                    rank, data = key.data, b""
                    with contextlib.suppress(OSError):
                        data = self._sockets[rank].recv(65536)
                    if not data or len(rests[rank]) > LONGEST:
                        selector.unregister(key.fileobj)
                        self._lost[rank] = time.monotonic()
                    *lines, rests[rank] = (rests[rank] + data).split(b"\n")
                    for line in lines:
                        self._take(rank, json.loads(line))
                now = time.monotonic()
                if now > looked + HALT:
                    self._beat = min(now, self._beat + now - looked)
                looked = now
                self._look(now)
        for connection in self._sockets.values():
            connection.close()

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if "end" in message:
            self._exit(message["end"])
        elif "failed" in message:
            self._end(*message["failed"])
        elif "values" in message:
            self._closed = message["last"]
            self._inbox[rank].put(message["values"])
        elif "beat" in message:
            self.beat()
        else:
            self._inbox[rank].put(message)

    def _look(self, now: float) -> None:
        """End the process where something is wrong."""
        if self._closed:
            return
        if LAUNCHER in os.environ and str(os.getppid()) != os.environ[LAUNCHER]:
            self._exit(1)
        if self._failing is not None and now > self._failing[0]:
            self._end(*self._failing[1:])
        for rank, since in self._lost.items():
            if now > since + WORD:
                self._end(1, f"cudiff: process {rank} of {self.place.size} ended without a word, as one does that the "
                             "system kills where memory runs out")
        # Who waits for another lets that one speak first.
        if self.armed and self._failing is None and now > self._beat + self.timeout + WORD * self._waits:
            stuck = next((rank for rank, values in self._inbox.items() if values.empty()), 0)
            who = f"process {stuck if self._waits else self.place.rank} of {self.place.size}"
            self._begin_to_fail(2, f"cudiff: {who} went no step further for {self.timeout / 60:.3g} minutes "
                                   "(--timeout): go on with --resume")
