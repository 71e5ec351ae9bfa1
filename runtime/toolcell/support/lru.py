"""`Lru`: a mapping with a bounded number of entries. The one that was put or used least recently goes first."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Lru(Mapping[Key, Value], Generic[Key, Value]):
    """At most `most` entries. Reading one does not count as its use; `use` does."""

    def __init__(self, most: int, most_size: float = math.inf) -> None:
        """`most_size`: what the sizes of all entries may add up to. The latest entry always stays."""
        self._most, self._most_size = most, most_size
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._sizes: dict[Key, float] = {}
        self._size = 0.0

    def put(self, key: Key, value: Value, size: float = 0) -> list[Value]:
        """Set the latest entry, of this size. Return the values that had to go, the oldest first."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        self._resize(key, size)
        gone: list[Value] = []
        while len(self._entries) > 1 and (len(self._entries) > self._most or self._size > self._most_size):
            oldest, old = self._entries.popitem(last=False)
            self._resize(oldest, 0)
            gone.append(old)
        return gone

    def measure(self, size_of: Callable[[Value], float]) -> None:
        """Take the sizes of all entries anew: they may have grown since they were put."""
        for key, value in self._entries.items():
            self._resize(key, size_of(value))

    def _resize(self, key: Key, size: float) -> None:
        self._size += size - self._sizes.pop(key, 0)
        if size:
            self._sizes[key] = size

    def use(self, key: Key) -> Value | None:
        """Return a value, which becomes the latest; None if there is none."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def pop(self, key: Key) -> Value | None:
        """Remove a value and return it; None if there is none."""
        self._resize(key, 0)
        return self._entries.pop(key, None)

    def __getitem__(self, key: Key) -> Value:
        return self._entries[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
