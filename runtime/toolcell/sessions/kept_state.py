"""The state of a session by value: bytes that its guest has written, and that only a sandbox of this session reads.

The host looks at none of them. They are in a file: one without a name, or one beside the journal of the session.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from toolcell.config import Limits
from toolcell.errors import SessionError
from toolcell.results import ExecutionResult
from toolcell.run.script import Script
from toolcell.sandbox.backend import GuestFile
from toolcell.support.text import for_terminal

STATE_BYTES: Final = 256 << 20
"""A larger state is not kept by value."""

KEEP_S: Final = 30.0
"""What keeping a state may take, and bringing it back."""

CALLED: Final = '__import__("toolcell_bridge.guest.script_end", fromlist=["x"]).'
"""A script that defines no name."""

MOST_NAMES: Final = 50
NAME_CHARS: Final = 300


class StateFile:
    """The bytes of one state. The file is open until nobody has the object any more."""

    def __init__(self, descriptor: int, digest: str, path: Path | None = None) -> None:
        """`path`: of a file that has a name."""
        self.digest, self.path, self._descriptor = digest, path, descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, data: bytes, digest: str, path: Path | None = None) -> StateFile:
        """Write a file at `path`, or one without a name. `digest`: the SHA-256 of the data.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        if path is None:
            descriptor, name = tempfile.mkstemp(prefix="toolcell-state-")
            os.unlink(name)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        made = cls(descriptor, digest, path)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            made.remove()
            raise
        return made

    @classmethod
    def at(cls, path: Path, digest: str) -> StateFile:
        """Open a file that was written before.

        Raises:
            OSError: it is not there, or no regular file.
        """
        made = cls(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), digest, path)
        if not stat.S_ISREG(os.fstat(made._descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        return made

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            SessionError: they are not those that were written.
        """
        size = os.fstat(self._descriptor).st_size
        data = os.pread(self._descriptor, min(size, STATE_BYTES) + 1, 0)
        if self.path is not None and hashlib.sha256(data).hexdigest() != self.digest:  # else nobody else has it
            raise SessionError(f"the file with the state was changed: {self.path}")
        return data

    def remove(self) -> None:
        """Take its name away. Whoever has it open can still read it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state by value."""

    position: int
    """Scripts that have led to it."""
    lost: tuple[str, ...]
    """Names that are not in it, each with why."""
    seed: int | None
    """Of the session's first script."""
    file: StateFile


def keeping_script(limits: Limits, room: int) -> Script:
    """Return the script of ours that sends the state. `room`: bytes of memory that the guest has for it."""
    return Script(source=f"{CALLED}keep_session({room})", limits=_limits(limits), files=(_cloudpickle(),))


def returning_script(limits: Limits, data: bytes, seed: int | None, clock: float | None) -> Script:
    """Return the script of ours that brings a state back."""
    return Script(
        source=f"{CALLED}bring_session_back()",
        limits=_limits(limits),
        files=(_cloudpickle(), GuestFile("/state", data)),
        seed=seed,
        clock=clock,
        number=1,
    )


def _limits(limits: Limits) -> Limits:
    raised: dict[str, Any] = {"files": 1, "files_bytes": STATE_BYTES, "wall_s": KEEP_S}
    return limits.model_copy(update=raised | {"host_work": limits.host_work + 2 * STATE_BYTES})


@cache
def _cloudpickle() -> GuestFile:
    """Return the source of the module that pickles code: the sandbox has none of our packages."""
    spec = importlib.util.find_spec("cloudpickle.cloudpickle")
    assert spec is not None
    assert spec.origin is not None
    return GuestFile("/cloudpickle", Path(spec.origin).read_bytes())


def received(result: ExecutionResult) -> tuple[bytes, str, tuple[str, ...]]:
    """Return the state that the guest has sent, its digest, and what is not in it.

    Raises:
        SessionError: it has sent none; says why.
    """
    if result.error is not None:
        raise SessionError(result.error.message)
    value, files = result.value, result.files
    sent = files[0] if len(files) == 1 else None
    if not isinstance(value, dict) or sent is None or sent.data is None or sent.sha256 is None:
        raise SessionError("the sandbox has sent no state")
    lost = value.get("lost")
    named = [f"{name}: {why}" for name, why in lost.items()] if isinstance(lost, dict) else []
    if value.get("hooks"):
        named.append("exit hooks (atexit)")
    return sent.data, sent.sha256, names_for_people(named)


def names_for_people(names: Iterable[str]) -> tuple[str, ...]:
    """Return what a guest claims to be lost, cut and without control characters."""
    found = [for_terminal(each).replace("\n", " ")[:NAME_CHARS] for each in names]
    more = len(found) - MOST_NAMES
    return (*found[:MOST_NAMES], f"and {more} more") if more > 0 else tuple(found)
