"""`RegistryView`: the part of a registry that reads it and calls its tools. Nothing here changes a registry.

It is for runs, which work with a snapshot. What it reads is in `registry_state`; `registry` adds the changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from typing import Any

from toolcell.errors import UsageError
from toolcell.tools.batch import OnResult, run_batch
from toolcell.tools.call import Call, CompletionCallback, RunContext
from toolcell.tools.catalogue import FOUND, find_by_meaning, named_of
from toolcell.tools.checks import check_kind
from toolcell.tools.compat import mcp_tool
from toolcell.tools.context import current, share_labels
from toolcell.tools.definition import AnthropicToolDef, ProviderToolDef, ToolDefinition
from toolcell.tools.detail import Detail, tools_text
from toolcell.tools.events import EventBus
from toolcell.tools.hooks import Hook
from toolcell.tools.model_calls import ToolCall, unique_ids
from toolcell.tools.observed import with_observed
from toolcell.tools.options import Origin
from toolcell.tools.pipeline import answer_call, refuse, run_call
from toolcell.tools.plan import PlanRecord, Step, run_plan
from toolcell.tools.policy import CallPolicy
from toolcell.tools.registry_state import RegistrySettings, RegistryState
from toolcell.tools.result import ToolResult
from toolcell.tools.shown import listed_within
from toolcell.tools.spec import RegisteredTool
from toolcell.tools.stub_types import declared
from toolcell.tools.stubs import python_module


class RegistryView(ABC):
    """Read a registry, and make calls on its tools."""

    def __init__(self, state: RegistryState, events: EventBus, shared_run: RunContext) -> None:
        self._state = state
        self.events = events
        """Events of calls that are made without a run of their own."""
        self._shared_run = shared_run

    @property
    def state(self) -> RegistryState:
        """Everything this registry knows at this moment."""
        return self._state

    @property
    def settings(self) -> RegistrySettings:
        """How calls behave unless a tool says otherwise."""
        return self._state.settings

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """Around every call."""
        return self._state.hooks

    @property
    def policies(self) -> tuple[CallPolicy, ...]:
        """Rules about who may call what."""
        return self._state.policies

    def definitions(
        self,
        origin: Origin = Origin.MODEL,
        *,
        policies: tuple[CallPolicy, ...] = (),
        shown_chars: int | None = None,
        found: Iterable[str] = (),
    ) -> list[ToolDefinition]:
        """Return the definitions that a caller from `origin` sees, in order of registration, without refused tools.

        `shown_chars`: when they have more characters and `search_tools` is offered, only it, tools that run others such
        as execute_code, and those of the names in `found`. The others can be called all the same.
        """
        state = with_observed(self._state)
        tools = [*state.visible(origin, policies)]
        shown = tools if shown_chars is None else listed_within(tools, shown_chars, found)
        return [state.definition(tool, policies) for tool in shown]

    def all_definitions(self) -> list[ToolDefinition]:
        """Return the definitions that a model sees."""
        return self.definitions()

    def names(self, origin: Origin = Origin.MODEL) -> list[str]:
        """Return the names that a caller from `origin` may use."""
        return self._state.names(origin)

    def meant(self, name: str) -> str:
        """Return the registered name behind one such as `github__create_issue`; else `name` itself."""
        return self._state.meant(name)

    def get(self, name: str) -> tuple[Any, bool]:
        """Shape: (the tool as it was registered, True), or (None, False)."""
        tool = self._state.tools.get(name)
        return (tool.spec.source, True) if tool is not None else (None, False)

    def registered(self, name: str) -> RegisteredTool | None:
        """Return a tool as the registry stores it."""
        return self._state.tools.get(name)

    def returns(self, name: str) -> Mapping[str, Any] | None:
        """Return the JSON Schema that a tool declares of what it returns; None where it says nothing."""
        tool = self._state.tools.get(name)
        return declared(tool.options.returns) if tool is not None else None

    def has(self, name: str) -> bool:
        """True when a tool of that name is registered, refused or not."""
        return name in self._state.tools

    def count(self) -> int:
        """How many names are registered."""
        return len(self._state.tools)

    def is_empty(self) -> bool:
        """True when there are none."""
        return not self._state.tools

    def get_summaries(self) -> list[str]:
        """Shape: "- `name` - description", one for each tool."""
        return [f"- `{tool.name}` - {tool.definition.description}" for tool in self._state.tools.values()]

    def to_provider_defs(self, origin: Origin = Origin.MODEL) -> list[ProviderToolDef]:
        """Return definitions as OpenAI takes them."""
        return [definition.to_openai() for definition in self.definitions(origin)]

    def get_definitions(self) -> list[dict[str, Any]]:
        """Return definitions as OpenAI takes them, as plain dicts."""
        return [dict(definition) for definition in self.to_provider_defs()]

    def schemas(self, origin: Origin = Origin.MODEL) -> list[AnthropicToolDef]:
        """Return definitions as Anthropic takes them."""
        return [definition.to_anthropic() for definition in self.definitions(origin)]

    def to_mcp(self, origin: Origin = Origin.MODEL) -> list[dict[str, Any]]:
        """Return definitions as MCP's tools/list gives them, with options as annotations."""
        state = self._state
        return [mcp_tool(state.definition(tool), tool.options) for tool in state.visible(origin)]

    def to_python(self, origin: Origin = Origin.CODE, *, asynchronous: bool = False) -> str:
        """Return the tools as typed Python functions without bodies, for a model that writes code, or its author.

        Shape: the text of a `.pyi` module that type-checks on its own. `asynchronous`: with `async def`.
        """
        tools = ((tool.definition, tool.options.returns) for tool in with_observed(self._state).visible(origin))
        return python_module(tools, asynchronous)

    async def search_tools(
        self,
        query: str,
        *,
        limit: int = FOUND,
        origin: Origin = Origin.CODE,
        policies: tuple[CallPolicy, ...] = (),
    ) -> list[ToolDefinition]:
        """Return the tools that fit a query, best first, among those that a caller from `origin` sees.

        Words count in names, then in descriptions, then in parameters; tools that the query names come first. With
        `ToolRegistry(embeddings=...)`, likeness of meaning counts too.

        Raises:
            UsageError: the query has more than 1,000 characters, or `limit` is not from 1 to 100.
        """
        definitions = self.definitions(origin, policies=policies)
        return await find_by_meaning(definitions, query, limit, self.settings.embeddings)

    def describe_tools(
        self,
        names: Iterable[str] | None = None,
        *,
        detail: Detail = "full",
        origin: Origin = Origin.CODE,
        policies: tuple[CallPolicy, ...] = (),
    ) -> str:
        """Return tools as text for a model: as names, as signatures on a line each, or as full stubs. None: all.

        Raises:
            UsageError: there is no such tool or no such detail, or the text has more than 200,000 characters.
        """
        if isinstance(names, str):
            raise UsageError(f"describe_tools takes a list of names, not {names!r:.80}; write [{names!r:.80}]")
        state = with_observed(self._state)
        tools = {tool.name: tool for tool in state.visible(origin, policies)}
        definitions = [state.definition(tool, policies) for tool in tools.values()]
        wanted = definitions if names is None else named_of(definitions, names)
        return tools_text([(each, tools[each.name].options.returns) for each in wanted], detail)

    def __len__(self) -> int:
        return len(self._state.tools)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._state.tools

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.tools)

    @abstractmethod
    def snapshot(self) -> RegistryView:
        """Return this registry as it is now, frozen: what a run works with."""

    # Calling

    async def dispatch(
        self,
        name: str,
        args: Mapping[str, Any] | str,
        *,
        call_id: str = "",
        origin: Origin | None = None,
        context: RunContext | None = None,
    ) -> ToolResult:
        """Make one call, in the caller's task.

        `args` may be JSON text. Without a `context` the call belongs to the tool call it is made in, if any. Without
        an `origin` it has that call's, else `MODEL`.

        Raises:
            ToolAbort: the tool, or a hook, ended the run.
            AuditError: the call could not be recorded; unless it had started, it was not made.

        Cancellation: passes through; the tool was cancelled, and its end was recorded.
        """
        if context is not None and type(context) is not RunContext:
            check_kind("context=", context, RunContext, cure="write RunContext(user_id=...)")
        return await run_call(self._state, self.new_call(name, args, call_id, origin, context))

    def new_call(
        self,
        name: str,
        args: Mapping[str, Any] | str,
        call_id: str = "",
        origin: Origin | None = None,
        context: RunContext | None = None,
        **more: Any,
    ) -> Call:
        """Return the record of a call about to be made. `more`: `step`, `message` and `timeout_s` of a `Call`."""
        above = current.get()
        parent = None if above is None else above.call
        if context is None:
            context = self._shared_run if parent is None else parent.nested_run()
        elif parent is not None and parent.run.state is not context.state:
            share_labels(context)
            parent = None
        if origin is None:
            origin = Origin.MODEL if parent is None else parent.origin
        return Call(self, self._state.meant(name), args, call_id, origin, context, parent, **more)

    async def run_plan(self, args: Mapping[str, Any], run: RunContext, record: PlanRecord | None = None) -> ToolResult:
        """Run the steps of a plan; what `execute_plan` takes as arguments. `record`: of a plan that may wait."""

        def new_call(step: Step, args: Mapping[str, Any]) -> Call:
            call_id = f"plan_step_{step.index}"
            return self.new_call(step.tool, args, call_id, Origin.PLAN, run, step=step.index, timeout_s=step.timeout_s)

        return await run_plan(self._state, args, new_call, record)

    async def execute_batch(
        self,
        calls: Iterable[Any],
        *,
        context: RunContext | None = None,
        origin: Origin | None = None,
        sequential: bool | None = None,
        message: Any = None,
        on_result: OnResult | None = None,
    ) -> list[ToolResult]:
        """Make the calls of one model response, concurrently unless a tool or a setting says otherwise.

        Result i belongs to call i. A call is a ToolCall, a (name, arguments) pair, or a provider's dict.

        Raises:
            ToolAbort, AuditError: as from `dispatch`.
        """
        run = self.new_run() if context is None else context
        made = [
            self.new_call(call.name, call.arguments, call_id=call.id, origin=origin, context=run, message=message)
            for call in unique_ids(map(ToolCall.read, calls))
        ]
        settings = self.settings
        in_turn = settings.sequential if sequential is None else sequential
        return await run_batch(self._state, made, sequential=in_turn, limit=settings.max_batch, on_result=on_result)

    async def refuse(
        self, call: ToolCall, refusal: ToolResult, *, context: RunContext, origin: Origin | None = None
    ) -> tuple[Call, ToolResult]:
        """Give a call that nothing here could run its place in the record."""
        made = self.new_call(call.name, call.arguments, call_id=call.id, origin=origin, context=context)
        return made, await refuse(self._state, made, refusal)

    async def answer(
        self, name: str, args: Any, answer: Awaitable[ToolResult], *, note: str, **call: Any
    ) -> ToolResult:
        """Give a call an answer from elsewhere, and its place in the record. `call`: further fields of `new_call`."""
        return await answer_call(self.new_call(name, args, **call), answer, note)

    def new_run(self, **fields: Any) -> RunContext:
        """Return a new run with this registry's settings; inside a tool call, a part of that call's run."""
        above = current.get()
        if above is not None and not above.call.run.is_shared:
            return above.call.nested_run().child(**fields)
        fields.setdefault("events", self.events)
        fields.setdefault("parent_call_id", above.call_id if above is not None else None)
        return RunContext(**fields)

    async def execute(
        self, name: str, args: Mapping[str, Any] | str | None = None, *, context: RunContext | None = None
    ) -> ToolResult:
        """Make one call, as a part of the run that `context` is about."""
        check_kind("a tool call's name", name, str, cure="write the name that the tool is registered by")
        return await self.dispatch(name, args if args is not None else {}, context=context)

    async def execute_with_context(
        self,
        name: str,
        args: Mapping[str, Any] | str,
        channel: str = "",
        chat_id: str = "",
        callback: CompletionCallback | None = None,
    ) -> ToolResult:
        """Make one call for a chat; `callback` receives the final result of work that goes on after the call."""
        context = RunContext(channel=channel, chat_id=chat_id, on_complete=callback, events=self.events)
        return await self.dispatch(name, args, context=context)
