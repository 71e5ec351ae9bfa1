"""What a caller tells the service about its tools: definitions and rules as plain data."""

from __future__ import annotations

from typing import Any, Final

from toolcell.calls.call import CallableTools
from toolcell.calls.options import EVERY_ORIGIN
from toolcell.errors import UsageError
from toolcell.tools import RegisteredTool, RegistrySettings, RegistryState, ToolOptions, ToolRegistry

TOLD: Final = (
    "label",
    "read_only",
    "idempotent",
    "requires_approval",
    "timeout_s",
    "returns",
    "orchestrates",
    "is_agent",
    "coercion",
    "extras",
)
"""Options of `ToolOptions` that the service has to know. The others are met where the tool runs."""

KEPT_OFFERS: Final = 4
"""Toolsets of a caller that the service keeps. The one that was not used for longest is forgotten."""


def offered_tools(tools: CallableTools) -> list[dict[str, Any]]:
    """Return the tools that scripts and plans may call, for the service.

    Raises:
        UsageError: they are not a registry.
    """
    if not isinstance(tools, ToolRegistry):
        raise UsageError(f"a Client takes the tools of a ToolRegistry, not of {type(tools).__name__}")
    state = tools.state
    return [_offered(tool, state, tools) for tool in state.tools.values()]


def offer_key(tools: ToolRegistry) -> tuple[Any, ...]:
    """Return what changes when there is something else to offer."""
    state = tools.state
    rules = tuple((id(policy), policy.version) for policy in state.policies)
    return (*((name, id(tool)) for name, tool in state.tools.items()), *rules)


def _offered(tool: RegisteredTool, state: RegistryState, tools: ToolRegistry) -> dict[str, Any]:
    definition = state.definition(tool)
    return {
        "name": tool.name,
        "description": definition.description,
        "parameters": definition.checked_parameters,
        "options": _options(tool.options, tool, tools.settings),
        "callable_from": sorted(map(str, tool.options.callable_from)),
        "hidden_from": sorted(str(origin) for origin in EVERY_ORIGIN if not state.permits(tool, origin)),
        "has_preview": tool.options.preview is not None,
        "has_revert": tool.options.revert is not None,
    }


def _options(options: ToolOptions, tool: RegisteredTool, settings: RegistrySettings) -> dict[str, Any]:
    plain = {name: getattr(options, name) for name in TOLD}
    plain["returns"] = None if options.returns is None else dict(options.returns)
    plain["reads"], plain["sends"] = sorted(options.reads), sorted(options.sends)
    plain["coercion"] = options.coercion or settings.coercion
    plain["extras"] = options.extras or settings.extras
    plain["timeout_s"] = float(settings.timeout_s if options.timeout_s is None else options.timeout_s)
    # What is rewritten before it is checked can only be checked where that happens.
    plain["validate"] = options.validate and tool.spec.prepare is None
    return plain
