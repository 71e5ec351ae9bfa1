"""`RunRequest`: the validated input of one run, ready to be sent to a sandbox.

Checks what a caller gave and names what is wrong with it. Knows neither sandboxes nor tools.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from toolcell.config import Limits
from toolcell.errors import UsageError
from toolcell.sandbox.backend import GuestFile
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue
from toolcell_bridge.wire.messages import PutFile, RunScript

ROOM_BYTES = 4096
"""Part of a frame that is kept free for the fields beside the source."""

CHUNK_BYTES = 1 << 20
"""Most of a file that is sent in one message."""

FIXED = ("disk_bytes", "inodes", "frame_bytes")
"""Limits that are set when a sandbox is made and cannot be changed from outside afterwards."""

LOWERED = ("memory_bytes", "processes", "open_files", "cpu_s")
"""Limits that can be lowered from outside, and not raised."""

FileInput = str | os.PathLike[str] | tuple[str, bytes | str] | GuestFile


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What one run is asked to do, and what it may use."""

    message: RunScript
    """The script and its settings, as they are sent."""
    limits: Limits
    files: tuple[GuestFile, ...] = ()
    run_id: str = ""
    cancel: anyio.Event | None = None
    """Setting it ends the run with outcome `cancelled`."""
    on_log: Callable[[str, str], None] | None = None
    """Called with stream and text for everything the script prints."""
    on_progress: Callable[[object], None] | None = None
    """Called with every value the script reports as its progress."""

    def file_messages(self) -> Iterator[PutFile]:
        """The files as messages, in pieces that fit into a frame."""
        size = min(CHUNK_BYTES, self.limits.frame_bytes // 2)
        for file in self.files:
            for start in range(0, max(1, len(file.data)), size):
                last = start + size >= len(file.data)
                yield PutFile(file.name, file.data[start : start + size], last)


def run_message(
    number: int,
    source: str,
    inputs: Mapping[str, Any] | None,
    tools: list[str],
    limits: Limits,
    lint: str,
    seed: int | None,
    clock: float | None,
) -> RunScript:
    """Build the message that carries the script.

    Raises:
        UsageError: the source or an input cannot be sent; names it.
    """
    if not isinstance(source, str):
        raise UsageError(f"source must be a str, not {type(source).__name__}")
    try:
        # Encoding the message checks inputs that are plain already.
        plain = to_plain(dict(inputs), "inputs") if inputs else {}
        source.encode("utf-8")
    except (UnsendableValue, ValueError, TypeError) as exc:
        raise UsageError(str(exc)) from exc
    if len(source) > limits.frame_bytes - ROOM_BYTES:
        raise UsageError(f"source is too large ({len(source)} characters, limit frame_bytes={limits.frame_bytes})")
    assert isinstance(plain, dict)
    return RunScript(
        number, source, plain, tools, lint, limits.result_bytes, limits.files, limits.files_bytes, seed, clock
    )


def fits(wanted: Limits, made_with: Limits, fixed: Collection[str] = ()) -> bool:
    """Return True when a sandbox made with the limits `made_with` can be held to `wanted` from outside.

    `fixed`: further limits that the backend cannot change.
    """
    if wanted is made_with:
        return True
    is_same = all(getattr(wanted, name) == getattr(made_with, name) for name in (*FIXED, *fixed))
    return is_same and all(getattr(wanted, name) <= getattr(made_with, name) for name in LOWERED)


def guest_files(given: Iterable[FileInput]) -> tuple[GuestFile, ...]:
    """Load the input files.

    Raises:
        UsageError: a file cannot be read, or its name leaves the workspace.
    """
    return tuple(map(_guest_file, given))


def _guest_file(given: FileInput) -> GuestFile:
    """Make a workspace file from a path on the host, or from (name, content)."""
    if isinstance(given, GuestFile):
        file = given
    elif isinstance(given, tuple):
        name, data = given
        file = GuestFile(name, data.encode() if isinstance(data, str) else bytes(data))
    else:
        path = os.fspath(given)
        try:
            with open(path, "rb") as source:
                file = GuestFile(os.path.basename(path), source.read())
        except OSError as exc:
            raise UsageError(f"input file {path!r} cannot be read: {exc.strerror}") from exc
    parts = file.name.split("/")
    if not file.name or file.name.startswith("/") or ".." in parts or "\0" in file.name or "\\" in file.name:
        raise UsageError(f"input file name {file.name!r} must be a relative path inside the workspace")
    return file
