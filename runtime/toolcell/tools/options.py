"""What is known about a tool besides its definition: who may call it, how long, how many at once.

Data only. The pipeline and batches act on it; the model never sees it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


class Origin(enum.StrEnum):
    """Where a call comes from."""

    MODEL = "model"
    """A model's tool call, or the program itself."""
    PLAN = "plan"
    """A step of execute_plan."""
    CODE = "code"
    """`call_tool` in sandboxed code."""
    SUBAGENT = "subagent"
    """The model of an agent that is itself a tool."""

    __hash__ = str.__hash__  # Enum's own is Python code, and every call is looked up by origin


MODEL, PLAN, CODE, SUBAGENT = Origin

EVERY_ORIGIN = frozenset(Origin)

CallableFrom = frozenset[Origin]

ExecutionMode = Literal["", "parallel", "sequential"]
"""Empty inherits; sequential forces every batch the tool appears in to run one call at a time."""

Coercion = Literal["safe", "lenient", "off"]
"""`safe` mends common model mistakes; `lenient` also turns null into 0, "" or false; `off` mends nothing."""

Extras = Literal["drop", "allow", "forbid"]
"""What happens to properties a schema does not mention when it does not say: silent schemas drop them by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """Facts about one tool that policy, batches and formats use."""

    label: str = ""
    """For a user interface only."""
    read_only: bool = False
    """Changes nothing; identical plan steps may share one call."""
    idempotent: bool = False
    """Calling twice is the same as calling once, so a failed call may be retried."""
    requires_approval: bool = False
    """Refused unless an approval hook lets it pass."""
    timeout_s: float | None = None
    """Seconds one call may take; None is the registry's default, `math.inf` is no limit."""
    max_result_bytes: int | None = None
    """Larger structured results are an error, longer text is cut; None is no limit."""
    callable_from: CallableFrom = EVERY_ORIGIN
    """Who may call it. An agent's model counts as a model."""
    exclusive_group: str | None = None
    """Calls of tools in one group never overlap."""
    max_concurrency: int | None = None
    """Calls of this tool at once; None is no limit of its own."""
    mode: ExecutionMode = ""
    returns: Mapping[str, Any] | None = None
    """JSON Schema of the structured result."""
    orchestrates: bool = False
    """Runs other tools (plan, code, sub-agent): holds no worker while it waits for them."""
    is_agent: bool = False
    """Its calls are shown as an agent's work."""
    blocking: bool = True
    """A synchronous function runs in a worker thread; False runs it on the event loop."""
    validate: bool = True
    coercion: Coercion | None = None
    """None is the registry's default."""
    extras: Extras | None = None
    """None is the registry's default."""

    def allows(self, origin: Origin) -> bool:
        """True when a call from `origin` may reach this tool."""
        allowed = self.callable_from
        return origin in allowed or (origin is Origin.SUBAGENT and Origin.MODEL in allowed)


DEFAULT_TOOL_OPTIONS = ToolOptions()
