"""`Lru`: a mapping with a bounded number of entries. The one that was put or used least recently goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Lru(Mapping[Key, Value], Generic[Key, Value]):
    """At most `most` entries. Reading one does not count as its use; `use` does."""

    def __init__(self, most: int, most_size: float = 0, size_of: Callable[[Value], float] | None = None) -> None:
        """`most_size`: what the sizes of all values may add up to, by `size_of`. The latest entry always stays."""
        self._most, self._most_size, self._size_of = most, most_size, size_of
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def put(self, key: Key, value: Value) -> list[Value]:
        """Set the latest entry. Return the values that had to go, the oldest first."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        gone: list[Value] = []
        size_of = self._size_of
        size = 0.0 if size_of is None else sum(map(size_of, self._entries.values()))
        while len(self._entries) > 1 and (len(self._entries) > self._most or size > self._most_size > 0):
            gone.append(self._entries.popitem(last=False)[1])
            size -= 0.0 if size_of is None else size_of(gone[-1])
        return gone

    def use(self, key: Key) -> Value | None:
        """Return a value, which becomes the latest; None if there is none."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def pop(self, key: Key) -> Value | None:
        """Remove a value and return it; None if there is none."""
        return self._entries.pop(key, None)

    def take_all(self) -> list[Value]:
        """Remove all values and return them, the oldest first."""
        entries, self._entries = self._entries, OrderedDict()
        return [*entries.values()]

    def __getitem__(self, key: Key) -> Value:
        return self._entries[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
