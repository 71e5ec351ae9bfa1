"""The tool loop: ask a model, run the tools it calls, and repeat until it answers without a call.

The same loop serves an agent and an agent that is another agent's tool. It depends on no single tool or provider.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import anyio

from toolcell.agents.loop_result import (
    BUDGET,
    CANCELLED,
    EMPTY,
    FINAL,
    MAX_REACHED,
    PROVIDER_ERROR,
    REFUSAL,
    SUSPENDED,
    TERMINATED,
    TRUNCATED,
    StepTrace,
    Stop,
    ToolLoopResult,
    step_trace,
)
from toolcell.agents.processors import Halt, Processor, after_response, after_tool, before_request
from toolcell.agents.providers.provider import (
    DEFAULT_OPTIONS,
    PAUSED,
    REFUSED,
    Message,
    MessageUpdate,
    ModelResponse,
    Provider,
    ProviderError,
    StreamingProvider,
    assistant,
    updates_of,
    user,
)
from toolcell.agents.providers.retries import MISUSE_STATUSES, RetryPolicy, send_with_retries
from toolcell.agents.transcript import (
    FAILED_REASONS,
    MAX_TRANSCRIPT_CHARS,
    ErrorStyle,
    answers_to_open_calls,
    check_messages,
    compacted,
    labels_in,
    open_calls,
    repaired,
    tool_message,
)
from toolcell.calls import events
from toolcell.calls.arguments import unique_ids
from toolcell.calls.call import OnUser
from toolcell.calls.concurrency import maybe_await
from toolcell.calls.context import share_labels
from toolcell.calls.result import NO_USAGE
from toolcell.calls.run_state import open_jobs
from toolcell.config import SHOWN_CHARS
from toolcell.control import TurnApprovals
from toolcell.errors import Misconfigured, ToolAbort, UsageError
from toolcell.support.checks import brief, check_count, check_kind, check_one_of, check_seconds, fields_known
from toolcell.tools import (
    Budget,
    Call,
    File,
    Origin,
    RunContext,
    ToolCall,
    ToolDefinition,
    ToolRegistry,
    ToolResult,
)

MAX_ITERATIONS = 10
SYNTHESIZE = "You have used all available tool calls. Summarize what you found and respond to the user."
OUT_OF_TIME = "the run's time is used up"
CUT_OFF = "the model's answer was cut off at its limit of tokens; raise max_tokens in llm_options"
NO_ANSWER = "the model gave an empty answer"


@fields_known
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLoopConfig:
    """Settings of one run of the loop."""

    provider: Provider
    model: str = ""
    """Empty: that of the agent above with the same kind of provider."""
    tools: ToolRegistry | Iterable[Any] | None = None
    """None: the model is offered no tools, and a call that it makes anyway is answered with an error."""
    max_iterations: int = MAX_ITERATIONS
    """Most requests to the model."""
    llm_options: Mapping[str, Any] | None = None
    sequential: bool | None = None
    """Run calls one at a time, also those of plans and scripts. None: as the registry is set."""
    synthesize: bool = False
    """After the last iteration, ask once more for an answer, without tools."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    budget: Budget | None = None
    """Budget of each run, with everything that it starts. A run that already has a budget keeps it."""
    wall_s: float | None = None
    """Most seconds that the run may take."""
    processors: tuple[Processor, ...] = ()
    compact: Callable[[list[Message]], list[Message]] | None = compacted
    """Shortens the transcript before a request. None: never."""
    on_user: OnUser | None = None
    """Receives the text that tools return for the user, in order."""
    stream: bool = False
    """Ask the model, and those of sub-agents, to stream, and emit each piece that arrives as `message_update`."""
    error_style: ErrorStyle = "plain"
    shown_chars: int = SHOWN_CHARS
    """Most characters of tools in each request. From a larger catalogue with `search_tools`, what was found or called
    is shown."""
    max_result_chars: int = MAX_TRANSCRIPT_CHARS
    """Characters of one tool's answer in the transcript. Events hold the whole answer."""
    name: str = ""
    """The agent's name in events."""

    def __post_init__(self) -> None:
        provider = self.provider
        if isinstance(provider, type) or not inspect.iscoroutinefunction(getattr(provider, "chat", None)):
            cure = f"write {provider.__name__}(...)" if isinstance(provider, type) else "such as OpenAIProvider()"
            raise UsageError(f"provider must have an async method chat, {cure}, not {brief(provider)}")
        check_count("max_iterations", self.max_iterations, 0)
        check_count("shown_chars", self.shown_chars, 0)
        check_seconds("wall_s", self.wall_s, optional=True)
        check_kind("model", self.model, str, cure="the name that the provider gives it")
        check_kind("name", self.name, str)
        check_one_of("error_style", self.error_style, get_args(ErrorStyle))
        if self.tools is not None:
            object.__setattr__(self, "tools", ToolRegistry.of(self.tools, "tools="))
        check_kind("llm_options", self.llm_options, Mapping, type(None), cure='such as {"temperature": 0.2}')
        check_kind("retry", self.retry, RetryPolicy, cure="write RetryPolicy(attempts=...)")
        check_kind("budget", self.budget, Budget, type(None), cure="write Budget(tokens=...)")


