"""Do something irrevocable in a forked child, to see whether this machine allows it.

Meant for a small single-threaded process; knows nothing of what is tried.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

_REPORT_BYTES = 4096
_SILENCE = f"{errno.EIO} ended without a word".encode()


@dataclass(frozen=True, slots=True)
class ChildProbe:
    """How one attempt ended."""

    ok: bool
    detail: str
    """What the attempt returned, or its error."""

    code: int = 0
    """The errno of a failure; 0 when there was none."""

    @property
    def symbol(self) -> str:
        """The errno's name, for messages."""
        return errno.errorcode.get(self.code, str(self.code))


def attempt(action: Callable[[], str]) -> ChildProbe:
    """Run `action` in a forked child and return what it said, or the OSError it raised."""
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
    code, _, detail = (raw or _SILENCE).decode(errors="replace").partition(" ")
    return ChildProbe(code == "0", detail, int(code) if code.isdigit() else errno.EIO)


def _report(writer: int, action: Callable[[], str]) -> None:
    """Child side: never returns, whatever `action` does."""
    text = _SILENCE.decode()
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
