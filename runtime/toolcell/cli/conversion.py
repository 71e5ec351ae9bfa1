"""Commands that use pydantic only for parameters whose values have to be converted.

typer uses it for each parameter, also for one that was not given. Its import and its adapters took a sixth of the
processor time of `toolcell run` with one line.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command that converts only what needs it."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, for parsing and for help."""
        return _sparing(super().get_params(ctx))


class Group(TyperGroup):
    """A command with commands of its own, that converts only what needs it."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, for parsing and for help."""
        return _sparing(super().get_params(ctx))


def _sparing(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        each.process_value = partial(_process_value, each)
    return parameters


def _process_value(parameter: Any, ctx: Any, value: Any) -> Any:
    is_several = parameter.multiple or parameter.nargs != 1
    if value is None and not parameter.required:
        kept = () if is_several else None
    elif not is_several and _is_kept(parameter, value):
        kept = value
    else:
        return type(parameter).process_value(parameter, ctx, value)
    return parameter.callback(ctx, parameter, kept) if parameter.callback else kept


def _is_kept(parameter: Any, value: Any) -> bool:
    """Whether this is a text of the parameter's type. pydantic refuses one that is not Unicode."""
    kind = parameter.type_descriptor.annotation if hasattr(parameter, "type_descriptor") else None
    is_text = isinstance(value, str) and value.encode(errors="ignore").decode() == value
    return is_text and (kind is str or (get_origin(kind) is Literal and value in get_args(kind)))
