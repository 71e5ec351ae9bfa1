"""What has changed between two JSON Schemas of a tool, in words, and whether it can break a script that was right.

Schemas alone are compared: whether a certain script breaks is for a type checker to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from toolcell.tools.saved_script import ToolThen
from toolcell.tools.stubs import mapping

MAX_CHANGES: Final = 50
_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_ABOUT: Final = frozenset({"description", "title", "examples", "$comment", "default", "deprecated", "$schema"})


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """One change of a tool since a script was saved."""

    text: str
    can_break: bool


def changes(then: ToolThen, now: ToolThen) -> list[SchemaChange]:
    """Return how a tool has changed; [] when only what is said about it has."""
    found = [*_of_parameters(then.parameters, now.parameters)]
    if _meaning(then.returns) != _meaning(now.returns):
        found.append(SchemaChange(f"it returned {_kind(then.returns)} and returns {_kind(now.returns)} now", True))
    return found[:MAX_CHANGES]


def _of_parameters(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[SchemaChange]:
    before, after = mapping(then.get("properties")), mapping(now.get("properties"))
    needed, needs = _required(then), _required(now)
    gone, new = [each for each in before if each not in after], [each for each in after if each not in before]
    if len(gone) == len(new) == 1 and _meaning(before[gone[0]]) == _meaning(after[new[0]]):
        yield SchemaChange(f"parameter {gone[0]!r} is called {new[0]!r} now", True)
        gone, new = [], []
    for name in gone:
        yield SchemaChange(f"parameter {name!r} is gone", True)
    for name in new:
        if name in needs:
            yield SchemaChange(f"parameter {name!r} is new and required", True)
        else:
            yield SchemaChange(f"parameter {name!r} is new", False)
    for name in (each for each in before if each in after):
        if name in needs and name not in needed:
            yield SchemaChange(f"parameter {name!r} is required now", True)
        elif name in needed and name not in needs:
            yield SchemaChange(f"parameter {name!r} may be left out now", False)
        if _meaning(before[name]) != _meaning(after[name]):
            yield SchemaChange(
                f"parameter {name!r} took {_kind(before[name])} and takes {_kind(after[name])} now", True
            )
    if _remaining_keywords(then) != _remaining_keywords(now):
        yield SchemaChange("the rules for its parameters together are others", True)


def _required(schema: Mapping[str, Any]) -> frozenset[str]:
    names = schema.get("required")
    return frozenset(each for each in names if isinstance(each, str)) if isinstance(names, list) else frozenset()


def _remaining_keywords(schema: Mapping[str, Any]) -> Any:
    return _meaning({name: part for name, part in schema.items() if name not in ("properties", "required")})


def _meaning(schema: Any, is_by_name: bool = False) -> Any:
    """Return a schema without what is only said about it. `is_by_name`: the keys are names, not keywords."""
    if isinstance(schema, Mapping):
        kept = {name: part for name, part in schema.items() if is_by_name or name not in _ABOUT}
        return {name: _meaning(part, name in _BY_NAME and not is_by_name) for name, part in kept.items()}
    return [_meaning(each) for each in schema] if isinstance(schema, list) else schema


def _kind(schema: Any) -> str:
    if schema is None:
        return "something undeclared"
    text = json.dumps(_meaning(schema), sort_keys=True)
    return text if len(text) <= 100 else f"{text[:100]}..."
