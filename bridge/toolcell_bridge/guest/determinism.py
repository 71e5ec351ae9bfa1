"""Make a run repeatable: all randomness comes from one seed, and the clock advances only with the script.

For replays and tests; a script that undoes it deceives only itself. The zygote loads it when idle, or when it is first
needed, with the modules that it changes, because they take names from `os` when they are loaded.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import os
import random
import sys
import time
import uuid
from typing import Any, Final

PATIENCE: Final = 1000
"""Number of reads without a sleep after which the clock starts to advance."""

STEP_NS: Final = 1_000_000
"""How far it advances with each later read, so that a loop that waits for a time ends."""


class Clock:
    """The clock that a script reads."""

    __slots__ = ("now_ns", "reads")

    def __init__(self) -> None:
        self.now_ns = 0
        self.reads = 0

    def __reduce__(self) -> str:
        return "_clock"  # a script's `from time import time` is a method of it

    def set(self, now: float) -> None:
        """Start at `now`."""
        self.now_ns, self.reads = round(now * 1e6) * 1000, 0  # finer than that, a float is noise

    def read_ns(self) -> int:
        """Now."""
        self.reads += 1
        if self.reads > PATIENCE:
            self.now_ns += STEP_NS
        return self.now_ns

    def read(self) -> float:
        """Now, in seconds."""
        return self.read_ns() / 1e9

    def sleep(self, seconds: float, /) -> None:
        """Sleep, and move on by as much."""
        _sleep(seconds)
        self.now_ns, self.reads = self.now_ns + round(seconds * 1e9), 0


_clock = Clock()
_entropy = random.Random()
_forks = 0
_sleep, _gmtime, _localtime, _strftime = time.sleep, time.gmtime, time.localtime, time.strftime
_clock_gettime, _clock_gettime_ns = time.clock_gettime, time.clock_gettime_ns
_seed_random = random.Random.seed
_uuid: Any = uuid
(_datetime_names,) = gc.get_referents(datetime.datetime.__dict__)  # what a class of C gives out for reading only


def _fixed_now(cls: Any, tz: datetime.tzinfo | None = None) -> Any:
    return cls.fromtimestamp(_clock.read(), tz)


def _fixed_utcnow(cls: Any) -> Any:
    return cls.fromtimestamp(_clock.read(), datetime.UTC).replace(tzinfo=None)


def set_clock(now: float) -> None:
    """Start the script's clock. Monotonic clocks and the times of files stay real."""
    _clock.set(now)
    time.time, time.time_ns, time.sleep = _clock.read, _clock.read_ns, _clock.sleep  # type: ignore[assignment]
    time.gmtime, time.localtime = _fixed_gmtime, _fixed_localtime  # type: ignore[assignment]
    time.strftime = _fixed_strftime
    time.ctime, time.asctime = _fixed_ctime, _fixed_asctime  # type: ignore[assignment]
    time.clock_gettime, time.clock_gettime_ns = _fixed_gettime, _fixed_gettime_ns
    # Two methods of `datetime.datetime` itself; its others, and `date`, ask `time.time()`. A class in its place would
    # be another one than C code makes objects of: these could not be pickled, nor be told from strange ones by
    # sqlite3, yaml and all who look a class up.
    _datetime_names["now"], _datetime_names["utcnow"] = classmethod(_fixed_now), classmethod(_fixed_utcnow)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))


def _fixed_gmtime(seconds: float | None = None, /) -> time.struct_time:
    return _gmtime(_clock.read() if seconds is None else seconds)


def _fixed_localtime(seconds: float | None = None, /) -> time.struct_time:
    return _localtime(_clock.read() if seconds is None else seconds)


def _fixed_strftime(form: str, when: Any = None, /) -> str:
    return _strftime(form, _fixed_localtime() if when is None else when)


def _fixed_asctime(when: Any = None, /) -> str:
    return _strftime("%a %b %e %H:%M:%S %Y", _fixed_localtime() if when is None else when)


def _fixed_ctime(seconds: float | None = None, /) -> str:
    return _fixed_asctime(_fixed_localtime(seconds))


def _fixed_gettime(clock: int, /) -> float:
    return _clock.read() if clock == time.CLOCK_REALTIME else _clock_gettime(clock)


def _fixed_gettime_ns(clock: int, /) -> int:
    return _clock.read_ns() if clock == time.CLOCK_REALTIME else _clock_gettime_ns(clock)


def seed(number: int) -> None:
    """Draw everything from `number`: random, os.urandom, os.getrandom, secrets, uuid, tempfile, numpy's generators.

    A child of `os.fork` draws from a stream of its own, which its place among the children decides.
    """
    _seed_random(_entropy, number)
    os.urandom = _entropy.randbytes
    if hasattr(os, "getrandom"):
        os.getrandom = _fixed_getrandom
    random._urandom = _entropy.randbytes  # type: ignore[attr-defined]
    random.Random.seed = _seed  # type: ignore[method-assign]
    random.seed(number)
    # uuid1 would ask the C library, which knows the machine and the time.
    _uuid._generate_time_safe = _uuid._UuidCreate = None
    _uuid._node = _entropy.getrandbits(48) | 1 << 40
    os.register_at_fork(before=_count_fork, after_in_child=_seed_child)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)


def _fixed_getrandom(size: int, flags: int = 0) -> bytes:
    return _entropy.randbytes(size)


def _count_fork() -> None:
    global _forks
    _forks += 1


def _seed_child() -> None:
    """Python has just seeded `random` from the kernel."""
    _seed_random(_entropy, f"{_entropy.getrandbits(64)} {_forks}")
    random.seed(_entropy.getrandbits(64))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(_entropy.getrandbits(32))


def _seed(self: random.Random, a: Any = None, version: int = 2) -> None:
    """`random.Random.seed`; a generator that is not seeded is seeded from the script's own entropy."""
    _seed_random(self, int.from_bytes(os.urandom(32), "big") if a is None else a, version)


def state() -> tuple[Any, ...]:
    """Return where clock and randomness are, for `set_state` in another sandbox that has the same seed."""
    return _clock.now_ns, _clock.reads, _entropy.getstate(), _forks, vars(_uuid)["_node"]


def set_state(kept: tuple[Any, ...]) -> None:
    """Go on from there."""
    global _forks
    _clock.now_ns, _clock.reads, entropy, _forks, _uuid._node = kept
    _entropy.setstate(entropy)
