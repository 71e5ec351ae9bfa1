"""An agent: a model, its tools and its conversation. Also usable as a tool of another agent.

The loop does the work; an agent remembers, refuses to run twice at once, and puts its tools together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from toolcell.agents.loop import MAX_ITERATIONS, LoopRun, ToolLoopConfig, ToolLoopResult
from toolcell.agents.providers.provider import Message, Provider, system, user
from toolcell.agents.subagent import SubAgent
from toolcell.errors import UsageError
from toolcell.tools import events
from toolcell.tools.ask_user import AskUser, ask_user_shape
from toolcell.tools.context import RunContext, new_id
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.events import Event, EventBus
from toolcell.tools.options import Origin
from toolcell.tools.orchestration import CodeRuntime, code_shape, plan_shape
from toolcell.tools.registry import ToolRegistry
from toolcell.tools.spec import ToolSpec

Tools = ToolRegistry | Iterable[Any] | None


class Agent:
    """Ask it with `await agent.run("...")`; it remembers the conversation until `reset()`."""

    def __init__(
        self,
        provider: Provider,
        *,
        tools: Tools = (),
        name: str = "",
        system_prompt: str = "",
        model: str = "",
        max_iterations: int = MAX_ITERATIONS,
        plan_execution: bool = False,
        code_execution: CodeRuntime | None = None,
        ask_user: AskUser | None = None,
        parallel_tools: bool = True,
        context: RunContext | None = None,
        **config: Any,
    ) -> None:
        self.name = name
        self.registry = _as_registry(tools)
        """The agent's own tools: register, blacklist and hook into them as in any registry."""
        self.events = context.events if context is not None else EventBus()
        self.messages: list[Message] = []
        """The conversation so far."""
        self.pending_tool_calls: list[str] = []
        """Ids of calls that have started and not ended."""
        self._system_prompt = system_prompt
        self._context = context or RunContext(events=self.events)
        self._injected = _injected(plan_execution, code_execution, ask_user)
        self._active: RunContext | None = None
        self._config = ToolLoopConfig(
            provider=provider,
            model=model,
            max_iterations=max_iterations,
            sequential=None if parallel_tools else True,
            name=name,
            **config,
        )
        self.events.subscribe(self._note)

    def _note(self, event: Event) -> None:
        if event.type == events.TOOL_START and event.call_id is not None:
            self.pending_tool_calls.append(event.call_id)
        elif event.type == events.TOOL_END and event.call_id in self.pending_tool_calls:
            self.pending_tool_calls.remove(event.call_id)

    # Tools

    def add_subagent(self, agent: Any, description: str = "", inner: Agent | None = None) -> None:
        """Add an agent as a tool: `add_subagent(tool)`, or `add_subagent(name, description, agent)`."""
        self.registry.add(inner.as_tool(agent, description) if inner is not None else agent)

    def blacklist(self, *names: str, origins: Iterable[Origin] | None = None) -> None:
        """Refuse tools from now on, also in a run that is going on. They stay registered."""
        self.registry.blacklist(*names, origins=origins)

    def tools_for_run(self, tools: Tools = None) -> ToolRegistry:
        """What a run works with: the agent's tools, or `tools` instead of them; then what was enabled."""
        base = self.registry if tools is None else self.registry.replaced(_as_registry(tools))
        if not self._injected:
            return base.snapshot()
        merged = base.merged()
        for shape in self._injected:
            merged.register(shape, replace=True)
        return merged.freeze()

    def definitions(self) -> list[ToolDefinition]:
        """What the model is told."""
        return self.tools_for_run().definitions()

    # Running

    async def run(
        self, prompt: str | Sequence[Message], *, tools: Tools = None, context: RunContext | None = None
    ) -> ToolLoopResult:
        """Go on with the conversation until the model has nothing more to ask.

        `tools` replace the agent's own for this run.

        Raises:
            UsageError: a run of this agent is already going on.
        """
        run = context or self._context.child(run_id=new_id(), state=self._context.state.fresh())
        with self._only_one(run), self._hearing(run.events):
            if not self.messages and self._system_prompt:
                self.messages.append(system(self._system_prompt))
            self.messages += [user(prompt)] if isinstance(prompt, str) else prompt
            # The loop works on this very list, so that a run cut short leaves a whole conversation behind.
            config = replace(self._config, tools=self.tools_for_run(tools))
            return await LoopRun.prepared(config, self.messages, run).go()

    @contextmanager
    def _only_one(self, run: RunContext) -> Iterator[None]:
        if self._active is not None:
            raise UsageError(f"agent {self.name!r} is already running; one prompt at a time")
        self._active = run
        try:
            yield
        finally:
            self._active = None

    @contextmanager
    def _hearing(self, bus: EventBus) -> Iterator[None]:
        """Events of a run that brought its own bus are heard by the agent's listeners too."""
        if bus is self.events:
            yield
            return
        unsubscribe = bus.subscribe(self.events.forward)
        try:
            yield
        finally:
            unsubscribe()

    def cancel(self, reason: str = "run cancelled") -> None:
        """End the run that is going on; it returns its result, and every call in it has an answer."""
        if self._active is not None:
            self._active.cancel(reason)

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = []

    def subscribe(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Call `listener` with every event of the agent's runs; returns what unsubscribes it."""
        return self.events.subscribe(listener)

    # As a tool

    def as_tool(self, name: str, description: str, **traits: Any) -> SubAgent:
        """This agent as a tool with one parameter, `task`. Each call is a fresh conversation."""
        return SubAgent(self, name, description, traits)

    async def work(self, task: str, run: RunContext) -> ToolLoopResult:
        """One task for somebody else, in their run and without this agent's memory."""
        messages = [system(self._system_prompt)] if self._system_prompt else []
        config = replace(self._config, tools=self.tools_for_run())
        return await LoopRun.prepared(config, [*messages, user(task)], run).go()


def _as_registry(tools: Tools) -> ToolRegistry:
    return tools if isinstance(tools, ToolRegistry) else ToolRegistry(tools or ())


def _injected(plan: bool, code: CodeRuntime | None, ask_user: AskUser | None) -> list[ToolSpec]:
    shapes = [plan_shape({})] if plan else []
    if code is not None:
        shapes.append(code_shape(code, {}))
    if ask_user is not None:
        shapes.append(ask_user_shape(ask_user))
    return shapes


class Network(Agent):
    """An agent whose tools are other agents, as `agent_<name>`; it may leave the last word to one of them."""

    def __init__(self, provider: Provider, agents: Mapping[str, tuple[str, Agent]], **options: Any) -> None:
        super().__init__(provider, **options)
        self.members = dict(sorted(agents.items()))
        for name, (description, agent) in self.members.items():
            self.registry.add(agent.as_tool(f"agent_{name}", description))

    async def run(
        self, prompt: str | Sequence[Message], *, tools: Tools = None, context: RunContext | None = None
    ) -> ToolLoopResult:
        """Go on with the conversation; an empty answer is replaced by the last member's."""
        result = await super().run(prompt, tools=tools, context=context)
        if not result.content and result.stop_reason == "final":
            return replace(result, content=result.last_output)
        return result
