"""Groups of flags that a command takes as one argument: the limits, or a dataclass whose fields are options.

typer reads a function's signature. So a command's parameter for a group is replaced there by the group's flags.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from toolcell.cli.arguments import LIMITS_FILE, limit_flags, make_limits
from toolcell.config import Limits


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Several flags, and the function that makes one value of theirs."""

    parameters: tuple[inspect.Parameter, ...]
    make: Callable[[dict[str, Any]], Any]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that stands for a group by the group's flags."""
    groups: dict[str, FlagGroup] = {}
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command, eval_str=True).parameters.values():
        if (group := _group_of(each.annotation)) is None:
            parameters.append(each)
        else:
            groups[each.name] = group
            parameters += group.parameters

    def flagged(**given: Any) -> None:
        made = {
            name: group.make({each.name: given.pop(each.name) for each in group.parameters})
            for name, group in groups.items()
        }
        command(**given, **made)

    by_keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    flagged.__name__, flagged.__doc__ = command.__name__, command.__doc__
    flagged.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
    flagged.__annotations__ = {each.name: each.annotation for each in by_keyword}
    return flagged


def _group_of(kind: Any) -> FlagGroup | None:
    if kind is Limits:
        return FlagGroup(limit_flags(), lambda given: make_limits(given.pop(LIMITS_FILE), given))
    if not (inspect.isclass(kind) and dataclasses.is_dataclass(kind)):
        return None
    options = get_type_hints(kind, include_extras=True)
    parameters = tuple(
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=options[each.name]
        )
        for each in dataclasses.fields(kind)
    )
    return FlagGroup(parameters, lambda given: kind(**given))
