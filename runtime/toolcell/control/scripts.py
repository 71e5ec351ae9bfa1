"""`Script`: everything that a run starts with, and its form in the header of a journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolcell.config import Limits
from toolcell.control.suspension import OnApproval
from toolcell.eager import ByStatement
from toolcell.effects import Preflight
from toolcell.journal.identity import tool_digests
from toolcell.journal.ledger import Journal
from toolcell.run.feed import ScriptFeed
from toolcell.sandbox.backend import GuestFile
from toolcell.tools.call import CallableTools


@dataclass(frozen=True, slots=True)
class Script:
    """A script with everything that it starts with."""

    source: str
    inputs: Mapping[str, Any] | None
    files: tuple[GuestFile, ...]
    limits: Limits
    lint: str
    seed: int | None
    clock: float | None
    number: int = 0
    """Of a script in its session; 0 outside of sessions."""
    preflight: Preflight | None = None
    feed: ScriptFeed | None = None
    """Brings the text, in place of `source`."""
    is_fed: bool = False
    """Its statements run one by one, each when the one before has run: so it ran, and so it is repeated."""
    hold_s: float = 0.0
    """How long its sandbox is kept when it is suspended."""


def script_from(
    source: str | ScriptFeed,
    inputs: Mapping[str, Any] | None,
    files: tuple[GuestFile, ...],
    limits: Limits,
    lint: str,
    seed: int | None,
    clock: float | None,
    hold_s: float = 0.0,
) -> Script:
    """Return a script with this text, or with the one that this feed brings."""
    settings = (inputs, files, limits, lint, seed, clock)
    if isinstance(source, ScriptFeed):
        return Script("", *settings, feed=source, is_fed=True)
    return Script(source, *settings, hold_s=hold_s, is_fed=isinstance(source, ByStatement))


def header_of(
    source: str,
    inputs: dict[str, Any],
    script: Script,
    tools: CallableTools,
    on_approval: OnApproval,
    refresh: str,
    repaired: Journal | None,
) -> dict[str, Any]:
    """Return everything that is needed to run a script again, as plain data."""
    from toolcell.packing import text_digest

    return {
        "source": source,
        "source_sha256": text_digest(source),
        "inputs": inputs,
        "files": [[file.name, file.data] for file in script.files],
        "limits": script.limits.model_dump(),
        "lint": script.lint,
        "seed": script.seed,
        "clock": script.clock,
        "tools": tool_digests(tools),
        "on_approval": on_approval,
        "refresh": refresh,
        "repairs": repaired.id if repaired is not None else "",
        "preflight": script.preflight.to_plain() if script.preflight is not None else None,
        "hold_s": script.hold_s,
        "fed": script.is_fed,
    }


def script_of(header: Mapping[str, Any], number: int = 0) -> Script:
    """Return the script of a journal's header."""
    files = tuple(GuestFile(name, data) for name, data in header["files"])
    return Script(
        header["source"],
        header["inputs"],
        files,
        Limits(**header["limits"]),
        header["lint"],
        header["seed"],
        header["clock"],
        number,
        Preflight.of_plain(header.get("preflight")),
        hold_s=header.get("hold_s", 0.0),
        is_fed=header.get("fed", False),
    )
