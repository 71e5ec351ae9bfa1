"""What a script would do and what came of it: planned calls, effects, results of commits and reverts, as frozen data.

Knows no tool and no run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from typing import Any, Final, Literal

from toolcell.support.call_text import MAX_ARG_CHARS, arguments_text, call_text
from toolcell.support.packing import value_digest
from toolcell.support.text import as_one_line
from toolcell_bridge.wire.frozen import frozen

MAX_LISTED: Final = 50
"""Effects that a text lists."""


@frozen
class Effect:
    """One call of a tool that writes, collected by a dry run. It was not made."""

    id: str
    """`effect-1` and so on, in the order in which they are made."""
    tool: str
    args: Mapping[str, Any]
    """What the tool will receive. {"$result_of": "effect-1...."} stands for the result of another effect."""
    line: int | None = None
    """Line of the script, as the guest claims."""
    depends_on: tuple[str, ...] = ()
    """Effects whose results are among the arguments."""
    reason: str = ""
    """Why a person has to approve it: `needs approval: it sends to "public", and this run has read "private"`."""
    draft_id: str = field(default="", repr=False)
    """Ends the references to results of this draft: {"$result_of": "effect-1.<draft_id>"}. Other dicts are data."""

    @property
    def is_listed_whole(self) -> bool:
        """False when its text is cut: not all of `args` can be read in it."""
        return arguments_text(self.args, results=self._results()).is_whole

    def _results(self) -> dict[str, str]:
        return {f"{each}.{self.draft_id}": each for each in self.depends_on}

    def __str__(self) -> str:
        line = f"  (line {self.line})" if self.line is not None else ""
        reason = f"  {as_one_line(self.reason)}" if self.reason else ""
        return f"{as_one_line(self.id)}: {call_text(self.tool, self.args, self._results())}{line}{reason}"


EffectStatus = Literal["made", "failed", "refused", "not made", "not approved"]


@frozen
class EffectResult:
    """The outcome of one effect of a draft."""

    id: str
    tool: str
    args: Mapping[str, Any]
    """With results in place of what stood for them."""
    status: EffectStatus
    """`failed`: the tool ran, and may have done a part of its work. `refused`: it did not run. `not made`: an effect
    before it failed or was refused."""
    value: Any = None
    """What the tool returned."""
    error: str = ""

    def __str__(self) -> str:
        said = f": {as_one_line(self.error)}" if self.error else ""
        return f"{self.status}  {as_one_line(self.id)}: {call_text(self.tool, self.args)}{said}"


@frozen
class CommitResult:
    """The result of `Runtime.commit`."""

    run_id: str
    """Id of the calls of the commit, in events and in the audit log."""
    effects: tuple[EffectResult, ...]
    """Every effect of the draft, in order."""
    value: Any = None
    """The script's result, with the results of what was made."""
    has_value: bool = False
    journal_id: str = field(default="", repr=False)
    """Name of what `Runtime.revert` knows of the commit."""

    @property
    def ok(self) -> bool:
        """True when every approved effect was made."""
        return all(each.status in ("made", "not approved") for each in self.effects)

    @property
    def made(self) -> tuple[EffectResult, ...]:
        """The effects that were made."""
        return tuple(each for each in self.effects if each.status == "made")

    @property
    def failed(self) -> EffectResult | None:
        """The effect at which the commit stopped."""
        return next((each for each in self.effects if each.status in ("failed", "refused")), None)

    def __str__(self) -> str:
        head = f"{len(self.made)} of {len(self.effects)} effects made, run {self.run_id}"
        return "\n".join([head, *map(str, self.effects)])


@frozen
class RevertedCall:
    """One call that was made, and whether it was undone."""

    tool: str
    args: Mapping[str, Any]
    """What the tool had received; empty when the call cannot be reverted."""
    status: Literal["reverted", "failed", "not reverted", "cannot be reverted"]
    """`not reverted`: one that was made later could not be undone. `cannot be reverted`: the tool has no `revert=`, or
    the call had failed."""
    error: str = ""

    def __str__(self) -> str:
        said = f": {as_one_line(self.error)}" if self.error else ""
        call = as_one_line(self.tool) if self.status == "cannot be reverted" else call_text(self.tool, self.args)
        return f"{self.status}  {call}{said}"


