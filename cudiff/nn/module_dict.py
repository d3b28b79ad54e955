"""Modules by name."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from cudiff.cuda.graph import record_again
from cudiff.nn.module import Module
from cudiff.nn.parameter import structure_changes


class ModuleDict(Module):
    """A dict of modules; their names in it are those of the sub-modules, in the order in which they were set."""

    def __init__(self, items: Mapping[str, Module] | None = None):
        super().__init__()
        self._items: dict[str, Module] = {}
        for name, item in (items or {}).items():
            self[name] = item

    def named_children(self) -> Iterator[tuple[str, Module]]:
        yield from self._items.items()
        yield from super().named_children()

    def __setitem__(self, name: str, item: Module) -> None:
        """Raises TypeError for what is no module, and for a name that is none, has a dot or is an attribute's."""
        if not isinstance(item, Module):
            raise TypeError(f"a ModuleDict holds modules, not a {type(item).__name__}: give it a class of its own")
        if not isinstance(name, str) or not name or "." in name or hasattr(self, name):
            raise TypeError(f"a ModuleDict's names are text without dots, and no attribute's: not {name!r}")
        self._items[name] = item
        self._changed()

    def __delitem__(self, name: str) -> None:
        del self._items[name]
        self._changed()

    def _changed(self) -> None:
        structure_changes()
        record_again()  # a captured function holds the old ones

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def keys(self) -> KeysView[str]:
        return self._items.keys()

    def values(self) -> ValuesView[Module]:
        return self._items.values()

    def items(self) -> ItemsView[str, Module]:
        return self._items.items()
