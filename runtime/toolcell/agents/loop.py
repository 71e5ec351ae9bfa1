"""Asking a model and running the tools it asks for, until it has nothing more to ask.

Knows no single tool and no single provider: only registries, results and `chat`. The same loop serves an agent and an
agent that is another's tool.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import anyio

from toolcell.agents.processors import Halt, Processor, after_response, after_tool, before_request
from toolcell.agents.providers.provider import (
    DEFAULT_OPTIONS,
    Message,
    ModelResponse,
    OnText,
    Provider,
    ProviderError,
    StreamingProvider,
    assistant,
    user,
)
from toolcell.agents.providers.retry import RetryPolicy, ask
from toolcell.agents.trace import StepTrace, step_trace
from toolcell.agents.transcript import compacted, missing_answer, repaired, tool_message
from toolcell.errors import ToolAbort
from toolcell.tools import events
from toolcell.tools.batch import ends_run
from toolcell.tools.call import Call
from toolcell.tools.compat import MAX_TRANSCRIPT_CHARS, ErrorStyle
from toolcell.tools.context import Budget, RunContext
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.hooks import settle
from toolcell.tools.model_calls import ToolCall, unique_ids
from toolcell.tools.options import Origin
from toolcell.tools.registry import ToolRegistry
from toolcell.tools.result import NO_USAGE, ErrorCode, File, Status, TokenUsage, ToolResult

MAX_ITERATIONS = 10
SYNTHESIZE = "You have used all available tool calls. Summarize what you found and respond to the user."
NO_TOOLS = "No tools available"

StopReason = str
FINAL, MAX_REACHED, TERMINATED = "final", "max_iterations", "terminated"
CANCELLED, BUDGET, PROVIDER_ERROR = "cancelled", "budget", "provider_error"

OnUser = Callable[[str, ToolResult], Awaitable[None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLoopConfig:
    """How one run of the loop behaves."""

    provider: Provider
    model: str = ""
    tools: ToolRegistry | None = None
    """None: the model is told of no tools, and a call it makes all the same is answered with an error."""
    max_iterations: int = MAX_ITERATIONS
    """Times the model is asked."""
    llm_options: Mapping[str, Any] | None = None
    sequential: bool | None = None
    """Run batches one call at a time; None is the registry's setting."""
    synthesize: bool = False
    """At the cap, ask once more for an answer without tools."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    budget: Budget | None = None
    """Shared with everything the run starts. Ignored in a run that already has one."""
    wall_s: float | None = None
    """Seconds the run may take."""
    processors: tuple[Processor, ...] = ()
    compact: Callable[[list[Message]], list[Message]] | None = compacted
    """Shortens the transcript before a request; None leaves it."""
    on_user: OnUser | None = None
    """Receives what tools want shown to the user, in order."""
    on_text: OnText | None = None
    """Receives the model's text as it comes, from providers that stream."""
    follow_up_jobs: bool = False
    """Wait for background work and tell the model its results before taking its answer as final."""
    error_style: ErrorStyle = "plain"
    max_result_chars: int = MAX_TRANSCRIPT_CHARS
    """Of one tool's answer in the transcript; events keep all of it."""
    name: str = ""
    """Of the agent, for events."""


@dataclass(frozen=True, slots=True)
class ToolLoopResult:
    """What a run came to."""

    content: str
    iterations: int
    """Times the model was asked."""
    stop_reason: StopReason
    messages: list[Message]
    """The whole conversation; a later run can go on from it."""
    error: str | None = None
    usage: TokenUsage = NO_USAGE
    files: tuple[File, ...] = ()
    """Of all tool calls, in order."""
    steps: tuple[StepTrace, ...] = ()
    last_output: str = ""
    """Of the last agent that was called as a tool."""

    @property
    def is_error(self) -> bool:
        """True when the run did not come to an answer of its own."""
        return self.stop_reason in (PROVIDER_ERROR, CANCELLED, BUDGET)


async def run_tool_loop(
    config: ToolLoopConfig,
    messages: Sequence[Message],
    channel: str = "",
    chat_id: str = "",
    *,
    context: RunContext | None = None,
) -> ToolLoopResult:
    """Run the loop on a conversation. `messages` is not changed; the result holds what it became.

    Cancellation: passes through, after every tool was cancelled. `RunContext.cancel` ends the run with a result
    instead, in which every call has its answer.
    """
    run = context or RunContext()
    if channel or chat_id:
        run = run.child(channel=channel, chat_id=chat_id)
    return await LoopRun.prepared(config, list(messages), run).go()


