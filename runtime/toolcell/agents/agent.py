"""An agent: a model, its tools and its conversation. An agent can also be a tool of another agent.

The loop does the work. An agent keeps the conversation, runs one prompt at a time, and collects its tools.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

from toolcell.agents.loop import MAX_ITERATIONS, LoopRun, ToolLoopConfig
from toolcell.agents.loop_result import EMPTY, FINAL, SUSPENDED, TERMINATED, TRUNCATED, ToolLoopResult
from toolcell.agents.providers.provider import Message, Provider, system, user
from toolcell.agents.stream import AgentStream
from toolcell.agents.transcript import check_messages
from toolcell.calls.call import Approvals, Denial, ResumeDecision
from toolcell.calls.concurrency import maybe_await
from toolcell.calls.context import current
from toolcell.calls.reverts import MadeCalls, Reverts
from toolcell.calls.run_state import new_id
from toolcell.config import OnApproval
from toolcell.control import TurnApprovals, revert_calls
from toolcell.errors import UsageError
from toolcell.journal import JournalStore
from toolcell.results import ExecutionResult, RevertResult, Suspension
from toolcell.run import RunOptions
from toolcell.runtime import Runtime
from toolcell.support import daemon_threads
from toolcell.support.checks import check_kind, keywords_known, suggestion
from toolcell.support.loop_thread import wait_for
from toolcell.tools import (
    CodeRuntime,
    CodeTool,
    ErrorCode,
    Event,
    EventBus,
    Origin,
    RunContext,
    Text,
    ToolContext,
    ToolDefinition,
    ToolOptions,
    ToolRegistry,
    ToolResult,
    ToolSpec,
)

MAX_DEPTH = 3
"""Levels of agents below the first one."""

TASK_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"task": {"type": "string", "description": "What to do, with everything needed to do it."}},
    "required": ["task"],
}

Tools = ToolRegistry | Iterable[Any] | None


AskUser = Callable[[str], str | Awaitable[str]]
"""Gets the question, gives the answer."""


Execute = Callable[..., Awaitable[ExecutionResult]]


def suspending(execute: Execute, resume: Execute) -> Execute:
    """Return what runs the scripts of one agent: what its model calls itself may wait for approval.

    `resume` carries a script on that waits; see `Runtime.resume`.
    """

    async def execute_code(source: str, /, *, context: RunContext | None = None, **options: Any) -> ExecutionResult:
        above, approvals = current.get(), context.feature(Approvals) if context is not None else None
        options["context"] = context
        if isinstance(approvals, TurnApprovals) and above is not None and above.call.parent is None:
            return await approvals.run_script(execute, resume, source, above.call, options)
        return await execute(source, **options)

    return execute_code


def repairing(journals: JournalStore, execute: Execute) -> Execute:
    """Return what runs the scripts of one conversation: a script that comes after one that failed repairs it."""
    failed: ExecutionResult | None = None

    async def execute_code(source: str, /, **options: Any) -> ExecutionResult:
        nonlocal failed
        repaired, failed = failed, None
        try:
            result = await execute(source, repairs=repaired, **options)
        except BaseException:  # no script ran to an end: the next one repairs the one that failed
            failed = repaired if journals.keeps(repaired) else None
            raise
        failed = None if result.ok or result.draft_id else result
        return result

    return execute_code


class Agent:
    """Run a prompt with `await agent.run("...")`. The agent keeps the conversation until `reset()`."""

    @keywords_known
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
        repair: bool = False,
        on_approval: OnApproval = "ask",
        ask_user: AskUser | None = None,
        parallel_tools: bool = True,
        context: RunContext | None = None,
        **config: Any,
    ) -> None:
        """`repair`: a script after one that failed gets the answers of the calls that were made already.
        `on_approval="suspend"`: a call that needs approval suspends the run, for `resume`; `"deny"` refuses it."""
        _check_options(config)
        RunOptions(on_approval=on_approval)  # checks it
        self._on_approval = on_approval
        runtime: object = code_execution
        self._store = runtime.journals if isinstance(runtime, Runtime) else JournalStore(None)
        if repair and not isinstance(runtime, Runtime):
            raise UsageError(f"repair=True needs code_execution=Runtime(...), not {type(runtime).__name__}")
        self._runs_code = code_execution
        self._execute: Execute | None = None
        """Runs the scripts in place of the runtime itself, if they may wait."""
        if code_execution is not None:
            CodeTool(code_execution).check(CodeTool.NAME)
            if on_approval == "suspend" and isinstance(runtime, Runtime):
                self._execute = suspending(code_execution.execute_code, runtime.resume)
        self._is_repairing, self._reverts = repair, Reverts()
        self.name = name
        self._given = _as_registry(tools)
        self._followed = self._given.state
        self.registry = self._given.merged()
        """The agent's own tools: register, blacklist and hook into them as in any registry. That does not change a
        registry that was given as `tools`, but what changes there changes here too, from the next run on."""
        self.registry.policy.add_flow(*(() if code_execution is None else CodeTool(code_execution).flows))
        self.events = context.events if context is not None else EventBus()
        self.messages: list[Message] = []
        """The conversation so far."""
        self._system_prompt = system_prompt
        self._context = context or RunContext(events=self.events)
        self._active: RunContext | None = None
        self._config = ToolLoopConfig(
            provider=provider,
            model=model,
            max_iterations=max_iterations,
            sequential=None if parallel_tools else True,
            name=name,
            **config,
        )
        self._offers_plans, self._ask_user = plan_execution, ask_user

    @property
    def pending_tool_calls(self) -> list[str]:
        """Ids of calls that have started and not ended."""
        return [*self._active.state.pending] if self._active is not None else []

    # Tools

    def add_subagent(self, agent: Any, description: str = "", inner: Agent | None = None) -> None:
        """Add an agent as a tool: `add_subagent(tool)`, or `add_subagent(name, description, agent)`."""
        self.registry.add(inner.as_tool(agent, description) if inner is not None else agent)

    def blacklist(self, *names: str, origins: Iterable[Origin] | None = None) -> None:
        """Refuse tools from now on, even in a run that has started. They stay registered."""
        has_agents = any(tool.options.is_agent for tool in self.registry.state.tools.values())
        # The rule holds for the tools of sub-agents too, whose names are not known here.
        (self.registry.policy if has_agents else self.registry).blacklist(*names, origins=origins)

    def tools_for_run(self, tools: Tools = None) -> ToolRegistry:
        """Return the tools of a run: the agent's own or `tools`, and those that are enabled, such as `execute_plan`."""
        if (now := self._given.state) is not self._followed:
            self.registry.follow(self._followed, now)
            self._followed = now
        base = self.registry if tools is None else self.registry.replaced(_as_registry(tools))
        merged = base.merged()
        if self._offers_plans:
            merged.enable_plan_execution()
        if self._ask_user is not None:
            merged.enable(_ask_user_spec(self._ask_user))
        if (code := self._runs_code) is not None:
            execute, shown_chars = self._execute, self._config.shown_chars
            if self._is_repairing:  # of this conversation alone
                execute = repairing(self._store, execute or code.execute_code)
            merged.enable(CodeTool(code).spec({}, shown_chars, execute=execute, with_variables=self._is_repairing))
        merged.enable_search_of_many(self._config.shown_chars)
        return merged.freeze()

    def definitions(self) -> list[ToolDefinition]:
        """Return the definitions that the model gets at the start of a conversation."""
        return self.tools_for_run().definitions(shown_chars=self._config.shown_chars)

    # Run a prompt

    async def run(
        self, prompt: str | Sequence[Message], *, tools: Tools = None, context: RunContext | None = None
    ) -> ToolLoopResult:
        """Continue the conversation with `prompt` until the model answers without a tool call.

        `tools` replace the agent's own for this run.

        Raises:
            UsageError: this agent is already running, or its provider refuses the key or does not know the model.
        """
        if not isinstance(prompt, str):
            check_messages(prompt)
        with self._running(context) as run:
            if not self.messages and self._system_prompt:
                self.messages.append(system(self._system_prompt))
            self.messages += [user(prompt)] if isinstance(prompt, str) else prompt
            offered, approvals = self.tools_for_run(tools), None
            if self._on_approval == "suspend" and not run.features.decide:
                approvals = TurnApprovals(self._store, self.messages, offered)
            return await self._loop(run, offered, approvals)

    def stream(
        self, prompt: str | Sequence[Message], *, tools: Tools = None, context: RunContext | None = None
    ) -> AgentStream:
        """Do the same as `run`, and return its events as they come: `async with agent.stream("...") as events`.

        Shape: `Event`. A `message_update` has a piece of a message that a model generates, also a sub-agent's, as
        {"text": ...}, {"reasoning": ...} or {"arguments": ...} in `update`. At the end `events.result` is what `run`
        returns. Leaving the block early ends the run.
        """

        def run(context: RunContext) -> Awaitable[ToolLoopResult]:
            return self.run(prompt, tools=tools, context=context)

        return AgentStream(run, context or self._new_run())

    def run_sync(
        self, prompt: str | Sequence[Message], *, tools: Tools = None, context: RunContext | None = None
    ) -> ToolLoopResult:
        """Call `run` and wait, in a program without an event loop.

        A `Runtime` for scripts that is not open is opened for this run alone.

        Raises:
            UsageError: as from `run`, or an event loop runs in this thread.
        """

        async def run() -> ToolLoopResult:
            async with AsyncExitStack() as stack:
                runtime: object = self._runs_code
                if isinstance(runtime, Runtime) and not runtime.is_open:
                    await stack.enter_async_context(runtime)
                return await self.run(prompt, tools=tools, context=context)

        return wait_for(run, "run_sync", "await agent.run(...)")

    async def _loop(self, run: RunContext, tools: ToolRegistry, approvals: TurnApprovals | None) -> ToolLoopResult:
        """Run the loop on the conversation, which a run that is cut short leaves whole."""
        if approvals is not None:
            run = run.having(approvals)
        elif self._on_approval == "deny":
            run = run.having(Denial())
        ident, made = (approvals.run_id if approvals is not None else "") or run.run_id, MadeCalls()
        own = run.having(made).child(check_types=run.check_types or "warn")
        try:
            loop = LoopRun(replace(self._config, tools=tools), self.messages, own, approvals)
            result = replace(await loop.run(), run_id=ident)
        finally:
            self._reverts.keep(ident, made)
        if approvals is None or result.stop_reason != SUSPENDED:
            return result
        return replace(result, suspension=approvals.suspend(ident))

    async def revert(self, result: ToolLoopResult, *, context: RunContext | None = None) -> RevertResult:
        """Undo the calls of a run, its scripts and sub-agents; see `Runtime.revert`. The conversation stays.

        Raises:
            UsageError: `result` is of no run, or this agent knows of nothing to revert.
        """
        check_kind("revert takes the result of a run of this agent:", result, ToolLoopResult)
        return await revert_calls(self._reverts.made_by(result.run_id), context or self._new_run())

    async def resume(
        self,
        token: str | Suspension,
        decisions: Mapping[str, ResumeDecision] | None = None,
        *,
        tools: Tools = None,
        context: RunContext | None = None,
    ) -> ToolLoopResult:
        """Resume a suspended conversation: make the waiting calls as decided, and ask the model again.

        `decisions`: by the id of the pending call; a call without one waits again. In another process set `messages` to
        those of the suspended run first, and give `code_execution` a Runtime with the same `journal`.

        Raises:
            ResumeError: the token is damaged, changed, foreign, expired or used; or conversation or tools are others.
            UsageError: a decision is about a call that does not wait for one; or this agent is already running.
        """
        with self._running(context) as run:
            offered = self.tools_for_run(tools)
            about = self._store, self.messages, offered
            approvals = await daemon_threads.run_sync(TurnApprovals.resumed, *about, token, decisions or {})
            return await self._loop(run, offered, approvals)

    def _new_run(self) -> RunContext:
        """Return a run of its own. The agents whose tool starts it are above it all the same."""
        above = current.get()
        agents = above.run.scope.agents if above is not None else ()
        return self._context.within(agents=agents).child(run_id=new_id(), state=self._context.state.fresh())

    @contextmanager
    def _running(self, context: RunContext | None) -> Iterator[RunContext]:
        """Begin the one run of this agent. Its listeners have the events of a run with its own bus too."""
        run = context or self._new_run()
        run = run.within(agents=(*run.scope.agents, id(self)))
        if self._active is not None:
            raise UsageError(f"agent {self.name!r} is already running; an agent runs one prompt at a time")
        if run.features.collects and self._on_approval == "suspend":  # what is resumed later would write
            raise UsageError('a dry run cannot be suspended: use an agent without on_approval="suspend"')
        self._active = run
        with ExitStack() as stack:
            stack.callback(setattr, self, "_active", None)
            if not run.events.reaches(self.events):
                stack.callback(run.events.subscribe(self.events.forward, self.events.wait_for_room))
            yield run

    def cancel(self, reason: str = "run cancelled") -> None:
        """End the current run, which returns its result; every call in it has an answer."""
        if self._active is not None:
            self._active.cancel(reason)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Name the registry for what only that has, such as `add_hook`."""
            cure = f"; write agent.registry.{name}" if name[:1] != "_" and hasattr(ToolRegistry, name) else ""
            raise AttributeError(f"an Agent has no attribute {name!r:.80}{cure}", name=name, obj=self)

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = []

    def subscribe(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Call `listener` with every event of the agent's runs. Returns a function that unsubscribes it."""
        return self.events.subscribe(listener)

    # As a tool of another agent

    def as_tool(self, name: str, description: str, **options: Any) -> SubAgent:
        """Return this agent as a tool with one parameter, `task`. Each call is a new conversation."""
        return SubAgent(self, name, description, options)

    async def run_task(self, task: str, run: RunContext) -> ToolLoopResult:
        """Do one task as part of another run, without this agent's conversation."""
        run = run.within(agents=(*run.scope.agents, id(self)))
        messages = [system(self._system_prompt)] if self._system_prompt else []
        return await LoopRun(replace(self._config, tools=self.tools_for_run()), [*messages, user(task)], run).run()


