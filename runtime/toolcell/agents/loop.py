"""The tool loop: ask a model, run the tools it calls, and repeat until it answers without a call.

The same loop serves an agent and an agent that is another agent's tool. It depends on no single tool or provider.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from toolcell.agents.providers.sdk import RetryPolicy, send_with_retries
from toolcell.agents.trace import StepTrace, step_trace
from toolcell.agents.transcript import answers_to_open_calls, compacted, repaired, tool_message
from toolcell.errors import ToolAbort
from toolcell.tools import events
from toolcell.tools.batch import ends_run
from toolcell.tools.call import Call, RunContext
from toolcell.tools.compat import MAX_TRANSCRIPT_CHARS, ErrorStyle
from toolcell.tools.concurrency import maybe_await
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.model_calls import ToolCall, unique_ids
from toolcell.tools.options import Origin
from toolcell.tools.registry import ToolRegistry
from toolcell.tools.result import NO_USAGE, ErrorCode, File, Status, TokenUsage, ToolResult
from toolcell.tools.run_state import Budget

MAX_ITERATIONS = 10
SYNTHESIZE = "You have used all available tool calls. Summarize what you found and respond to the user."
NO_TOOLS = "No tools available"
OUT_OF_TIME = "the run's time is used up"

StopReason = str
FINAL, MAX_REACHED, TERMINATED = "final", "max_iterations", "terminated"
CANCELLED, BUDGET, PROVIDER_ERROR = "cancelled", "budget", "provider_error"

OnUser = Callable[[str, ToolResult], Awaitable[None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLoopConfig:
    """Settings of one run of the loop."""

    provider: Provider
    model: str = ""
    tools: ToolRegistry | None = None
    """None: the model is offered no tools, and a call that it makes anyway is answered with an error."""
    max_iterations: int = MAX_ITERATIONS
    """Most requests to the model."""
    llm_options: Mapping[str, Any] | None = None
    sequential: bool | None = None
    """Run the calls of one response one at a time. None: as the registry is set."""
    synthesize: bool = False
    """After the last iteration, ask once more for an answer, without tools."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    budget: Budget | None = None
    """Shared with everything that the run starts. Ignored in a run that already has a budget."""
    wall_s: float | None = None
    """Most seconds that the run may take."""
    processors: tuple[Processor, ...] = ()
    compact: Callable[[list[Message]], list[Message]] | None = compacted
    """Shortens the transcript before a request. None: never."""
    on_user: OnUser | None = None
    """Receives the text that tools return for the user, in order."""
    on_text: OnText | None = None
    """Receives the model's text as it arrives, from providers that stream."""
    follow_up_jobs: bool = False
    """Before an answer is final, wait for background jobs and send the model their results."""
    error_style: ErrorStyle = "plain"
    max_result_chars: int = MAX_TRANSCRIPT_CHARS
    """Characters of one tool's answer in the transcript. Events hold the whole answer."""
    name: str = ""
    """The agent's name in events."""


@dataclass(frozen=True, slots=True)
class ToolLoopResult:
    """The result of one run of the loop."""

    content: str
    iterations: int
    """Requests made to the model."""
    stop_reason: StopReason
    messages: list[Message]
    """The whole conversation. A later run can continue it."""
    error: str | None = None
    usage: TokenUsage = NO_USAGE
    files: tuple[File, ...] = ()
    """Files of all tool calls, in order."""
    steps: tuple[StepTrace, ...] = ()
    last_output: str = ""
    """Answer of the last agent that was called as a tool."""

    @property
    def is_error(self) -> bool:
        """True when the run failed, was cancelled, or ran out of budget."""
        return self.stop_reason in (PROVIDER_ERROR, CANCELLED, BUDGET)


async def run_tool_loop(
    config: ToolLoopConfig,
    messages: Sequence[Message],
    channel: str = "",
    chat_id: str = "",
    *,
    context: RunContext | None = None,
) -> ToolLoopResult:
    """Run the loop on a conversation. `messages` is not changed; the result holds the longer conversation.

    Cancellation: passes through, after every tool was cancelled. `RunContext.cancel` ends the run with a result
    instead, in which every call has its answer.
    """
    run = context or RunContext()
    if channel or chat_id:
        run = run.child(channel=channel, chat_id=chat_id)
    return await LoopRun(config, list(messages), run).run()


