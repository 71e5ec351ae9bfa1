"""What a script would do and what came of it: planned calls, effects, results of commits and reverts, as frozen data.

Knows no tool and no run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from toolcell.json_text import json_text
from toolcell.text import clean
from toolcell_bridge.guest.placeholder import RESULT_OF

MAX_ARG_CHARS: Final = 200
"""Of one argument of an effect, in text."""

MAX_LISTED: Final = 50
"""Effects that a text lists."""


@dataclass(frozen=True, slots=True)
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

    def __str__(self) -> str:
        line = f"  (line {self.line})" if self.line is not None else ""
        return f"{self.id}: {self.tool}({shown_args(self.args)}){line}"


EffectStatus = Literal["made", "failed", "refused", "not made", "not approved"]


@dataclass(frozen=True, slots=True)
class EffectResult:
    """What came of one effect of a draft."""

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
        said = f": {self.error}" if self.error else ""
        return f"{self.status}  {self.id}: {self.tool}({shown_args(self.args)}){said}"


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What `Runtime.commit` made of a draft."""

    run_id: str
    """Of the calls of the commit, in events and in the audit log."""
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
        return clean("\n".join([head, *map(str, self.effects)]))


@dataclass(frozen=True, slots=True)
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
        said = f": {self.error}" if self.error else ""
        args = "" if self.status == "cannot be reverted" else f"({shown_args(self.args)})"
        return f"{self.status}  {self.tool}{args}{said}"


@dataclass(frozen=True, slots=True)
class RevertResult:
    """What `Runtime.revert` undid, the last call first."""

    run_id: str
    calls: tuple[RevertedCall, ...]

    @property
    def ok(self) -> bool:
        """True when every call was undone."""
        return all(each.status == "reverted" for each in self.calls)

    def __str__(self) -> str:
        return clean("\n".join([f"run {self.run_id}", *map(str, self.calls)]))


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call that is written in a script, whether it comes to be made or not."""

    tool: str
    line: int
    writes: bool = False
    needs_approval: bool = False
    problem: str = ""
    """Why it cannot succeed: there is no such tool, or arguments are missing."""

    def __str__(self) -> str:
        said = [*(["writes"] if self.writes else []), *(["needs approval"] if self.needs_approval else [])]
        return f"line {self.line}: {self.tool}" + "".join(f", {each}" for each in [*said, self.problem] if each)


@dataclass(frozen=True, slots=True)
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
        return clean("\n".join([*rows, *([where + self.note] if self.note else [])]))


def shown_effects(effects: Iterable[Effect]) -> str:
    """Return a draft as text for a person or a model."""
    listed = list(effects)
    if not listed:
        return "dry run: nothing was to be written"
    more = [f"... and {len(listed) - MAX_LISTED} more"] if len(listed) > MAX_LISTED else []
    head = f"dry run: these {len(listed)} calls were collected in this order, and none was made"
    if len(listed) == 1:
        head = "dry run: this call was collected, and it was not made"
    return clean("\n".join([head, *map(str, listed[:MAX_LISTED]), *more]))


def shown_args(args: Mapping[str, Any]) -> str:
    """Return arguments as text. What is large is cut before it is written out."""
    first = itertools.islice(args.items(), MAX_ARG_CHARS)
    more = f", ... ({len(args)} arguments)" if len(args) > MAX_ARG_CHARS else ""
    return ", ".join(f"{_name(name)}={_shown(value)}" for name, value in first) + more


def _name(name: object) -> str:
    text = str(name)
    return text if len(text) <= MAX_ARG_CHARS else f"{text[:MAX_ARG_CHARS]}..."


def _shown(value: Any) -> str:
    pieces, room = list[str](), MAX_ARG_CHARS
    for piece in _pieces(value):
        pieces.append(piece[:room])
        room -= len(piece)
        if room < 0:
            return f"{''.join(pieces)}... ({_size(value)})"
    return "".join(pieces)


def _size(value: Any) -> str:
    if isinstance(value, str | bytes):
        return f"{len(value)} {'characters' if isinstance(value, str) else 'bytes'}"
    return f"{len(value)} values" if isinstance(value, Mapping | list | tuple) else "more"


def _pieces(value: Any) -> Iterator[str]:
    """Yield the text of a value, piece by piece, each of bounded length."""
    if isinstance(value, Mapping) and len(value) == 1 and isinstance(reference := value.get(RESULT_OF), str):
        yield f"<result of {reference[:MAX_ARG_CHARS].partition('.')[0]}>"
    elif isinstance(value, Mapping):
        for number, (name, item) in enumerate(value.items()):
            yield ", " if number else "{"
            yield from _pieces(name)
            yield ": "
            yield from _pieces(item)
        yield "}" if value else "{}"
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield ", " if number else "["
            yield from _pieces(item)
        yield "]" if value else "[]"
    else:
        yield json_text(value[: MAX_ARG_CHARS + 1] if isinstance(value, str | bytes) else value)
