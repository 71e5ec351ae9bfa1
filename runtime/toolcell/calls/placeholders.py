"""Placeholders: plain data that stands for the result of a call which a dry run collected and did not make.

Shape: {"$result_of": "effect-1.<key of the dry run>"}, and "effect-1.items[0].id.<key>" for a member.
Knows no call; `control/draft.py` collects the effects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from toolcell.calls.call import Feature
from toolcell.calls.schema import dicts_in
from toolcell.calls.values import SCALARS
from toolcell.results import Preflight
from toolcell_bridge.guest.placeholder import DRY_RUN, RESULT_OF, parts_of
from toolcell_bridge.wire.messages import RunScript

_STEP: Final = re.compile(r"\.([\w-]+)|\[([0-9]+)\]", re.ASCII)


class DryRun(Feature, is_one_of_its_kind=True):
    """A run in which tools that write do not run. `control.draft.Draft` is one."""

    key = ""
    """Ends the references of its placeholders; empty: there are none."""
    preflight: Preflight | None = None
    """Preflight of a script that ran with `preflight=True`."""

    def send(self, message: RunScript, /) -> RunScript:
        """Return the message of a script with what its guest makes placeholders with."""
        return replace(message, inputs={**message.inputs, DRY_RUN: self.key}) if self.key else message


class RecordedDryRun(DryRun):
    """The `DryRun` of a script that is replayed: its placeholders are those of the record."""

    def __init__(self, key: str) -> None:
        self.key = key


def placeholder(effect: str, key: str) -> dict[str, Any]:
    """Return what stands for the result of an effect."""
    return {RESULT_OF: f"{effect}.{key}"}


def _referred(value: Mapping[str, Any], key: str) -> tuple[str, str] | None:
    """Shape: ("effect-1", ".id"); None for any other value."""
    reference = value.get(RESULT_OF) if len(value) == 1 else None
    if not isinstance(reference, str) or (parts := parts_of(reference)) is None or parts[2] != key:
        return None
    return parts[0], parts[1]


def effect_of(value: Any, key: str) -> str | None:
    """Return the effect whose result, or whose result's member, a value stands for; None for any other value."""
    found = _referred(value, key) if type(value) is dict or isinstance(value, Mapping) else None
    return None if found is None else found[0]


def effects_in(value: Any, key: str) -> tuple[str, ...]:
    """Return the effects that plain data refers to, each once."""
    found = {effect for each in dicts_in(value) if (effect := effect_of(each, key)) is not None}
    return tuple(sorted(found, key=lambda effect: (len(effect), effect)))


def _member(result: Any, path: str, otherwise: Any) -> Any:
    """Return what is at a path of a result; `otherwise` where there is nothing."""
    for name, number in _STEP.findall(path):
        if name and type(result) is dict and name in result:
            result = result[name]
        elif number and type(result) is list and int(number) < len(result):
            result = result[int(number)]
        else:
            return otherwise
    return result


def with_results(value: Any, key: str, results: Mapping[str, Any]) -> Any:
    """Return plain data with results in place of the placeholders that stand for them. What a result does not have
    stays a placeholder."""
    if type(value) in SCALARS:
        return value
    if type(value) is dict or isinstance(value, Mapping):
        if (found := _referred(value, key)) is not None:
            return _member(results[found[0]], found[1], value) if found[0] in results else value
        return {
            name: item if type(item) in SCALARS else with_results(item, key, results) for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [item if type(item) in SCALARS else with_results(item, key, results) for item in value]
    return value
