"""One thing at a time in a session."""

from __future__ import annotations

from collections.abc import Callable

import anyio


class SessionTurn:
    """One's turn in a session. A class: entering a generator takes a script's time twice."""

    __slots__ = ("_check", "_lock", "_rest")

    def __init__(self, lock: anyio.Lock, check: Callable[[], None], rest: Callable[[], None]) -> None:
        self._lock, self._check, self._rest = lock, check, rest

    async def __aenter__(self) -> None:
        self._check()
        await self._lock.acquire()
        try:
            self._check()
        except BaseException:
            self._lock.release()
            raise

    async def __aexit__(self, *_exc: object) -> None:
        try:
            self._rest()
        finally:
            self._lock.release()
