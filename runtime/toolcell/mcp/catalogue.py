"""The tools of one MCP server as they are now: which are offered, which have changed since, which were left out.

Asks the server for its list, page by page, within bounds, and keeps the registry as the list is.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import anyio.lowlevel
from mcp import MCPError
from mcp.client import Client
from mcp_types import PaginatedRequestParams, Tool

from toolcell.calls.checker_process import refused_schemas
from toolcell.errors import McpServerError, RegistrationError, UsageError
from toolcell.mcp.broken_tools import ToolPages
from toolcell.mcp.definitions import (
    Approve,
    McpProblem,
    McpTool,
    read_tool,
    shown_name,
    unused_output_schema,
)
from toolcell.mcp.structure import MAX_TOOLS
from toolcell.support.foreign_definitions import safe_text
from toolcell.support.log import logger_of
from toolcell.tools import ToolContext, ToolOptions, ToolRegistry, ToolResult, ToolSpec

MAX_PAGES = 200
MAX_REMEMBERED = 20_000
"""Tools of one server whose first definition is remembered; what comes after them is left out."""
MAX_CURSOR_CHARS = 4_096
MAX_DEFINITIONS_CHARS = 32 * 1024 * 1024
"""Most characters of all definitions of one server."""
MAX_PROBLEMS = 200
"""That are kept; the first and the latest matter, and a server could make any number."""
MAX_PROBLEM_CHARS = 2_000
AT_ONCE = 50
"""Tools that are read or registered before the event loop has its turn."""

Changed = Literal["refuse", "accept"]
Broken = Literal["leave_out", "refuse"]

logger = logger_of("toolcell.mcp")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tools of a server are offered, and how."""

    allow: tuple[str, ...] = ()
    """Globs over the server's own names; empty: all."""
    deny: tuple[str, ...] = ()
    approve: Approve = "destructive"
    changed: Changed = "refuse"
    pins: Mapping[str, str] = field(default_factory=dict)
    options: ToolOptions = field(default_factory=ToolOptions)
    broken: Broken = "leave_out"
    """Whether a tool that cannot be registered is left out, or its server refused."""

    def offers(self, name: str) -> bool:
        """Return whether a tool is offered. `deny` ignores case."""
        if any(fnmatch.fnmatchcase(name.casefold(), glob.casefold()) for glob in self.deny):
            return False
        return not self.allow or any(fnmatch.fnmatchcase(name, glob) for glob in self.allow)


