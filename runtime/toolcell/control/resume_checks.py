"""Checks before a journal is carried on: its token is the unused one, and the tools are those that it began with."""

from __future__ import annotations

from typing import Any

from toolcell.control.identity import registry_digest
from toolcell.control.journal import Journal
from toolcell.errors import ResumeError


class NoSuchRun(ResumeError):
    """There is no such run, or none of its calls was made."""


def check_token(ident: str, unused: str, given: str) -> None:
    """Check that a token, or none, is what a run waits for.

    Raises:
        ResumeError: it is not.
    """
    if unused and not given:
        raise ResumeError(f"run {ident} is suspended: resume it with the token of its suspension, not with its id")
    if given != unused:
        raise ResumeError(used_text(ident))


def check_tools(journal: Journal, digests: dict[str, str]) -> None:
    """Check that the tools are those of the run.

    Raises:
        ResumeError: names those that are not.
    """
    before: dict[str, Any] = journal.header["tools"]
    if registry_digest(before) == registry_digest(digests):
        return
    changed = sorted(name for name in before.keys() & digests.keys() if before[name] != digests[name])
    parts = {"missing": sorted(before.keys() - digests.keys()), "new": sorted(digests.keys() - before.keys())}
    parts["changed"] = changed
    said = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)
    raise ResumeError(f"run {journal.id} began with other tools ({said}); resume it with the tools that it began with")


def used_text(ident: str) -> str:
    """Say that a token was used."""
    return f"this token of run {ident} was used already; a token resumes a run once"


def unknown_text(ident: str, place: str) -> str:
    """Say that a run is not there."""
    return (
        f"there is no run {ident} to resume in {place}: it has ended, or it began elsewhere. A run outlives its "
        "process with Runtime(journal=DIRECTORY)"
    )
