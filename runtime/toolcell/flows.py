"""Data-flow labels: what a run has read, and where that must not be sent.

A run has read everything that its tools with `reads=` give, from the start of the first such call on. Nothing takes a
label away, so no script and no model can lose one.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Final, Literal, get_args

from toolcell.errors import UsageError
from toolcell.support.checks import closest, fields_known
from toolcell_bridge.wire.frozen import frozen

FlowAction = Literal["ask", "deny"]

MAX_LABEL_CHARS: Final = 64

_GLOB: Final = frozenset("*?[")


@fields_known
@frozen
class Flow:
    """What happens to a call that sends to `dst` in a run that has read `src`. Both may be globs."""

    src: str
    dst: str
    action: FlowAction = "deny"
    """`ask`: the call needs approval. `deny`: it is refused."""

    def __post_init__(self) -> None:
        labels_of([self.src], "Flow(src)")
        labels_of([self.dst], "Flow(dst)")
        if self.action not in get_args(FlowAction):
            raise UsageError(f'Flow(action) must be "ask" or "deny", not {self.action!r:.80}')

    def reason(self, sends: Iterable[str], held: Iterable[str]) -> str:
        """Return what this rule says about a call that sends to `sends`; empty when it is not about it."""
        to = [label for label in sends if fnmatch.fnmatchcase(label, self.dst)]
        read = [label for label in held if fnmatch.fnmatchcase(label, self.src)] if to else []
        return f'it sends to "{min(to)}", and this run has read "{min(read)}"' if read else ""


def flow_of(flows: Iterable[Flow], sends: Iterable[str], held: Iterable[str]) -> tuple[FlowAction, str] | None:
    """Return what the strictest rule about a call says, with the reason; None when no rule is about it."""
    found: tuple[FlowAction, str] | None = None
    for flow in flows:
        if (found is None or flow.action == "deny") and (reason := flow.reason(sends, held)):
            found = flow.action, reason
            if flow.action == "deny":
                break
    return found


def labels_of(given: object, what: str) -> frozenset[str]:
    """Return one label or several as a set.

    Raises:
        UsageError: one is not a label; `what` names it.
    """
    names = [given] if isinstance(given, str) or not isinstance(given, Iterable) else [*given]
    labels = set[str]()
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_LABEL_CHARS:
            raise UsageError(f"{what}: a label is a text of 1 to {MAX_LABEL_CHARS} characters, not {name!r:.80}")
        labels.add(name)
    return frozenset(labels)


def unmatched(flows: Iterable[Flow], reads: Iterable[str], sends: Iterable[str]) -> list[str]:
    """Say which rules are about labels that no tool has, and which label may be meant. Nothing is said of globs."""
    known, said = {"src": set(reads), "dst": set(sends)}, list[str]()
    for flow in flows:
        for end, labels in known.items():
            label: str = getattr(flow, end)
            if label not in labels and not _GLOB & {*label}:
                near = closest(label, sorted(labels))
                hint = f"; did you mean {near!r}?" if near else ""
                keyword = "reads" if end == "src" else "sends"
                said.append(f"{flow} decides nothing: no tool has {keyword}={label!r}{hint}")
    return said


class Labels:
    """The labels of everything that a run has read. Runs that were joined have them in common from then on."""

    __slots__ = ("_held", "_same_as")

    def __init__(self, held: Iterable[str] = ()) -> None:
        self._held = frozenset(held)
        self._same_as: Labels | None = None

    def _common(self) -> Labels:
        labels = self
        while labels._same_as is not None:
            labels = labels._same_as
        return labels

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self._held if self._same_as is None else self._common()._held

    def add(self, names: Iterable[str]) -> None:
        """Take note that something with these labels is read."""
        labels = self._common()
        labels._held = labels._held.union(names)

    def join(self, other: Labels) -> None:
        """Have all labels in common with another run, those to come included."""
        mine, theirs = self._common(), other._common()
        if mine is not theirs:
            theirs.add(mine._held)
            mine._same_as = theirs