class McpCatalogue:
    """What a server offers, in a registry."""

    def __init__(
        self,
        namespace: str,
        registry: ToolRegistry,
        selection: Selection,
        invoke: Callable[[McpTool], Callable[[ToolContext], Awaitable[ToolResult]]],
    ) -> None:
        self._namespace, self._registry, self._selection, self._invoke = namespace, registry, selection, invoke
        self.tools: dict[str, McpTool] = {}
        """Registered, by the server's own names."""
        self.withdrawn: dict[str, str] = {}
        """Registered, and refused now: the reason, by the server's own names."""
        self._first: dict[str, str] = {}
        """Digests of first definitions, by the names of tools here. A tool that was off the list for a while, in a
        restart too, or comes back under another name that is the same one here, is still compared with its first."""
        self.problems: deque[McpProblem] = deque(maxlen=MAX_PROBLEMS)

    def report(self, kind: Any, message: str, tool: str = "") -> None:
        """Keep and log a problem, once."""
        problem = McpProblem(tool, kind, message)
        if problem not in self.problems:
            self.problems.append(problem)
            logger.warning("MCP server %s: %s", self._namespace, problem)

    def report_broken(self, name: str, problem: str) -> None:
        """Leave out a tool that cannot be registered, if it is one of those that are offered.

        Raises:
            McpServerError: such a tool refuses its server.
        """
        if not self._selection.offers(name):
            return
        shown = shown_name(name)
        if self._selection.broken == "refuse":
            raise McpServerError(safe_text(f"the tool {shown!r} cannot be registered: {problem}", MAX_PROBLEM_CHARS))
        self.report("left_out", safe_text(f"it is left out: {problem}", MAX_PROBLEM_CHARS), shown)

    async def refresh(self, client: Client, listing: ToolPages) -> None:
        """Ask for the list, and make the registry agree with it."""
        listing.begin()
        listed = await self._read(listing.completed(await self._list(client, listing)))
        for name in listing.unused.keys() & listed.keys():
            self._report_unused_output(name, listing.unused[name])
        gone = [name for name in self.tools if name not in listed]
        self._unregister([self.tools.pop(name) for name in gone])
        for name in gone:
            self.withdrawn.pop(name, None)
        new = list[McpTool]()
        for name, tool in listed.items():
            known = self.tools.get(name)
            if known is None:
                if self._is_as_first(tool):
                    new.append(tool)
            elif known.digest == tool.digest:
                self.withdrawn.pop(name, None)
            elif self._selection.changed == "accept":
                self.report("changed", f"its definition changed: {known.digest} is now {tool.digest}", shown_name(name))
                self._first[tool.definition.name] = tool.digest
                new.append(tool)
            else:
                said = f"its definition changed since it was registered: {known.digest} is now {tool.digest}"
                self.withdrawn[name] = said
                self.report("changed", f"{said}; it is refused", shown_name(name))
        new = await self._usable(new)
        for start in range(0, len(new), AT_ONCE):
            self._register(new[start : start + AT_ONCE])
            await anyio.lowlevel.checkpoint()

    async def _usable(self, tools: Sequence[McpTool]) -> list[McpTool]:
        """Return the tools whose schemas can be compiled. A tool loses an output schema that cannot be."""
        found = list[McpTool]()
        inputs = await refused_schemas([tool.definition.parameters for tool in tools])
        outputs = await refused_schemas([tool.output_schema or {} for tool in tools])
        for tool, wrong_input, wrong_output in zip(tools, inputs, outputs, strict=True):
            if wrong_input:
                self.report_broken(tool.remote_name, wrong_input)
                continue
            if wrong_output:
                self._report_unused_output(tool.remote_name, wrong_output)
                tool = replace(tool, output_schema=None, is_wrapped=False, options=replace(tool.options, returns=None))
            found.append(tool)
        return found

    def _report_unused_output(self, name: str, wrong: str) -> None:
        problem = unused_output_schema(name, wrong)
        self.report(problem.kind, problem.message, problem.tool)

    def _is_as_first(self, tool: McpTool) -> bool:
        """Return whether a tool that is not registered is new, or as it was when it was first; report it if not."""
        name = tool.definition.name
        first = self._first.get(name)
        if first is None and len(self._first) >= MAX_REMEMBERED:
            self.report("server", f"it has listed more than {MAX_REMEMBERED} tools; the others are left out")
            return False
        if first is None or first == tool.digest or self._selection.changed == "accept":
            self._first[name] = tool.digest
            return True
        said = f"its definition changed since it was first registered: {first} is now {tool.digest}; it is left out"
        self.report("changed", said, shown_name(tool.remote_name))
        return False

    async def _list(self, client: Client, listing: ToolPages) -> list[Tool]:
        tools, cursors = list[Tool](), set[str]()
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            try:
                page = await client.session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            except MCPError:
                if cursor == "":
                    return tools
                raise
            if cursor == "" and {tool.name for tool in page.tools} <= {tool.name for tool in tools}:
                return tools  # by an empty cursor, servers mean another page, or that there is none
            for name, problem in listing.take_broken().items():
                self.report_broken(name, problem)
                await anyio.lowlevel.checkpoint()  # there may be thousands
            tools += page.tools
            if len(tools) > MAX_TOOLS:
                self.report("server", f"it lists more than {MAX_TOOLS} tools; the others are left out")
                return tools[:MAX_TOOLS]
            cursor = page.next_cursor
            if cursor is None or (not cursor and cursor in cursors):
                return tools
            if cursor in cursors or len(cursor) > MAX_CURSOR_CHARS:
                self.report(
                    "server", f"its list has no end: page {len(cursors) + 2} repeats, or its cursor is too long"
                )
                return tools
            cursors.add(cursor)
        self.report("server", f"its list has more than {MAX_PAGES} pages; the others are left out")
        return tools

    async def _read(self, tools: Sequence[Tool]) -> dict[str, McpTool]:
        """Return the tools that are offered and can be, by the server's own names."""
        read, local, size = dict[str, McpTool](), set[str](), 0
        for number, tool in enumerate(tools):
            if not number % AT_ONCE:
                await anyio.lowlevel.checkpoint()
            if not self._selection.offers(tool.name):
                continue
            shown = shown_name(tool.name)
            try:
                made = read_tool(self._namespace, tool, self._selection.approve, self._selection.options)
            except (RegistrationError, UsageError) as exc:
                self.report_broken(tool.name, str(exc))
                continue
            size += made.definition.size_chars
            pinned = self._selection.pins.get(tool.name)
            theirs, is_taken = self._registry.get(made.definition.name)
            is_taken = is_taken and theirs is not self.tools.get(tool.name)
            if size > MAX_DEFINITIONS_CHARS:
                self.report("server", f"its definitions have more than {MAX_DEFINITIONS_CHARS} characters; cut")
                break
            if is_taken or made.definition.name in local or tool.name in read:
                self.report("left_out", f"it is left out: there is another tool {made.definition.name!r}", shown)
            elif pinned is not None and pinned != made.digest:
                self.report("left_out", f"it is left out: it is pinned as {pinned} and is {made.digest}", shown)
            else:
                local.add(made.definition.name)
                read[tool.name] = made
                for problem in made.problems:
                    self.report(problem.kind, problem.message, problem.tool)
        return read

    def _register(self, tools: Sequence[McpTool]) -> None:
        """Register tools; one that cannot be is left out, and the others are registered all the same."""
        specs = [
            ToolSpec(
                definition=each.definition,
                invoke=self._invoke(each),
                options=each.options,
                source=each,
                is_foreign=True,
            )
            for each in tools
        ]
        try:
            self._registry.add(SimpleNamespace(to_specs=lambda: specs), replace=True)
        except (RegistrationError, UsageError) as exc:
            if len(tools) > 1:
                for tool in tools:
                    self._register([tool])
                return
            self.report_broken(tools[0].remote_name, str(exc))
            return
        self.tools |= {tool.remote_name: tool for tool in tools}

    def _unregister(self, tools: Iterable[McpTool]) -> None:
        names = [tool.definition.name for tool in tools if self._registry.get(tool.definition.name)[0] is tool]
        if names:
            with contextlib.suppress(UsageError):  # the registry was frozen since
                self._registry.unregister(*names)

    def clear(self) -> None:
        """Take all tools out of the registry."""
        self._unregister(self.tools.values())
        self.tools.clear()
