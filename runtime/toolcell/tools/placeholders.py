"""Placeholders: plain data that stands for the result of a call which a dry run collected and did not make.

Shape: {"$result_of": "effect-1.<key of the dry run>"}. Knows no call; `dry_run` is the step of the pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Protocol, runtime_checkable

from toolcell_bridge.guest.placeholder import RESULT_OF

_EFFECT: Final = re.compile("effect-[1-9][0-9]{0,9}")
"""What a reference may name: anything else would be text of a script that is shown as ours."""

SCALARS: Final = frozenset({str, int, float, bool, bytes, type(None)})
"""What holds nothing. Asking whether a value is a mapping takes longer, and there may be 260,000 of them."""


@runtime_checkable
class DryRun(Protocol):
    """Decides about the calls of a run in which tools that write do not run. `control.draft.Draft` is one."""

    @property
    def key(self) -> str:
        """Ends the references of its placeholders; empty: there are none."""

    def approves(self, call: Any, /) -> bool:
        """Return true for a call that no approval hook is asked about."""
        ...

    def decide(self, call: Any, tool: Any, /) -> Any:
        """Return the tool that runs for an admitted call, or a result in its place."""

    def concluded(self, call: Any, result: Any, /) -> None:
        """A call has its result."""


class RecordedDryRun:
    """The `DryRun` of a script that is replayed: its placeholders are those of the record."""

    def __init__(self, key: str) -> None:
        self.key = key

    def approves(self, call: Any, /) -> bool:
        """Return false."""
        return False

    def decide(self, call: Any, tool: Any, /) -> Any:
        """Return the tool; in a replay nothing gets here."""
        return tool

    def concluded(self, call: Any, result: Any, /) -> None:
        """Do nothing."""


def placeholder(effect: str, key: str) -> dict[str, Any]:
    """Return what stands for the result of an effect."""
    return {RESULT_OF: f"{effect}.{key}"}


def effect_of(value: Any, key: str) -> str | None:
    """Return the effect whose result a value stands for; None for any other value."""
    if not (type(value) is dict or isinstance(value, Mapping)) or len(value) != 1:
        return None
    reference = value.get(RESULT_OF)
    if not isinstance(reference, str) or not reference.endswith(f".{key}"):
        return None
    effect = reference.removesuffix(f".{key}")
    return effect if _EFFECT.fullmatch(effect) else None


def effects_in(value: Any, key: str) -> tuple[str, ...]:
    """Return the effects that plain data refers to, each once."""
    found, left = dict[str, None](), [value]
    while left:
        each = left.pop()
        if type(each) is dict or isinstance(each, Mapping):
            if (effect := effect_of(each, key)) is not None:
                found[effect] = None
            else:
                left += [item for item in each.values() if type(item) not in SCALARS]
        elif isinstance(each, list | tuple):
            left += [item for item in each if type(item) not in SCALARS]
    return tuple(sorted(found, key=lambda effect: (len(effect), effect)))


def with_results(value: Any, key: str, results: Mapping[str, Any]) -> Any:
    """Return plain data with results in place of the placeholders that stand for them."""
    if type(value) in SCALARS:
        return value
    if type(value) is dict or isinstance(value, Mapping):
        effect = effect_of(value, key)
        if effect is not None:
            return results.get(effect, value)
        return {
            name: item if type(item) in SCALARS else with_results(item, key, results) for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [item if type(item) in SCALARS else with_results(item, key, results) for item in value]
    return value