_OTHERWISE = {
    "sequential": "write parallel_tools=False to run the calls of one response one at a time",
    "tool_execution": "write parallel_tools=False to run the calls of one response one at a time",
    "blacklist": 'call agent.blacklist("name", ...) on the agent that you have made',
    "task": "write await agent.run(task), or agent.run_sync(task)",
    **dict.fromkeys(
        ("hooks", "before_tool_call", "after_tool_call"), "write agent.registry.add_hook(before=..., after=...)"
    ),
}
"""Names that people expect here, and what to write."""


def _check_options(config: Mapping[str, Any]) -> None:
    """Refuse what is not a setting of the loop, and say where it goes."""
    known = [each.name for each in fields(ToolLoopConfig) if each.name not in _OTHERWISE]
    suggested = [*known, "max_iterations", "system_prompt", "tools", "ask_user", "plan_execution", "code_execution"]
    for name, value in config.items():
        if name not in known:
            of_model = f"options of the model go into llm_options={{{name!r}: {value!r:.40}}}"
            hint = _OTHERWISE.get(name) or suggestion(name, suggested, of_model)
            raise UsageError(f"Agent has no setting {name!r}; {hint}")


def _as_registry(tools: Tools) -> ToolRegistry:
    registry: ToolRegistry = ToolRegistry.of(tools or None, "tools=")
    return registry