async def run_tool_loop(
    config: ToolLoopConfig,
    messages: Sequence[Message],
    channel: str = "",
    chat_id: str = "",
    *,
    context: RunContext | None = None,
) -> ToolLoopResult:
    """Run the loop on a conversation. `messages` is not changed; the result holds the longer conversation.

    Raises:
        UsageError: the provider refuses the key, or does not know the model or the address.

    Cancellation: passes through, after every tool was cancelled. `RunContext.cancel` ends the run with a result
    instead, in which every call has its answer.
    """
    check_kind("config", config, ToolLoopConfig, cure="write ToolLoopConfig(provider=..., tools=...)")
    check_messages(messages)
    run = context or RunContext()
    if channel or chat_id:
        run = run.child(channel=channel, chat_id=chat_id)
    return await LoopRun(config, list(messages), run).run()


class LoopRun:
    """One run of the loop. It appends to the `messages` it was given."""

    def __init__(
        self,
        config: ToolLoopConfig,
        messages: list[Message],
        context: RunContext,
        approvals: TurnApprovals | None = None,
    ) -> None:
        """`approvals`: lets calls of the model wait for decisions, and has those about calls that waited."""
        self.config = config
        self.messages = messages
        scope, kind = context.scope, type(config.provider)
        self._on_user = config.on_user or scope.on_user
        """A sub-agent without one of its own has that of the agent above."""
        self._streams = config.stream or scope.streams
        self._model = config.model or dict(scope.models).get(kind, "")
        self.context = _with_limits(context, config).within(
            on_user=self._on_user,
            streams=self._streams,
            sequential=scope.sequential if config.sequential is None else config.sequential,
            models=tuple((dict(scope.models) | {kind: self._model}).items()),
        )
        self._has_begun = False
        """A part of the message that the model is generating was emitted."""
        share_labels(self.context)
        self.context.state.labels.add(labels_in(messages))
        self._registry: ToolRegistry = ToolRegistry.of(
            () if config.tools is None else config.tools, "tools="
        ).snapshot()
        self._options = DEFAULT_OPTIONS if config.llm_options is None else config.llm_options
        self._origin = Origin.SUBAGENT if context.scope.depth else Origin.MODEL
        self._approvals = approvals
        self._iterations = 0
        self._usage = NO_USAGE
        self._files: list[File] = []
        self._steps: list[StepTrace] = []
        self._last_output = ""

    async def run(self) -> ToolLoopResult:
        """Run to the end. Every call in `messages` has an answer then, also when the run is cancelled; calls that wait
        for decisions have none."""
        self._emit(events.AGENT_START)
        stop = None
        try:
            async with open_jobs(self.context.state):
                stop = await self._run_turns()
        finally:
            if stop is None or stop.reason != SUSPENDED:
                self.messages += answers_to_open_calls(self.messages)
        self._emit(events.AGENT_END, content=stop.content, stop_reason=stop.reason, error=stop.error)
        await self.context.events.hear()
        return ToolLoopResult(
            stop.content,
            self._iterations,
            stop_reason=stop.reason,
            messages=list(self.messages),
            error=stop.error,
            usage=self._usage,
            files=tuple(self._files),
            steps=tuple(self._steps),
            last_output=self._last_output,
        )

    async def _run_turns(self) -> Stop:
        try:
            if self._approvals is not None and self._approvals.is_resumed:
                await self._run_tools(*open_calls(self.messages))
            while self._iterations < self.config.max_iterations:
                self._check_limits()
                self._emit(events.TURN_START)
                try:
                    await self._turn()
                finally:
                    self._emit(events.TURN_END)
                await self.context.events.hear()
            return await self._stop_at_cap()
        except Stop as stop:
            return stop
        except Halt as halt:
            return Stop(FINAL, halt.response)
        except Misconfigured:
            raise
        except ToolAbort as exc:
            self._emit(events.ERROR, error=str(exc))
            return Stop(CANCELLED, error=str(exc))

    def _check_limits(self) -> None:
        state, deadline = self.context.state, self.context.deadline
        if state.cancel_reason is not None or (deadline != math.inf and anyio.current_time() >= deadline):
            raise self._interrupted()
        if state.budget is not None and state.budget.is_out_of_tokens:
            raise Stop(BUDGET, error=f"token budget of {state.budget.tokens} is used up")

    async def _turn(self) -> None:
        """Ask the model once, and run the tools that it calls."""
        shown = shown_tools(self._registry, self._origin, self.context, self.messages, self.config.shown_chars)
        response = await self._ask(shown)
        if not response.tool_calls:
            if response.finish_reason == REFUSED:
                raise Stop(REFUSAL, response.content, "the model refused to answer")
            if response.finish_reason != PAUSED:
                await self._wait_for_jobs(response)
            return
        await self._run_tools(self.messages[-1], response.tool_calls)

    async def _stop_at_cap(self) -> Stop:
        limit, content = self.config.max_iterations, ""
        if self.config.synthesize and limit:
            self.messages.append(user(SYNTHESIZE))
            content = (await self._ask(tools=())).content
        return Stop(MAX_REACHED, content, f"Max steps {limit} exceeded")

    # Ask the model

    async def _ask(self, tools: Sequence[ToolDefinition]) -> ModelResponse:
        self.messages[:] = repaired(self.messages)
        request = list(self.messages) if self.config.compact is None else self.config.compact(list(self.messages))
        request = await before_request(self.config.processors, request)
        self._iterations += 1
        response = await after_response(self.config.processors, await self._send(request, tools))
        calls = [call.parsed() for call in unique_ids(response.tool_calls)]
        if calls and response.finish_reason == "length":
            calls[-1] = calls[-1].perhaps_cut()
        response = replace(response, tool_calls=tuple(calls))
        if self._streams and not self._has_begun:
            for update in updates_of(response):
                self._emit_update(update)
        self._append(assistant(response))
        return response

    async def _send(self, request: list[Message], tools: Sequence[ToolDefinition]) -> ModelResponse:
        try:
            with self.context.state.cancellable(self.context.deadline):
                return await send_with_retries(self.config.retry, lambda: self._chat(request, tools))
        except ProviderError as exc:
            error = f"LLM call failed: {exc}"
            self._emit(events.ERROR, error=error)
            if exc.status in MISUSE_STATUSES:
                check = f"check the provider's key, address and model={self._model!r}"
                raise Misconfigured(f"{error}; {check}") from exc
            raise Stop(PROVIDER_ERROR, error=error) from exc
        raise self._interrupted()

    async def _chat(self, request: list[Message], tools: Sequence[ToolDefinition]) -> ModelResponse:
        config, self._has_begun = self.config, False
        # What a processor edits or refuses must not have been seen before.
        streams = self._streams and all(processor.post_llm is None for processor in config.processors)
        if streams and isinstance(config.provider, StreamingProvider):
            asked = config.provider.stream_chat(request, tools, self._model, self._options, self._emit_update)
        else:
            asked = config.provider.chat(request, tools, self._model, self._options)
        answer = await maybe_await(asked)
        response = ModelResponse.read(answer)
        self._usage += response.usage
        if (budget := self.context.state.budget) is not None:
            budget.used += response.usage
        if (reason := response.finish_reason) in FAILED_REASONS:
            is_last = self._has_begun or (budget is not None and budget.is_out_of_tokens)
            raise ProviderError(f"the model's answer ended as {reason!r} before it was whole", retryable=not is_last)
        return response

    def _interrupted(self) -> Stop:
        """Return why a wait of the run was cut short."""
        if (reason := self.context.state.cancel_reason) is not None:
            return Stop(CANCELLED, error=reason)
        return Stop(BUDGET, error=OUT_OF_TIME)

    async def _wait_for_jobs(self, response: ModelResponse) -> None:
        """Add the results of background jobs to the conversation. Without any, `response` is the run's answer."""
        jobs = self.context.state.jobs
        if jobs is None:
            raise _end_without_calls(response)
        with self.context.state.cancellable(self.context.deadline) as scope:
            await jobs.wait_finished(self.context.scope.agents)
        if scope.cancelled_caught:
            raise self._interrupted()
        finished = jobs.take_finished(self.context.scope.agents)
        if not finished:
            raise _end_without_calls(response)
        for job in finished:
            assert job.result is not None
            self._append(user(f"Background job {job.id} of {job.tool} finished: {job.result.text}"))

    # Run the tools

    async def _run_tools(self, message: Message, calls: Sequence[ToolCall]) -> None:
        """Run calls of a message, and end the run if they end it or wait for decisions."""
        results = await self._registry.execute_batch(
            [call.parsed_if_safe() for call in calls],
            context=self.context,
            origin=self._origin,
            message=message,
            on_result=self._add_result,
        )
        if self.context.state.cancel_reason is not None:
            raise self._interrupted()
        if self._approvals is not None and self._approvals.pending:
            if held := self.context.state.labels.names:
                self.messages[-1]["labels"] = sorted(held)  # what has been read by calls that have no answer yet
            raise Stop(SUSPENDED, message.get("content") or "", self._approvals.WAITS)
        if ends_run(results):
            self._last_output = "\n".join(output for result in results if (output := result.output))
            raise Stop(TERMINATED, message.get("content") or "")

    async def _add_result(self, call: Call, result: ToolResult) -> None:
        """Add a finished call's answer to the transcript, and its files and usage to the run's."""
        config = self.config
        if self._approvals is not None and self._approvals.waits(call):
            return
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
            labels=self.context.state.labels.names,
        )
        self._append(answer, call_id=call.call_id)
        if self._on_user is not None and (shown := result.user_text) is not None:
            await maybe_await(self._on_user(shown, result))

    # Record and report

    def _append(self, message: Message, call_id: str | None = None) -> None:
        if not self._has_begun:
            self._emit(events.MESSAGE_START, call_id, message=message)
        self.messages.append(message)
        self._has_begun = False
        self._emit(events.MESSAGE_END, call_id, message=message)

    def _emit_update(self, update: MessageUpdate) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._emit(events.MESSAGE_START, message={"role": "assistant", "content": ""})
        piece = {update.kind: update.piece}
        self._emit(events.MESSAGE_UPDATE, update.call_id or None, tool=update.tool or None, update=piece)

    def _emit(
        self, kind: str, call_id: str | None = None, tool: str | None = None, update: Any = None, **data: Any
    ) -> None:
        run = self.context
        if run.events.active:
            run.events.emit(
                type=kind,
                run_id=run.run_id,
                call_id=call_id,
                parent_call_id=run.scope.parent_call_id,
                tool=tool,
                update=update,
                data=data | {"agent": self.config.name, "depth": run.scope.depth},
            )


