"""An option of a configuration: its default, which gives its type, its help and the values that it takes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudiff.errors import CudiffError
from cudiff.values import real


@dataclass(frozen=True)
class Option:
    """default: its type is the option's, int, float, bool, str or a tuple of numbers or texts. help: for `--help`.

    choices: the texts that it takes. least, most, above, below: bounds of a number, or of each entry of a tuple; those
    of a float hold in float32 too, see `values.real`.
    entries: the type of a tuple's entries, where the default has none. fixed: a resumed run cannot change it.
    Raises CudiffError for a default of another type, and for choices or bounds of what has none.
    """

    default: Any
    help: str
    choices: Collection[str] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    entries: type = int
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _NOUNS and self.kind not in _METAVARS:
            raise CudiffError(
                f"an option's default is a number, true or false, text or a tuple of numbers or texts, not "
                f"{self.default!r}"
            )
        several = isinstance(self.choices, Collection) and not isinstance(self.choices, str)
        texts = several and all(isinstance(choice, str) for choice in self.choices)
        if not texts or (self.choices and self.kind is not str):
            raise CudiffError(f"an option's choices are a list of texts, and its default is text, not {self.choices!r}")
        bounds = (self.least, self.most, self.above, self.below)
        if self.kind in (str, bool, (tuple, str)) and any(bound is not None for bound in bounds):
            raise CudiffError(f"only numbers have least, most, above or below: an option's default is {self.default!r}")

    @property
    def kind(self) -> Any:
        """int, float, bool or str; of a tuple (tuple, the kind of its entries)."""
        if isinstance(self.default, tuple):
            return tuple, type(self.default[0]) if self.default else self.entries
        return type(self.default)

    @property
    def metavar(self) -> str:
        """What stands for the value in `--help`."""
        choices = "|".join(self.choices)
        return ("NAME" if len(choices) > _LONGEST_CHOICES else choices) or _METAVARS[self.kind]

    def checked(self, name: str, value: Any) -> Any:
        """`value` in the option's type. Raises CudiffError where it is of another type or out of range."""
        if isinstance(self.default, tuple):
            of = self.kind[1]
            if not isinstance(value, list | tuple):
                raise CudiffError(f"{name} must be a list, each entry {_NOUNS[of]}, not {shown(value)}")
            longest = _LONGEST_LISTS.get(of, 16)
            if len(value) > longest:
                raise CudiffError(f"{name} has {len(value):,} entries: give {longest:,} at most")
            named = [str(entry) if of is str and type(entry) is int else entry for entry in value]  # classes by number
            return tuple(self._in_range(name, _typed(name, of, entry)) for entry in named)
        value = _typed(name, self.kind, value)
        if self.choices and value not in self.choices:
            raise CudiffError(f"unknown {name} '{value[:80]}': use {' or '.join(self.choices)}")
        return value if isinstance(value, str | bool) else self._in_range(name, value)

    def add_to(self, parser: Any, name: str, help: str) -> None:
        """Add its flag to a parser, or a group of one; the flag has no default."""
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help}
        if self.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif self.choices:
            settings |= {"choices": tuple(self.choices), "metavar": self.metavar}
        else:
            settings |= {"type": self.parsed, "metavar": self.metavar}
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)

    def parsed(self, text: str) -> Any:
        """The value of a flag. Raises argparse's error, which names the flag, where `text` is none of its type."""
        if self.default == () and text.strip() == "none":  # as `--help` shows it
            return ()
        if self.kind in ((tuple, int), (tuple, float)) and not text.strip():
            return ()  # of names it would be all, as where a variable of the shell is not set
        try:
            if isinstance(self.default, tuple):
                return tuple(self.kind[1](part.strip()) for part in _parts(text))
            return self.kind(text)
        except ValueError:
            entries = "names such as ant,bee" if self.kind == (tuple, str) else "numbers such as 1,2,3,4"
            wanted = entries if isinstance(self.default, tuple) else _NOUNS[self.kind]
            raise argparse.ArgumentTypeError(f"'{text}' is not {wanted}") from None

    def _in_range(self, name: str, value: Any) -> Any:
        if isinstance(value, float):
            return real(name, value, self.least, self.most, self.above, self.below)
        if self.least is not None and value < self.least:
            raise CudiffError(f"{name} must be at least {self.least}, not {value}")
        if self.most is not None and value > self.most:
            raise CudiffError(f"{name} must be at most {self.most}, not {value}")
        if self.above is not None and value <= self.above:
            raise CudiffError(f"{name} must be above {self.above}, not {value}")
        if self.below is not None and value >= self.below:
            raise CudiffError(f"{name} must be below {self.below}, not {value}")
        return value


def _parts(text: str) -> list[str]:
    """What lies between commas, of which one may end the list. Raises ValueError where there is nothing between two."""
    parts = text.strip().removesuffix(",").split(",")
    if not all(map(str.strip, parts)):
        raise ValueError(text)
    return parts


_LONGEST_LISTS = {str: 2**20}  # of numbers 16
_LONGEST_CHOICES = 40  # characters of a line of --help, which does not break within a word
_METAVARS = {int: "N", float: "X", str: "TEXT", (tuple, int): "N,N,..", (tuple, float): "X,X,..",
             (tuple, str): "NAME,NAME,.."}
_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _typed(name: str, kind: type, value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    wanted: Any = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise CudiffError(f"{name} must be {_NOUNS[kind]}, not {shown(value)}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise CudiffError(f"{name} must be {_NOUNS[kind]} between -2^63 and 2^63, and is beyond")
    if kind is float and not math.isfinite(value):
        raise CudiffError(f"{name} must be a finite number, not {value}")
    return kind(value)


def shown(value: Any) -> str:
    """A value that may be large, or nested without end, in a few words."""
    if isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63):
        return repr(value[:80] if isinstance(value, str) else value)
    return f"a {type(value).__name__}"


def as_text(value: Any) -> str:
    """A value as `--help` shows it and a flag takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