def _ask_user_spec(ask: AskUser) -> ToolSpec:
    """A tool that asks a person. Plans and code cannot: nobody expects questions in the middle of either."""

    async def invoke(context: ToolContext) -> Any:
        return await maybe_await(ask(context.call.args["question"]))

    schema = {
        "type": "object",
        "properties": {"question": {"type": "string", "description": "What to ask."}},
        "required": ["question"],
    }
    return ToolSpec(
        definition=ToolDefinition("ask_user", "Ask the user a question and wait for the answer.", schema),
        invoke=invoke,
        # People take their time, and the question holds no worker from other tools meanwhile.
        options=ToolOptions(orchestrates=True, callable_from=frozenset({Origin.MODEL})),
        source=ask,
        requires_result=True,
    )


class Network(Agent):
    """An agent whose tools are other agents, named `agent_<name>`. It may return a member's answer as its own."""

    def __init__(self, provider: Provider, agents: Mapping[str, tuple[str, Agent]], **options: Any) -> None:
        super().__init__(provider, **options)
        self.members = dict(sorted(agents.items()))
        for name, (description, agent) in self.members.items():
            self.registry.add(agent.as_tool(f"agent_{name}", description))

    async def run(
        self, prompt: str | Sequence[Message], *, tools: Tools = None, context: RunContext | None = None
    ) -> ToolLoopResult:
        """Continue the conversation. An empty final answer is replaced by that of the last member called."""
        result = await super().run(prompt, tools=tools, context=context)
        if result.stop_reason == EMPTY and result.last_output:
            return replace(result, content=result.last_output, stop_reason=FINAL, error=None)
        return result


