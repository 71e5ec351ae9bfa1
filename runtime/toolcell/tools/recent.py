"""`Recent`: what was made of some objects, kept for as long as they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from toolcell.support.lru import Lru

Made = TypeVar("Made")


class Recent(Generic[Made]):
    """Remembers what was made of the last few sequences of objects. Used from several threads at once."""

    def __init__(self, size: int) -> None:
        self._made: Lru[tuple[object, ...], tuple[tuple[object, ...], Made]] = Lru(size)
        """By the ids of the objects, with the objects: while they are held, no others get their ids."""
        self._lock = threading.Lock()

    def get(self, objects: Sequence[object], make: Callable[[], Made], *more: object) -> Made:
        """Return what was made of exactly these objects, or make it. `more`: plain values that it depends on too."""
        key = (*map(id, objects), *more)
        with self._lock:
            if (found := self._made.use(key)) is not None:
                return found[1]
        made = make()  # without the lock: making it twice does no harm
        with self._lock:
            self._made.put(key, (tuple(objects), made))
        return made
