"""The one job at a time: a thread that draws what the players wish for, in turns."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cudiff.backend import out_of_memory_errors
from cudiff.errors import CudiffError
from cudiff.play.messages import Wish
from cudiff.plot import grid

Deliver = Callable[[dict[str, Any], bytes | None], None]


class Superseded(Exception):
    """A newer wish has come, or nobody is there any more."""


class Player:
    """What one connection wishes for. deliver(answer, png) is called by the worker's thread."""

    def __init__(self, deliver: Deliver):
        self.deliver = deliver
        self.wish: Wish | None = None  # the newest that is not done
        self.picture: np.ndarray | None = None
        self.fresh_picture = False  # a moving wish begins with it once
        self.shown: np.ndarray | None = None
        self.stream: Any = None
        self.go_on: Callable[[int], None] = lambda step: None  # called between steps; raises Superseded
        self.gone = False


class Worker:
    """Draws with a pipeline, `n` pictures a wish, for any number of players, a frame of each in turn.

    A player's newer wish takes the place of the one that waits and stops the one that runs, between two steps. A player
    that has left is forgotten in the same way. A mistake is delivered as {"error": line}.
    """

    def __init__(self, pipeline: Any, n: int):
        self.pipeline, self.n = pipeline, n
        self._players: list[Player] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cudiff play", daemon=True)
        self._thread.start()

    def join(self, player: Player) -> None:
        with self._changed:
            self._players.append(player)

    def leave(self, player: Player) -> None:
        with self._changed:
            player.gone, player.wish = True, None
            self._players.remove(player)

    def ask(self, player: Player, wish: Wish) -> None:
        with self._changed:
            player.wish = wish
            self._changed.notify()

    def show(self, player: Player, picture: np.ndarray | None) -> None:
        """Begin with this picture from the next wish on, uint8 (H, W, C), or with none."""
        with self._changed:
            player.picture, player.fresh_picture = picture, picture is not None

    def close(self) -> None:
        """Stop what runs between two steps, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            self._draw(*turn)

    def _next(self) -> tuple[Player, Wish] | None:
        """Whose turn it is, and goes to the end of the line; None at the end."""
        with self._changed:
            while not self._closed:
                for player in self._players:
                    if player.wish is not None:
                        self._players.remove(player)
                        self._players.append(player)
                        return player, player.wish
                self._changed.wait()
        return None

    def _draw(self, player: Player, wish: Wish) -> None:
        def go_on(step: int) -> None:
            if self._closed or player.gone or player.wish is not wish:
                raise Superseded

        player.go_on = go_on
        start = time.perf_counter()
        try:
            player.shown = (self._frame if wish.moving else self._pictures)(player, wish)
            content = io.BytesIO()
            grid(player.shown, scale=1, gap=1).save(content, "PNG", compress_level=1)
            go_on(0)
        except Superseded:
            return
        except Exception as error:
            player.stream, what = None, f"unexpected {type(error).__name__}"
            if isinstance(error, CudiffError):
                what = str(error)
            elif isinstance(error, out_of_memory_errors()):
                what = "out of memory: use a smaller -n"
            player.deliver({"error": what, "number": wish.number}, None)
            self._done(player, wish)
            return
        milliseconds = round(1000 * (time.perf_counter() - start), 1)
        player.deliver({"number": wish.number, "milliseconds": milliseconds}, content.getvalue())
        if not wish.moving:
            self._done(player, wish)

    def _done(self, player: Player, wish: Wish) -> None:
        with self._changed:
            if player.wish is wish:
                player.wish = None

    def _options(self, wish: Wish) -> dict[str, Any]:
        conditional = self.pipeline.config.num_classes > 0
        return {"seed": wish.seed, "classes": wish.label, "steps": wish.steps,
                "guidance": wish.guidance if conditional else None}

    def _pictures(self, player: Player, wish: Wish) -> np.ndarray:
        """A sampling of its own, from the player's picture where there is one."""
        player.stream = None
        given = {} if player.picture is None else {"init": player.picture, "strength": wish.strength}
        return self.pipeline.sample(self.n, batch_size=self.n, each_step=player.go_on, **self._options(wish), **given)

    def _frame(self, player: Player, wish: Wish) -> np.ndarray:
        """The next frame in time; the first begins with the player's picture, or what is shown."""
        begin, options = None, self._options(wish) | {"strength": wish.strength}
        if player.stream is None:
            player.stream = self.pipeline.stream(self.n, **options, each_step=lambda step: player.go_on(step))
            begin = player.shown
        player.stream.change(**options)
        if player.fresh_picture:
            begin, player.fresh_picture = player.picture, False
        return player.stream.frame(begin)
