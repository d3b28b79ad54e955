"""Classes as people name them: by name, or by number."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cudiff.errors import CudiffError

LISTED = 20
"""How many names a message repeats."""


def names_in_words(names: Sequence[str]) -> str:
    """The names, or the first ones and how many more there are."""
    more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def numbers_of(classes: Sequence[Any], names: Sequence[str], what: str) -> list[int]:
    """The number of each class: a whole number itself, a text's place among `names`, or else the number that it says.

    Raises CudiffError, which begins with `what` and lists the names, for a text that is neither, and for one that says
    the number of a class whose name is another number, as 0 does where the classes 1 and 3 are left of ten.
    """
    exact = {name: number for number, name in enumerate(names)}
    alike = {_composed(name): number for name, number in exact.items()}
    places = [exact.get(one, alike.get(_composed(one))) if isinstance(one, str) else None for one in classes]
    return [_number(one, names, what) if place is None else place for one, place in zip(classes, places, strict=True)]


def _composed(text: str) -> str:
    """A text in Unicode's composed form: macOS names files in the other, and both look alike."""
    return unicodedata.normalize("NFC", text)


def _number(given: Any, names: Sequence[str], what: str) -> int:
    with suppress(ValueError):
        number = int(str(given))
        if not (isinstance(given, str) and 0 <= number < len(names) and names[number].isdecimal()):
            return number
    known = f"its classes are {names_in_words(names)}" if names else "give numbers, from 0: they have no names"
    if any("," in name or name != name.strip() for name in names):
        known += "; say one with a comma, or a space at an end, by its number, from 0"
    raise CudiffError(f"{what} has no class '{str(given)[:80]}': {known}")


def chosen(classes: Sequence[Any], names: Sequence[str], what: str) -> list[int]:
    """`numbers_of` classes that are given once each and have one of the names. Raises CudiffError for others."""
    numbers = numbers_of(classes, names, what)
    for number in numbers:
        if not 0 <= number < len(names):
            raise CudiffError(f"{what} has no class {number}: its classes are {names_in_words(names)}")
    without_repeats(numbers, classes)
    return numbers


def without_repeats(numbers: Sequence[int], classes: Sequence[Any]) -> None:
    """Raise CudiffError where two of `classes` have one number."""
    for place, number in enumerate(numbers):
        if number in numbers[:place]:
            first = classes[numbers.index(number)]
            again = f"{first} twice" if first == classes[place] else f"{first} and {classes[place]}, one class"
            raise CudiffError(f"only_classes has {again}: give each class once")
