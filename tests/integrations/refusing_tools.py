"""Tools whose calls fail, each in its own way, for tests of how a framework shows that; and what is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from toolcell import Runtime, ToolAbort, ToolRegistry, UsageError
from toolcell.errors import RegistrationError


def refusing_registry() -> ToolRegistry:
    """`denied` is refused, `careful` needs approval, and `aborts` ends the run."""
    registry = ToolRegistry()

    @registry.tool
    def denied() -> str:
        """Do what nobody may."""
        return "done"

    @registry.tool(requires_approval=True)
    def careful() -> str:
        """Do what somebody has to approve."""
        return "done"

    @registry.tool
    def aborts() -> str:
        """End the whole run."""
        raise ToolAbort("no further")

    registry.blacklist("denied")
    return registry


def check_refusals(make: Callable[..., object], weather: Any, **others: str) -> None:
    """Check which arguments are refused where a framework's tool that runs code is made."""
    runtime = Runtime()
    for given, options, kind, said in (
        ("process", {}, UsageError, "runtime"),
        (runtime, {"tools": weather}, UsageError, r"tools=\[weather\]"),
        (runtime, {"tools": [weather, weather]}, RegistrationError, "weather"),
        *((runtime, {name: value}, UsageError, value) for name, value in others.items()),
    ):
        with pytest.raises(kind, match=said):
            make(given, **options)
