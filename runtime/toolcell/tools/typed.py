"""Definitions derived from record types, so that schema and decoded type cannot drift apart."""

from __future__ import annotations

from typing import Any

from toolcell.errors import RegistrationError
from toolcell.tools.definition import ToolDefinition, check_definition
from toolcell.tools.schema import record_schema


def must_tool(name: str, description: str, record: Any) -> ToolDefinition:
    """The definition of a tool whose arguments are a pydantic model, dataclass or TypedDict.

    Raises:
        RegistrationError: no such definition can be derived.
    """
    definition = ToolDefinition(name, description, record_schema(record))
    check_definition(definition)
    return definition


def new_tool(name: str, description: str, record: Any) -> tuple[ToolDefinition | None, str]:
    """The same for types that are only known at run time. Shape: (definition, "") or (None, what is wrong)."""
    try:
        return must_tool(name, description, record), ""
    except RegistrationError as exc:
        return None, str(exc)
