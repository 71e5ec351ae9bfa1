"""The state of a session by value: bytes that its guest has written, and that only a sandbox of this session reads.

The host looks at none of them. They are in a file without a name, and with the journal of the session.
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
from toolcell.run.run import Script
from toolcell.sandbox.backend import GuestFile
from toolcell.support.text import for_terminal
from toolcell_bridge.wire.messages import CLOUDPICKLE_FILE, STATE_FILE

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

    def __init__(self, folder: Path | None) -> None:
        """Make an empty file, in `folder` or with the temporary ones.

        Raises:
            OSError: it cannot be made.
        """
        self._descriptor, name = tempfile.mkstemp(prefix="toolcell-state-", dir=folder)
        weakref.finalize(self, os.close, self._descriptor)
        os.unlink(name)
        self.digest = ""
        """The SHA-256 of its content."""
        self.problem = ""
        """Why not everything was written."""

    @classmethod
    def of(cls, folder: Path | None, pieces: Iterable[bytes], digest: str) -> StateFile:
        """Make a file with what was written before.

        Raises:
            OSError: it cannot be read or written, or is not what was written.
        """
        file, found = cls(folder), hashlib.sha256()
        for piece in pieces:
            file.append(piece)
            found.update(piece)
        if file.problem or found.hexdigest() != digest:
            raise OSError(file.problem or "it is not what was written")
        file.digest = digest
        return file

    def append(self, data: bytes) -> None:
        """Write more. Never raises: see `problem`."""
        try:
            left = memoryview(data)
            while left and not self.problem:
                left = left[os.write(self._descriptor, left) :]
        except OSError as exc:
            self.problem = f"it cannot be written: {exc}"

    def content(self) -> mmap.mmap:
        """Return what is in it. No memory is taken for it.

        Raises:
            OSError, ValueError: it cannot be read, or is empty.
        """
        return mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)


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
    found = [for_terminal(each).replace("\n", " ")[:NAME_CHARS] for each in named]  # a guest claims this
    more = len(found) - MOST_NAMES
    return (*found[:MOST_NAMES], f"and {more} more") if more > 0 else tuple(found)
