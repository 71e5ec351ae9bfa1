"""Handlers of `os.fork` that modules register while a zygote imports them.

Those of the standard library write to some 190 pages of each child, at 2 us each, and a zygote needs none of them: it
has one thread, so no lock is held by another, and it reseeds `random` before the fork. Scripts that fork need all.
"""

from __future__ import annotations

import os
import sys
from _thread import _count as count_threads
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

Handler = Callable[[], object]

NEEDLESS = frozenset({"asyncio.events", "concurrent.futures.thread", "logging", "random", "threading"})
"""Modules whose handlers do nothing for the child of a process with one thread, but for the seed of `random`."""


class ForkHandlers:
    """The registrations of one process, oldest first."""

    def __init__(self) -> None:
        self._registrations: list[tuple[str, dict[str, Handler]]] = []
        """Module and arguments of each call of `os.register_at_fork`: before, after_in_child, after_in_parent."""
        self._register_at_fork: Any = os.register_at_fork

    def collect(self) -> None:
        """From here on, keep what is registered. Nothing that registers anything may be imported before."""
        os.register_at_fork = self._keep  # type: ignore[assignment]

    def _keep(self, **handlers: Handler) -> None:
        self._registrations.append((sys._getframe(1).f_globals["__name__"], handlers))

    def fork(self) -> int:
        """Fork as `os.fork` does, with the handlers of packages only, or all if this process has several threads."""
        is_alone = not count_threads()
        needed = [given for module, given in self._registrations if not (is_alone and module in NEEDLESS)]
        _call(reversed(needed), "before")
        pid = -1
        try:
            pid = os.fork()
        finally:
            _call(needed, "after_in_child" if pid == 0 else "after_in_parent")
        return pid

    def register(self) -> None:
        """Register everything that was kept, for the forks of a script."""
        os.register_at_fork = self._register_at_fork
        for _, handlers in self._registrations:
            os.register_at_fork(**handlers)


def _call(registered: Iterable[dict[str, Handler]], when: str) -> None:
    for handlers in registered:
        if when in handlers:
            with suppress(Exception):  # a fork takes place whatever they raise
                handlers[when]()


HANDLERS = ForkHandlers()
"""Handlers of this process, if it is a zygote."""