class SubAgent:
    """An agent as a tool. It follows its caller's rules, hooks and budget, and it cannot call itself in a circle."""

    def __init__(self, agent: Agent, name: str, description: str, options: Mapping[str, Any]) -> None:
        self.agent = agent
        self.name = name
        self.description = description
        self._options = ToolOptions(orchestrates=True, is_agent=True).changed(options)

    def to_spec(self) -> ToolSpec:
        """Return the spec that a registry stores."""
        return ToolSpec(
            definition=ToolDefinition(self.name, self.description, TASK_SCHEMA),
            invoke=self._invoke,
            options=self._options,
            source=self,
        )

    async def _invoke(self, context: ToolContext) -> ToolResult:
        call = context.call
        if (refusal := self._refusal(call.run)) is not None:
            return _failure(refusal)
        return _as_tool_result(await self.agent.run_task(call.args["task"], self._inner_run(context)))

    def _refusal(self, run: RunContext) -> str | None:
        if run.scope.depth >= MAX_DEPTH:
            return f"agents may be nested {MAX_DEPTH} deep, and this would be level {run.scope.depth + 1}"
        if id(self.agent) in run.scope.agents:
            return f"{self.name} is already working further up; agents cannot call themselves in a circle"
        return None

    def _inner_run(self, context: ToolContext) -> RunContext:
        """Return the agent's run. It shares the caller's budget and events, and obeys all callers' rules and hooks."""
        above, registry = context.run, context.call.registry
        return above.within(
            depth=above.scope.depth + 1,
            hooks=(*above.scope.hooks, *registry.hooks),
            policies=(*above.scope.policies, *registry.policies),
        )


def _failure(reason: str) -> ToolResult:
    return ToolResult.fail(f"Sub-agent failed: {reason}", code=ErrorCode.TOOL_ERROR)


def _as_tool_result(result: ToolLoopResult) -> ToolResult:
    """Return the answer for the caller's model and the steps as details. `terminate` and `silent` are not passed on."""
    details = {
        "stop_reason": result.stop_reason,
        "iterations": result.iterations,
        "steps": [{"name": step.name, "input": step.input, "output": step.output} for step in result.steps],
    }
    if result.stop_reason not in (FINAL, TERMINATED) and not result.content:
        return replace(_failure(result.error or result.stop_reason), details=details, usage=result.usage)
    text = result.content or result.last_output
    if result.stop_reason == TRUNCATED:
        text = f"{text}\n\n[{result.error}]"
    return ToolResult(parts=(Text(text),), details=details, files=result.files, usage=result.usage)
