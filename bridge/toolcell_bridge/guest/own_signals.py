"""Let a script that is the first process of its pid namespace end itself by a signal, as any other process does.

The kernel passes a first process no signal that it has no handler for, not even SIGKILL, unless it comes from outside.
So the functions that would send one end the process with exit code 128 and the number, as a shell reports it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

FIRST = 1
"""Process id of a first process. Its children get signals as ever."""

ENDED_BY = 128
"""Exit codes above this one are signals."""

HARMLESS = frozenset({0, signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
"""What no process ends by."""

STOPPING = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
"""Without effect on a first process: nobody could let it go on."""


def install() -> None:
    """Replace the functions of `os` and `signal` with which a process reaches itself."""
    os.kill = _before(os.kill, lambda pid, number: number if pid in (FIRST, 0) else 0)
    os.killpg = _before(os.killpg, lambda group, number: number if group in (0, os.getpgrp()) else 0)
    signal.raise_signal = _before(signal.raise_signal, lambda number: number)
    signal.pthread_kill = _before(signal.pthread_kill, lambda _, number: number)
    signal.pthread_sigmask = _ending(signal.pthread_sigmask)
    os.abort = _abort_unless_handled
    signal.alarm = _with_handler(signal.alarm, lambda _: True)
    signal.setitimer = _with_handler(signal.setitimer, lambda which, *_: which == signal.ITIMER_REAL)


def _before(send: Callable[..., None], of_own: Callable[..., int]) -> Callable[..., None]:
    """Return `send`, after which this process ends if the signal was for itself and ends whoever has no handler."""

    @wraps(send)
    def wrapped(*args: Any) -> None:
        number = of_own(*args) if os.getpid() == FIRST and len(args) > 0 else 0
        if number and send.__name__ == "killpg":
            os.kill(0, number)
            return
        send(*args)
        if _is_fatal(number):
            _end(number)

    return wrapped


def _ending(mask: Callable[..., set[Any]]) -> Callable[..., set[Any]]:
    """Return `mask`, after which this process ends if a signal that it lets through has waited and has no handler."""

    @wraps(mask)
    def wrapped(*args: Any) -> set[Any]:
        waited = signal.sigpending() if os.getpid() == FIRST else ()
        before = mask(*args)
        for number in waited:
            if _is_fatal(number):
                _end(number)
        return before

    return wrapped


def _is_fatal(number: int) -> bool:
    return number == signal.SIGKILL or (
        number not in HARMLESS | STOPPING
        and signal.getsignal(number) == signal.SIG_DFL
        and number not in _mask(signal.SIG_BLOCK, ())
    )


def _end(number: int, *_: object) -> NoReturn:
    os._exit(ENDED_BY + number)


_abort, _mask = os.abort, signal.pthread_sigmask


@wraps(os.abort)
def _abort_unless_handled() -> NoReturn:
    if os.getpid() == FIRST:
        _end(signal.SIGABRT)
    _abort()


def _with_handler(start: Callable[..., Any], is_alarm: Callable[..., bool]) -> Callable[..., Any]:
    """Return `start`, before which SIGALRM gets a handler if it has none: the kernel sends it."""

    @wraps(start)
    def wrapped(*args: Any) -> Any:
        if args and is_alarm(*args) and os.getpid() == FIRST and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
            signal.signal(signal.SIGALRM, _end)
        return start(*args)

    return wrapped
