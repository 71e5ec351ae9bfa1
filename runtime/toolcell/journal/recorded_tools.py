"""`RecordedTools`: what a script was told of its tools, for another run of the script. None of them is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from toolcell.calls.call import RunContext
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.options import Origin
from toolcell.calls.result import ToolResult
from toolcell.errors import SessionError
from toolcell_bridge.guest.tool_names import name_meant
from toolcell_bridge.wire.messages import HTTP, INSTALL_PACKAGE


class RecordedTools:
    """What a run needs of a registry (`CallableTools`), as a record has it."""

    def __init__(
        self, shown: Sequence[ToolDefinition], returned: Mapping[str, Mapping[str, Any] | None], called: Iterable[str]
    ) -> None:
        """`returned`: the schema of what each tool returns, where it was known. `called`: names of tools."""
        self._shown, self._returned, self._called = shown, returned, tuple(called)

    def snapshot(self) -> Self:
        """Return itself: a record does not change."""
        return self

    def names(self, origin: Origin = Origin.CODE) -> list[str]:
        """Return the names of the tools that the script was told of."""
        return [each.name for each in self._shown]

    def names_text(self, origin: Origin = Origin.CODE) -> str:
        """Return the same names as one text."""
        return " ".join(self.names())

    def definitions(self, origin: Origin = Origin.CODE) -> list[ToolDefinition]:
        """Return what the script was told of them."""
        return list(self._shown)

    def returns(self, name: str) -> Mapping[str, Any] | None:
        """Return the schema of what a tool returns, where it was known."""
        return self._returned.get(name)

    def registered_name(self, name: str) -> str:
        """Return the recorded name for one that a provider was given in its place; else `name` itself."""
        return name_meant(name, [*self.names(), *self._called])

    @property
    def makes_requests(self) -> bool:
        """True when the script has sent a request, or installed a package."""
        return HTTP in self._called or INSTALL_PACKAGE in self._called

    async def dispatch(
        self,
        name: str,
        args: Mapping[str, Any] | str,
        *,
        call_id: str = "",
        origin: Origin | None = None,
        context: RunContext | None = None,
    ) -> ToolResult:
        """Raise: the journal of the script answers its calls."""
        raise SessionError("no tool is called while a state is rebuilt")
