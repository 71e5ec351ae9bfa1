"""The zygote of `toolcell run` starts before the rest of the command is imported: both take as long."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from toolcell.config import Limits, Policy
from toolcell.errors import ToolcellError

if TYPE_CHECKING:
    from toolcell.sandbox.process import AutoBackend

OTHERS = frozenset(
    (
        *("--backend", "--image", "--runtime", "--profile", "--require", "--packages", "--preload", "--record"),
        *("--lint", "--check-types", "--seed", "--clock", "--hash-seed", "--frame-bytes", "--limits", "--help", "-h"),
    )
)
"""Flags of a run that needs another zygote, or none."""

SETTINGS: Mapping[str, Any] = {"policy": Policy(profile="auto"), "preload": (), "frame_bytes": Limits().frame_bytes}

_started: list[AutoBackend] = []


def start(arguments: Sequence[str]) -> None:
    """Start it, unless these arguments ask for another one."""
    is_other = any(word.startswith("-p") or word.partition("=")[0] in OTHERS for word in arguments)
    if sys.platform == "linux" and not is_other:
        from toolcell.sandbox.process import AutoBackend

        backend = AutoBackend(**SETTINGS)
        with suppress(OSError, ToolcellError):  # the Runtime says what is missing
            backend.spawn()
            _started.append(backend)


def backend_for(options: Mapping[str, Any]) -> Any:
    """Return the backend for a `Runtime` with these options: the one that was started if it is what they ask for.

    Otherwise that one is ended.
    """
    settings = {
        "policy": options["policy"],
        "preload": options["preload"],
        "frame_bytes": options["limits"].frame_bytes,
    }
    fits = (
        options["backend"] == "process" and not options["packages"] and not options["record"] and settings == SETTINGS
    )
    if fits and _started:
        return _started.pop()
    while _started:
        _started.pop().kill_spawned()
    return options["backend"]
