"""The state of a session by value: bytes that its guest has written, and that only a sandbox of this session reads.

The host looks at none of them. They are in a file: one without a name, or one beside the journal of the session.
"""

from __future__ import annotations

import hashlib
import importlib.util
import mmap
import os
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
from toolcell.run.request import Script
from toolcell.sandbox.backend import GuestFile
from toolcell.support.private_files import open_regular_file
from toolcell.support.text import for_terminal
from toolcell_bridge.wire.messages import CLOUDPICKLE_FILE, STATE_FILE

STATE_BYTES: Final = 256 << 20
"""A larger state is not kept by value."""

KEEP_S: Final = 30.0
"""What keeping a state may take, and bringing it back."""

CALLED: Final = '__import__("toolcell_bridge.guest.script_end", fromlist=["x"]).'
"""A script that defines no name."""

COPIED_BYTES: Final = 1 << 20

MOST_NAMES: Final = 50
NAME_CHARS: Final = 300


class StateFile:
    """The bytes of one state. The file is open until nobody has the object any more."""

    def __init__(self, descriptor: int, path: Path | None = None, digest: str = "") -> None:
        """`path`: of a file that has a name. `digest`: the SHA-256 of its content."""
        self.digest, self.path, self._descriptor = digest, path, descriptor
        self.problem = ""
        """Why not everything was written."""
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def make(cls, path: Path | None = None) -> StateFile:
        """Make an empty file at `path`, or one without a name.

        Raises:
            OSError: it cannot be made.
        """
        if path is not None:
            return cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), path)
        descriptor, name = tempfile.mkstemp(prefix="toolcell-state-")
        os.unlink(name)
        return cls(descriptor)

    @classmethod
    def at(cls, path: Path, digest: str) -> StateFile:
        """Open a file that was written before.

        Raises:
            OSError: it is not there, or not a regular file.
        """
        return cls(open_regular_file(path), path, digest)

    @property
    def size(self) -> int:
        """In bytes."""
        return os.fstat(self._descriptor).st_size

    def append(self, data: bytes) -> None:
        """Write more. Never raises: see `problem`."""
        try:
            left = memoryview(data)
            while left and not self.problem:
                left = left[os.write(self._descriptor, left) :]
        except OSError as exc:
            self.problem = f"it cannot be written: {exc}"

    def copied_to(self, path: Path) -> StateFile:
        """Write a copy at `path`, and return it.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        copy = StateFile.make(path)
        copy.digest = self.digest
        with self.content() as content:
            for start in range(0, len(content), COPIED_BYTES):
                copy.append(content[start : start + COPIED_BYTES])
        if copy.problem:
            copy.remove()
            raise OSError(copy.problem)
        return copy

    def content(self) -> mmap.mmap:
        """Return what is in it. No memory is taken for it.

        Raises:
            OSError, ValueError: it cannot be read, or is empty.
        """
        return mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)

    def checked(self) -> mmap.mmap:
        """Return what is in it.

        Raises:
            SessionError: it is not what was written, or cannot be read.
        """
        try:
            content = self.content()
        except (OSError, ValueError) as exc:
            raise SessionError(f"the file with the state cannot be read: {exc}") from exc
        if self.path is not None and hashlib.sha256(content).hexdigest() != self.digest:  # else nobody else has it
            raise SessionError(f"the file with the state was changed: {self.path}")
        return content

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
    file: StateFile


def keeping_script(limits: Limits, room: int, file: StateFile) -> Script:
    """Return the script of ours that sends the state, to `file`. `room`: bytes of memory that the guest has for it."""
    source = f"{CALLED}keep_session({room})"
    return Script(source=source, limits=_limits(limits), files=(_cloudpickle(),), sink=file.append)


def loading_script(limits: Limits, content: mmap.mmap, seed: int | None, clock: float | None) -> Script:
    """Return the script of ours that brings a state back. With a seed and a clock it takes theirs from the state."""
    return Script(
        source=f"{CALLED}bring_session_back()",
        limits=_limits(limits),
        files=(_cloudpickle(), GuestFile(STATE_FILE, content)),
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
    return GuestFile(CLOUDPICKLE_FILE, Path(spec.origin).read_bytes())


def not_in_it(result: ExecutionResult, file: StateFile) -> tuple[str, ...]:
    """Return what is not in the state that the guest has sent to `file`, whose digest is known from now on.

    Raises:
        SessionError: it has sent none; says why.
    """
    if result.error is not None:
        raise SessionError(result.error.message)
    value, sent = result.value, result.files[0] if len(result.files) == 1 else None
    if not isinstance(value, dict) or sent is None or sent.sha256 is None or not sent.size:
        raise SessionError("the sandbox has sent no state")
    if file.problem:
        raise SessionError(file.problem)
    file.digest = sent.sha256
    lost = value.get("lost")
    named = [f"{name}: {why}" for name, why in lost.items()] if isinstance(lost, dict) else []
    if value.get("hooks"):
        named.append("exit hooks (atexit)")
    return names_for_people(named)


def names_for_people(names: Iterable[str]) -> tuple[str, ...]:
    """Return what a guest claims to be lost, cut and without control characters."""
    found = [for_terminal(each).replace("\n", " ")[:NAME_CHARS] for each in names]
    more = len(found) - MOST_NAMES
    return (*found[:MOST_NAMES], f"and {more} more") if more > 0 else tuple(found)
