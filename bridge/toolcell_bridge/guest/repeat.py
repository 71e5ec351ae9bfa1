"""Makes a run repeatable: everything it draws comes from one seed, and the clock stands still.

For replays and tests; a script can undo it and only deceives itself. Modules that are not loaded yet are loaded here,
because what they take from `os` they take when they are loaded.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def seed(number: int) -> None:
    """Draw everything from `number`: random, os.urandom, secrets, uuid, tempfile, numpy's generators."""
    import random
    import uuid

    source = random.Random(number)
    os.urandom = random._urandom = source.randbytes  # type: ignore[attr-defined]
    native_seed = random.Random.seed

    def seed_from_source(self: random.Random, a: Any = None, version: int = 2) -> None:
        native_seed(self, source.getrandbits(256) if a is None else a, version)

    random.Random.seed = seed_from_source  # type: ignore[method-assign]
    random.seed(number)
    # uuid1 would ask the C library, which knows the machine and the time.
    uuid._generate_time_safe = None  # type: ignore[attr-defined]
    uuid._node = source.getrandbits(48) | 1 << 40  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)


def freeze_clock(now: float) -> None:
    """Make `time.time()` and what builds on it answer `now`. Monotonic clocks go on."""
    time.time = lambda: now
    time.time_ns = lambda: int(now * 1e9)
    frozen = time.gmtime(now)
    gmtime, localtime = time.gmtime, time.localtime
    time.gmtime = lambda seconds=None: gmtime(now if seconds is None else seconds)
    time.localtime = lambda seconds=None: localtime(now if seconds is None else seconds)
    import datetime

    class FrozenDatetime(datetime.datetime):
        """datetime.datetime whose now() is the recorded one."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime.fromtimestamp(now, tz)

        @classmethod
        def utcnow(cls) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime(*frozen[:6], int(now % 1 * 1e6))

        @classmethod
        def today(cls) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime.fromtimestamp(now)

    class FrozenDate(datetime.date):
        """datetime.date whose today() is the recorded one."""

        @classmethod
        def today(cls) -> datetime.date:  # type: ignore[override]
            return datetime.date.fromtimestamp(now)

    datetime.datetime, datetime.date = FrozenDatetime, FrozenDate  # type: ignore[misc]
