"""`Script`: a script of the caller, with everything that it starts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolcell.config import Limits
from toolcell.options import RunOptions
from toolcell.results.eager import ByStatement
from toolcell.results.effects import Preflight
from toolcell.run.feed import ScriptFeed
from toolcell.run.input_files import guest_files
from toolcell.run.returned_files import Sink
from toolcell.sandbox.backend import GuestFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script with everything that it starts with."""

    source: str
    limits: Limits
    inputs: Mapping[str, Any] | None = None
    files: tuple[GuestFile, ...] = ()
    lint: str = "off"
    seed: int | None = None
    clock: float | None = None
    number: int = 0
    """Of a script in its session; 0 outside of sessions."""
    preflight: Preflight | None = None
    feed: ScriptFeed | None = None
    """Brings the text, in place of `source`."""
    is_fed: bool = False
    """Its statements run one by one, each when the one before has run: so it ran, and so it is repeated."""
    hold_s: float = 0.0
    """How long its sandbox is kept when it is suspended."""
    sink: Sink | None = None
    """Takes the content of returned files in place of the result."""


def script_from(source: str | ScriptFeed, options: RunOptions, limits: Limits, lint: str) -> Script:
    """Return a script with this text, or with the one that this feed brings. `limits`, `lint`: where none are given.

    Raises:
        UsageError: a file cannot be read, or its name cannot be used.
    """
    feed, text = (source, "") if isinstance(source, ScriptFeed) else (None, source)
    return Script(
        source=text,
        inputs=options.inputs,
        files=guest_files(options.files, options.limits or limits),
        limits=options.limits or limits,
        lint=options.lint or lint,
        seed=options.seed,
        clock=options.clock,
        hold_s=0.0 if feed is not None else float(options.hold_s),
        feed=feed,
        is_fed=feed is not None or isinstance(text, ByStatement),
    )
