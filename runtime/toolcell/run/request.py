"""What a run is asked for with: script and inputs as they cross into a sandbox, files, limits a sandbox can be held to.

Checks what a caller gave and names what is wrong with it. Knows neither sandboxes nor tools.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from toolcell.config import Limits
from toolcell.errors import UsageError
from toolcell.sandbox.backend import GuestFile
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue
from toolcell_bridge.wire.messages import RunScript

FIXED = ("disk_bytes", "inodes", "frame_bytes")
"""Limits that are part of a sandbox's making and cannot be changed from outside afterwards."""

ROOM_BYTES = 4096
"""Left in a frame for what is not the script."""

FileInput = str | os.PathLike[str] | tuple[str, bytes | str] | GuestFile


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
    """The script as it is sent.

    Raises:
        UsageError: something of it cannot be; names it.
    """
    if not isinstance(source, str):
        raise UsageError(f"source must be a str, not {type(source).__name__}")
    try:
        plain = to_plain(dict(inputs or {}), "inputs")
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
    """True when a sandbox made with `made_with` can be held to `wanted` from outside.

    `fixed`: what its backend cannot change then, besides what nobody can.
    """
    if wanted is made_with:
        return True
    return all(getattr(wanted, name) == getattr(made_with, name) for name in (*FIXED, *fixed)) and all(
        getattr(wanted, name) <= getattr(made_with, name)
        for name in ("memory_bytes", "processes", "open_files", "cpu_s")
    )


def guest_file(given: FileInput) -> GuestFile:
    """A file for the workspace from a path on the host, or from (name, content).

    Raises:
        UsageError: it cannot be read, or its name leaves the workspace.
    """
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