class _Stop(Exception):
    """Ends the run from somewhere inside it."""

    def __init__(self, reason: StopReason, content: str = "", error: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.content = content
        self.error = error


class LoopRun:
    """One run of the loop."""

    def __init__(self, config: ToolLoopConfig, messages: list[Message], run: RunContext) -> None:
        self.config = config
        self.messages = messages
        self.run = run
        self._registry = config.tools.snapshot() if config.tools is not None else None
        self._options = DEFAULT_OPTIONS if config.llm_options is None else config.llm_options
        self._origin = Origin.SUBAGENT if run.depth else Origin.MODEL
        self._can_see = bool(getattr(config.provider, "supports_images", False))
        self.iterations = 0
        self.usage = NO_USAGE
        self._files: list[File] = []
        self._steps: list[StepTrace] = []
        self._last_output = ""

    @classmethod
    def prepared(cls, config: ToolLoopConfig, messages: list[Message], run: RunContext) -> Self:
        """A run with the config's budget and time. It appends to `messages` itself."""
        if config.budget is not None and run.state.budget is None:
            run.state.budget = config.budget
        if config.wall_s is not None:
            run = run.child(deadline=min(run.deadline, anyio.current_time() + config.wall_s))
        return cls(config, messages, run)

    async def go(self) -> ToolLoopResult:
        """Run to the end."""
        self._emit(events.AGENT_START)
        try:
            stop = await self._until_stopped()
        finally:
            self._answer_the_unanswered()
        result = ToolLoopResult(
            stop.content,
            self.iterations,
            stop.reason,
            list(self.messages),
            stop.error,
            self.usage,
            tuple(self._files),
            tuple(self._steps),
            self._last_output,
        )
        self._emit(events.AGENT_END, content=result.content, stop_reason=result.stop_reason, error=result.error)
        return result

    async def _until_stopped(self) -> _Stop:
        try:
            while self.iterations < self.config.max_iterations:
                await self._turn()
            return await self._at_the_cap()
        except _Stop as stop:
            return stop
        except Halt as halt:
            return _Stop(FINAL, halt.response)
        except ToolAbort as exc:
            self._emit(events.ERROR, error=str(exc))
            return _Stop(CANCELLED, error=str(exc))

    async def _at_the_cap(self) -> _Stop:
        limit = self.config.max_iterations
        if self.config.synthesize and limit:
            self.messages.append(user(SYNTHESIZE))
            response = await self._ask(tools=())
            return _Stop(MAX_REACHED, response.content, f"Max steps {limit} exceeded")
        return _Stop(MAX_REACHED, error=f"Max steps {limit} exceeded")

    async def _turn(self) -> None:
        """Ask once, and run what is asked for."""
        self._check_limits()
        self._emit(events.TURN_START)
        try:
            response = await self._ask(self._definitions())
            if not response.tool_calls:
                await self._finish_or_follow_up(response)
                return
            results = await self._run_tools(response)
        finally:
            self._emit(events.TURN_END)
        if self.run.state.cancel_reason is not None:
            raise _Stop(CANCELLED, error=self.run.state.cancel_reason)
        if ends_run(results):
            raise _Stop(TERMINATED, response.content)

    def _check_limits(self) -> None:
        state = self.run.state
        if state.cancel_reason is not None:
            raise _Stop(CANCELLED, error=state.cancel_reason)
        if state.budget is not None and state.budget.is_out_of_tokens:
            raise _Stop(BUDGET, error=f"token budget of {state.budget.tokens} is used up")
        if self.run.deadline != math.inf and anyio.current_time() >= self.run.deadline:
            raise _Stop(BUDGET, error="the run's time is used up")

    def _definitions(self) -> list[ToolDefinition]:
        return self._registry.definitions(self._origin, policies=self.run.policies) if self._registry else []

    # The model

    async def _ask(self, tools: Sequence[ToolDefinition]) -> ModelResponse:
        self.messages[:] = repaired(self.messages)
        request = list(self.messages) if self.config.compact is None else self.config.compact(list(self.messages))
        request = await before_request(self.config.processors, request)
        self.iterations += 1
        response = await self._answer(request, tools)
        response = await after_response(self.config.processors, response)
        response = replace(response, tool_calls=tuple(unique_ids(response.tool_calls)))
        self._count(response.usage)
        self._append(assistant(response))
        return response

    async def _answer(self, request: list[Message], tools: Sequence[ToolDefinition]) -> ModelResponse:
        try:
            with self.run.state.cancellable(self.run.deadline):
                return ModelResponse.read(await ask(self.config.retry, lambda: self._chat(request, tools)))
        except ProviderError as exc:
            error = f"LLM call failed: {exc}"
            self._emit(events.ERROR, error=error)
            raise _Stop(PROVIDER_ERROR, error=error) from exc
        raise self._cut_off()

    def _cut_off(self) -> _Stop:
        if (reason := self.run.state.cancel_reason) is not None:
            return _Stop(CANCELLED, error=reason)
        return _Stop(BUDGET, error="the run's time is used up")

    async def _chat(self, request: list[Message], tools: Sequence[ToolDefinition]) -> Any:
        config = self.config
        if config.on_text is not None and isinstance(config.provider, StreamingProvider):
            return await config.provider.stream_chat(request, tools, config.model, self._options, config.on_text)
        return await config.provider.chat(request, tools, config.model, self._options)

    def _count(self, usage: TokenUsage) -> None:
        self.usage = self.usage + usage
        if self.run.state.budget is not None:
            self.run.state.budget.add_tokens(usage)

    async def _finish_or_follow_up(self, response: ModelResponse) -> None:
        jobs = self.run.state.jobs
        if not self.config.follow_up_jobs or jobs is None:
            raise _Stop(FINAL, response.content)
        with self.run.state.cancellable(self.run.deadline) as scope:
            await jobs.wait_finished()
        if scope.cancelled_caught:
            raise self._cut_off()
        finished = jobs.take_finished()
        if not finished:
            raise _Stop(FINAL, response.content)
        for job in finished:
            assert job.result is not None
            self._append(user(f"Background job {job.id} of {job.tool} finished: {job.result.text}"))

    # Tools

    async def _run_tools(self, response: ModelResponse) -> list[ToolResult]:
        message = self.messages[-1]
        if self._registry is None:
            return [await self._refused(call, NO_TOOLS) for call in response.tool_calls]
        return await self._registry.execute_batch(
            [call.parsed_if_safe() for call in response.tool_calls],
            context=self.run,
            origin=self._origin,
            sequential=self.config.sequential,
            message=message,
            on_result=self._take,
        )

    async def _refused(self, call: ToolCall, reason: str) -> ToolResult:
        refusal = ToolResult.fail(reason, code=ErrorCode.UNAVAILABLE, retryable=False, status=Status.BLOCKED)
        made, result = await _EMPTY.refuse(call, refusal, context=self.run, origin=self._origin)
        await self._take(made, result)
        return result

    async def _take(self, call: Call, result: ToolResult) -> None:
        """A call is over: its answer enters the transcript, its files and usage the run's."""
        result = await after_tool(self.config.processors, call, result)
        config = self.config
        self._steps.append(step_trace(call, result))
        self._files += result.files
        self.usage = self.usage + result.usage
        if call.traits.is_agent and not result.is_error:
            self._last_output = result.output
        self._append(
            tool_message(
                call.call_id,
                result,
                style=config.error_style,
                can_see=self._can_see,
                max_chars=config.max_result_chars,
            ),
            call_id=call.call_id,
        )
        if config.on_user is not None and (shown := result.user_text) is not None:
            await settle(config.on_user(shown, result))

    # The record

    def _append(self, message: Message, call_id: str | None = None) -> None:
        self._emit(events.MESSAGE_START, call_id, message=message)
        self.messages.append(message)
        self._emit(events.MESSAGE_END, call_id, message=message)

    def _answer_the_unanswered(self) -> None:
        """However the run ends, every call in the transcript has an answer."""
        for index in range(len(self.messages) - 1, -1, -1):
            if calls := self.messages[index].get("tool_calls"):
                answered = {message.get("tool_call_id") for message in self.messages[index + 1 :]}
                missing = [call["id"] for call in calls if call["id"] not in answered]
                self.messages += [missing_answer(call_id, "tool execution aborted") for call_id in missing]
                return

    def _emit(self, kind: str, call_id: str | None = None, **data: Any) -> None:
        run = self.run
        if run.events.active:
            data |= {"agent": self.config.name, "depth": run.depth}
            run.events.emit(type=kind, run_id=run.run_id, call_id=call_id, parent_call_id=run.parent_call_id, data=data)


_EMPTY = ToolRegistry().freeze()
