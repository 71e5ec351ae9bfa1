"""Try something irrevocable in a forked child, to find out whether this machine allows it.

Call it in a small single-threaded process.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

_REPORT_BYTES = 4096
_NO_REPORT = f"{errno.EIO} ended without a word".encode()


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether one isolation layer works on this machine: tried, not guessed from version numbers."""

    name: str
    live: bool | None
    """None: nobody knows, since the process that tries it has failed."""

    detail: str
    """What is there ("ABI 7"), or why it is not."""

    fix: str = ""
    """What an operator does to get it; empty when it is live."""


@dataclass(frozen=True, slots=True)
class ChildProbe:
    """How one attempt in a child ended."""

    ok: bool
    detail: str
    """What the attempt returned, or its error."""

    code: int = 0
    """The errno of a failure; 0 when there was none."""


def attempt(action: Callable[[], str]) -> ChildProbe:
    """Run `action` in a forked child; returns its text, or the OSError it raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _report(writer, action)
    os.close(writer)
    with open(reader, "rb") as pipe:
        raw = pipe.read(_REPORT_BYTES)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
        return ChildProbe(False, f"killed by {name}")
    code, _, detail = (raw or _NO_REPORT).decode(errors="replace").partition(" ")
    return ChildProbe(code == "0", detail, int(code) if code.isdigit() else errno.EIO)


def _report(writer: int, action: Callable[[], str]) -> None:
    """Run `action` in the child and report. Never returns."""
    text = _NO_REPORT.decode()
    try:
        text = f"0 {action()}"
    except OSError as error:
        text = f"{error.errno or errno.EIO} {error.strerror or error}"
    except BaseException as error:
        text = f"{errno.EIO} {type(error).__name__}: {error}"
    finally:
        try:
            os.write(writer, text.encode(errors="replace")[:_REPORT_BYTES])
        finally:
            os._exit(0)
