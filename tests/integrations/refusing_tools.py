"""Tools whose calls fail, each in its own way, for tests of how a framework shows that."""

from __future__ import annotations

from toolcell import ToolAbort, ToolRegistry


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