class LoopRun:
    """One run of the loop. It appends to the `messages` it was given."""

    def __init__(self, config: ToolLoopConfig, messages: list[Message], context: RunContext) -> None:
        self.config = config
        self.messages = messages
        self.context = _with_limits(context, config)
        self._registry = config.tools.snapshot() if config.tools is not None else None
        self._options = DEFAULT_OPTIONS if config.llm_options is None else config.llm_options
        self._origin = Origin.SUBAGENT if context.depth else Origin.MODEL
        self._iterations = 0
        self._usage = NO_USAGE
        self._files: list[File] = []
        self._steps: list[StepTrace] = []
        self._last_output = ""

    async def run(self) -> ToolLoopResult:
        """Run to the end. Every call in `messages` has an answer then, also when the run is cancelled."""
        self._emit(events.AGENT_START)
        try:
            stop = await self._run_turns()
        finally:
            self.messages += answers_to_open_calls(self.messages)
        self._emit(events.AGENT_END, content=stop.content, stop_reason=stop.reason, error=stop.error)
        return ToolLoopResult(
            stop.content,
            self._iterations,
            stop.reason,
            list(self.messages),
            stop.error,
            self._usage,
            tuple(self._files),
            tuple(self._steps),
            self._last_output,
        )

    async def _run_turns(self) -> _Stop:
        try:
            while self._iterations < self.config.max_iterations:
                self._check_limits()
                self._emit(events.TURN_START)
                try:
                    await self._turn()
                finally:
                    self._emit(events.TURN_END)
            return await self._stop_at_cap()
        except _Stop as stop:
            return stop
        except Halt as halt:
            return _Stop(FINAL, halt.response)
        except ToolAbort as exc:
            self._emit(events.ERROR, error=str(exc))
            return _Stop(CANCELLED, error=str(exc))

    def _check_limits(self) -> None:
        self._check_cancelled()
        budget = self.context.state.budget
        if budget is not None and budget.is_out_of_tokens:
            raise _Stop(BUDGET, error=f"token budget of {budget.tokens} is used up")
        if self.context.deadline != math.inf and anyio.current_time() >= self.context.deadline:
            raise _Stop(BUDGET, error=OUT_OF_TIME)

    def _check_cancelled(self) -> None:
        if (reason := self.context.state.cancel_reason) is not None:
            raise _Stop(CANCELLED, error=reason)

    async def _turn(self) -> None:
        """Ask the model once, and run the tools that it calls."""
        response = await self._ask(self._definitions())
        if not response.tool_calls:
            await self._wait_for_jobs(response)
            return
        results = await self._run_tools(response)
        self._check_cancelled()
        if ends_run(results):
            raise _Stop(TERMINATED, response.content)

    async def _stop_at_cap(self) -> _Stop:
        limit, content = self.config.max_iterations, ""
        if self.config.synthesize and limit:
            self.messages.append(user(SYNTHESIZE))
            content = (await self._ask(tools=())).content
        return _Stop(MAX_REACHED, content, f"Max steps {limit} exceeded")

    # Ask the model

    def _definitions(self) -> list[ToolDefinition]:
        return self._registry.definitions(self._origin, policies=self.context.policies) if self._registry else []

    async def _ask(self, tools: Sequence[ToolDefinition]) -> ModelResponse:
        self.messages[:] = repaired(self.messages)
        request = list(self.messages) if self.config.compact is None else self.config.compact(list(self.messages))
        request = await before_request(self.config.processors, request)
        self._iterations += 1
        response = await after_response(self.config.processors, await self._send(request, tools))
        response = replace(response, tool_calls=tuple(unique_ids(response.tool_calls)))
        self._usage += response.usage
        if self.context.state.budget is not None:
            self.context.state.budget.add_tokens(response.usage)
        self._append(assistant(response))
        return response

    async def _send(self, request: list[Message], tools: Sequence[ToolDefinition]) -> ModelResponse:
        try:
            with self.context.state.cancellable(self.context.deadline):
                answer = await send_with_retries(self.config.retry, lambda: self._chat(request, tools))
                return ModelResponse.read(answer)
        except ProviderError as exc:
            error = f"LLM call failed: {exc}"
            self._emit(events.ERROR, error=error)
            raise _Stop(PROVIDER_ERROR, error=error) from exc
        raise self._interrupted()

    async def _chat(self, request: list[Message], tools: Sequence[ToolDefinition]) -> Any:
        config = self.config
        if config.on_text is not None and isinstance(config.provider, StreamingProvider):
            return await config.provider.stream_chat(request, tools, config.model, self._options, config.on_text)
        return await config.provider.chat(request, tools, config.model, self._options)

    def _interrupted(self) -> _Stop:
        """Return why a wait of the run was cut short."""
        if (reason := self.context.state.cancel_reason) is not None:
            return _Stop(CANCELLED, error=reason)
        return _Stop(BUDGET, error=OUT_OF_TIME)

    async def _wait_for_jobs(self, response: ModelResponse) -> None:
        """Add the results of background jobs to the conversation. Without any, `response` is the run's answer."""
        jobs = self.context.state.jobs
        if not self.config.follow_up_jobs or jobs is None:
            raise _Stop(FINAL, response.content)
        with self.context.state.cancellable(self.context.deadline) as scope:
            await jobs.wait_finished()
        if scope.cancelled_caught:
            raise self._interrupted()
        finished = jobs.take_finished()
        if not finished:
            raise _Stop(FINAL, response.content)
        for job in finished:
            assert job.result is not None
            self._append(user(f"Background job {job.id} of {job.tool} finished: {job.result.text}"))

    # Run the tools

    async def _run_tools(self, response: ModelResponse) -> list[ToolResult]:
        message = self.messages[-1]
        if self._registry is None:
            return [await self._refuse(call, NO_TOOLS) for call in response.tool_calls]
        return await self._registry.execute_batch(
            [call.parsed_if_safe() for call in response.tool_calls],
            context=self.context,
            origin=self._origin,
            sequential=self.config.sequential,
            message=message,
            on_result=self._add_result,
        )

    async def _refuse(self, tool_call: ToolCall, reason: str) -> ToolResult:
        refusal = ToolResult.fail(reason, code=ErrorCode.UNAVAILABLE, retryable=False, status=Status.BLOCKED)
        call, result = await _EMPTY.refuse(tool_call, refusal, context=self.context, origin=self._origin)
        await self._add_result(call, result)
        return result

    async def _add_result(self, call: Call, result: ToolResult) -> None:
        """Add a finished call's answer to the transcript, and its files and usage to the run's."""
        config = self.config
        result = await after_tool(config.processors, call, result)
        self._steps.append(step_trace(call, result))
        self._files += result.files
        self._usage += result.usage
        if call.options.is_agent and not result.is_error:
            self._last_output = result.output
        answer = tool_message(
            call.call_id,
            result,
            style=config.error_style,
            supports_images=bool(getattr(config.provider, "supports_images", False)),
            max_chars=config.max_result_chars,
        )
        self._append(answer, call_id=call.call_id)
        if config.on_user is not None and (shown := result.user_text) is not None:
            await maybe_await(config.on_user(shown, result))

    # Record and report

    def _append(self, message: Message, call_id: str | None = None) -> None:
        self._emit(events.MESSAGE_START, call_id, message=message)
        self.messages.append(message)
        self._emit(events.MESSAGE_END, call_id, message=message)

    def _emit(self, kind: str, call_id: str | None = None, **data: Any) -> None:
        run = self.context
        if run.events.active:
            data |= {"agent": self.config.name, "depth": run.depth}
            run.events.emit(type=kind, run_id=run.run_id, call_id=call_id, parent_call_id=run.parent_call_id, data=data)


class _Stop(Exception):
    """Ends the run. Raised at any depth of a turn and caught in `_run_turns`."""

    def __init__(self, reason: StopReason, content: str = "", error: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.content = content
        self.error = error


def _with_limits(context: RunContext, config: ToolLoopConfig) -> RunContext:
    """Give the run the config's budget and deadline. A budget that the run already has stays."""
    if config.budget is not None and context.state.budget is None:
        context.state.budget = config.budget
    if config.wall_s is not None:
        return context.child(deadline=min(context.deadline, anyio.current_time() + config.wall_s))
    return context


_EMPTY = ToolRegistry().freeze()