# Which tools a model is shown with a request: all, or of a large catalogue those that it found or called


def shown_tools(
    registry: ToolRegistry, origin: Origin, context: RunContext, messages: Sequence[Message], shown_chars: int
) -> list[ToolDefinition]:
    """Return the definitions of a request: what was found last comes before what the conversation has called."""
    found = [*map(registry.state.registered_name, called_tools(messages)), *context.state.found_tools]
    latest_last = list(reversed(dict.fromkeys(reversed(found))))
    return registry.definitions(origin, policies=context.scope.policies, shown_chars=shown_chars, found=latest_last)


def called_tools(messages: Sequence[Message]) -> Iterator[str]:
    """Return the names that a conversation has called, as they were written."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function: Any = call.get("function") if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str):
                yield name


def _end_without_calls(response: ModelResponse) -> Stop:
    """Return the end of a run whose model made no call: a whole answer, one that was cut off, or none at all."""
    if response.finish_reason == "length":
        return Stop(TRUNCATED, response.content, CUT_OFF)
    if not response.content.strip():
        return Stop(EMPTY, response.content, NO_ANSWER)
    return Stop(FINAL, response.content)


def _with_limits(context: RunContext, config: ToolLoopConfig) -> RunContext:
    """Give the run the config's budget and deadline. A budget that the run already has stays."""
    if config.budget is not None and context.state.budget is None:
        context.state.budget = config.budget.unused()
    if config.wall_s is not None:
        return context.child(deadline=min(context.deadline, anyio.current_time() + config.wall_s))
    return context


def ends_run(results: Sequence[ToolResult]) -> bool:
    """True when every result of a batch asks to stop the run; an empty batch never does."""
    return bool(results) and all(result.terminate for result in results)
