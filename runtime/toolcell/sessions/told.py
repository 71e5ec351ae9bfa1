"""What a session adds to the results of its scripts: names of what was left running, and what became of the state."""

from __future__ import annotations

from dataclasses import replace

from toolcell.results import ErrorInfo
from toolcell.run.connection import GuestConnection
from toolcell.sessions.settings import SessionSettings

LEFTOVERS, LEFTOVER_CHARS = 20, 120
"""Most that is reported of what a script left running."""

STUCK = "the script did not end when it was interrupted"
"""Why a sandbox was lost."""


def named(claimed: list[str]) -> tuple[str, ...]:
    """Return names that the guest claims, cut as an honest guest cuts them."""
    return tuple(name[:LEFTOVER_CHARS] for name in claimed[:LEFTOVERS])


def told(
    error: ErrorInfo | None, connection: GuestConnection, lost: str, settings: SessionSettings
) -> ErrorInfo | None:
    """Return the error of a script, with what became of the state if it was cut short."""
    if error is None or not (lost or connection.was_interrupted):
        return error
    said = "the session keeps its state"
    if lost:
        rest = "the state before it" if settings.restore == "journal" else "nothing"
        said = f"the session lost its sandbox, and the next script begins with {rest}"
    return replace(error, message=f"{error.message}; {said}")