@frozen
class RevertResult:
    """What `Runtime.revert` undid, the last call first."""

    run_id: str
    calls: tuple[RevertedCall, ...]

    @property
    def ok(self) -> bool:
        """True when every call was undone."""
        return all(each.status == "reverted" for each in self.calls)

    def __str__(self) -> str:
        return "\n".join([f"run {self.run_id}", *map(str, self.calls)])


@frozen
class PlannedCall:
    """A call that is written in a script, whether or not it is made."""

    tool: str
    line: int
    writes: bool = False
    needs_approval: bool = False
    problem: str = ""
    """Why it cannot succeed: there is no such tool, or arguments are missing."""

    def __str__(self) -> str:
        said = [*(["writes"] if self.writes else []), *(["needs approval"] if self.needs_approval else [])]
        parts = [self.tool, *said, *([self.problem] if self.problem else [])]
        return f"line {self.line}: {', '.join(map(as_one_line, parts))}"


@frozen
class Preflight:
    """The calls that a script can make, as far as their names are written out. No security decision rests on it."""

    calls: tuple[PlannedCall, ...] = ()
    """In the order of the text."""
    dynamic: tuple[int, ...] = ()
    """Lines of calls whose tool is not written out."""
    note: str = ""
    """Why this is not all."""
    error_line: int | None = None
    """Line of a syntax error, because of which the script cannot run."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any] | None) -> Preflight | None:
        """Return what `to_plain` was made of."""
        if plain is None:
            return None
        calls = tuple(PlannedCall(**each) for each in plain["calls"])
        return cls(calls, tuple(plain["dynamic"]), plain["note"], plain.get("error_line"))

    @property
    def problems(self) -> tuple[PlannedCall, ...]:
        """The calls that cannot succeed."""
        return tuple(each for each in self.calls if each.problem)

    def __str__(self) -> str:
        rows = [*map(str, self.calls), *(f"line {line}: a tool that is not written out" for line in self.dynamic)]
        where = f"line {self.error_line}: " if self.error_line is not None else ""
        return "\n".join([*rows, *([where + as_one_line(self.note)] if self.note else [])])


NOT_WHOLE = "; this may not be all, because the script ended before it was done"


def shown_effects(effects: Sequence[Effect], *, is_whole: bool = True) -> str:
    """Return a draft as text for a person or a model. What is not listed whole says so, and how to approve it.

    `is_whole`: the script came to its end.
    """
    if not effects:
        return "dry run: nothing was to be written" + ("" if is_whole else NOT_WHOLE)
    head = f"dry run: these {len(effects)} calls were collected in this order, and none was made"
    if len(effects) == 1:
        head = "dry run: this call was collected, and it was not made"
    head += "" if is_whole else NOT_WHOLE
    more = [f"... and {len(effects) - MAX_LISTED} more"] if len(effects) > MAX_LISTED else []
    if problem := cut_in_listing(effects):
        more.append(f"{problem}: read .effects, then commit with approve={effects_digest(effects)!r}, or with ids")
    return "\n".join([head, *map(str, effects[:MAX_LISTED]), *more])


def cut_in_listing(effects: Sequence[Effect]) -> str:
    """Say what of a draft its text does not show; empty when it shows everything."""
    if len(effects) > MAX_LISTED:
        return f"{len(effects) - MAX_LISTED} of these {len(effects)} calls are not listed (at most {MAX_LISTED} are)"
    cut = [each.id for each in effects if not each.is_listed_whole]
    if not cut:
        return ""
    return f"{', '.join(cut)}: listed in part (at most {MAX_ARG_CHARS} characters of an argument are)"


def effects_digest(effects: Sequence[Effect]) -> str:
    """Return the sha256 of everything that a commit of these effects would make."""
    rows = [[each.id, each.tool, dict(each.args), list(each.depends_on), each.reason] for each in effects]
    return value_digest(rows)
