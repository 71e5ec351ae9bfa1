"""toolcell as a function tool of the OpenAI Agents SDK (`pip install 'toolcell[openai-agents]'`).

`code_execution_tool` gives an agent one tool that runs Python; the tools of the SDK that are passed to it are called
from there. A call that needs approval interrupts the SDK's run, as a call of the agent's own does: the script is driven
by an agent as a tool, whose model is the script. What the script asks for is what that model calls.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel

from toolcell.calls.call import ResumeDecision
from toolcell.config import Limits, OnApproval
from toolcell.errors import Misconfigured, ToolcellError, ToolError, UsageError
from toolcell.integrations.base import (
    CodeArguments,
    framework_tool,
    home_of,
    missing_package,
    pictures,
    text_for_model,
    tools_with,
)
from toolcell.results import ExecutionResult, Outcome, PendingCall
from toolcell.run import RunOptions
from toolcell.runtime import Runtime
from toolcell.sessions import Session
from toolcell.support import daemon_threads
from toolcell.support.checks import check_kind
from toolcell.tools import (
    Approve,
    Call,
    CodeTool,
    Deny,
    Image,
    Origin,
    ToolDefinition,
    ToolRegistry,
    ToolSpec,
    current_context,
)

try:
    from agents.tool_context import ToolContext
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

    from agents import (
        Agent,
        FunctionTool,
        Model,
        ModelResponse,
        RunConfig,
        RunContextWrapper,
        Tool,
        ToolGuardrailFunctionOutput,
        ToolInputGuardrailData,
        ToolInputGuardrailTripwireTriggered,
        ToolOutputGuardrailData,
        ToolOutputGuardrailTripwireTriggered,
        ToolOutputImage,
        ToolOutputText,
        Usage,
        default_tool_error_function,
    )
except ModuleNotFoundError as exc:
    raise missing_package(exc, "openai-agents") from exc

Decide = Callable[[RunContextWrapper[Any], dict[str, Any], str], Any]
ErrorFunction = Callable[[RunContextWrapper[Any], Exception], Any]

APPROVED = "approved"
MAX_TURNS = 10_000
"""Suspensions of one script; its `tool_calls` end it long before."""

_calling: ContextVar[ToolContext[Any] | None] = ContextVar("toolcell_openai_agents_call", default=None)
"""The SDK's context of the call that runs a script."""


_pictures: ContextVar[list[Image] | None] = ContextVar("toolcell_openai_agents_pictures", default=None)
"""Gets the pictures of the script that is run, which the answer of the agent behind the tool cannot hold."""


class CodeExecutionError(ToolcellError):
    """A script failed; its text is for the model. `code_error_function` shows it, and with None it ends the run."""

    code = "code_execution_error"


def code_error_function(context: RunContextWrapper[Any], error: Exception) -> str:
    """Return the text of a script's failure; of any other exception what the SDK says by default."""
    if isinstance(error, CodeExecutionError):
        return str(error)
    if isinstance(error, Misconfigured):
        raise error
    said: str = default_tool_error_function(context, error)
    return said


def code_execution_tool(
    runtime: Runtime | Session,
    *,
    tools: Iterable[Any] = (),
    name_override: str = "execute_code",
    description_override: str | None = None,
    limits: Limits | None = None,
    on_approval: OnApproval = "suspend",
    needs_approval: bool | Decide = False,
    is_enabled: Any = True,
    failure_error_function: ErrorFunction | None = code_error_function,
) -> FunctionTool:
    """Return a function tool that runs Python in `runtime`, which is open while the agent runs.

    With a session in place of a runtime, names and files stay from one script to the next. `tools`: function tools of
    the SDK, or tools in any way that a registry takes; scripts may call them besides the runtime's own, and a function
    tool keeps its guardrails, its approval, `is_enabled` and its timeout. The other arguments are those of
    `agents.function_tool`. `on_approval`: "suspend" interrupts the agent's run for each call that needs approval, for
    `RunState.approve` and `RunState.reject`; "ask" asks the approval hooks of the registry; "deny" refuses.

    Raises:
        UsageError: an argument is wrong.
        RegistrationError: a tool's name is taken, or its definition is wrong.
    """
    check_kind("runtime", runtime, Runtime, Session, cure="write code_execution_tool(Runtime(...)), and open it")
    RunOptions(on_approval=on_approval)  # checks it
    registry = registry_with(home_of(runtime).registry, tools)
    description = description_override or CodeTool(home_of(runtime)).describe(registry.state.visible)
    driver = _Driver(name=name_override, model=_ScriptModel(runtime, registry, limits, on_approval), tools=[])
    driver.registry = registry
    made = driver.as_tool(
        name_override,
        description,
        is_enabled=is_enabled,
        run_config=RunConfig(tracing_disabled=True),  # the call of the tool is traced; and no model but the script
        max_turns=MAX_TURNS,
        failure_error_function=failure_error_function,
        needs_approval=needs_approval,
        parameters=CodeArguments,
        input_builder=lambda options: options["params"]["code"],
    )
    inner = made.on_invoke_tool

    async def invoke(context: ToolContext[Any], arguments: str) -> Any:
        found: list[Image] = []
        before, others = _calling.set(context), _pictures.set(found)
        try:
            text = await inner(context, arguments)
        finally:
            _calling.reset(before)
            _pictures.reset(others)
        return [ToolOutputText(text=text), *map(_image, found)] if found else text

    return dataclasses.replace(made, on_invoke_tool=invoke)


def _image(image: Image) -> ToolOutputImage:
    return ToolOutputImage(image_url=f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}")


# The SDK's tools as ours.


def registry_with(registry: ToolRegistry, tools: Iterable[Any]) -> ToolRegistry:
    """Return a registry with the tools of `registry` and those in `tools`, function tools of the SDK among them."""
    if isinstance(tools, FunctionTool):
        raise UsageError(f"tools= takes a list of tools, not one; write tools=[{tools.name}]")
    given = list(tools)
    deciding = {tool.name: tool for tool in given if isinstance(tool, FunctionTool) and callable(tool.needs_approval)}
    merged = tools_with(registry, [_spec(tool) if isinstance(tool, FunctionTool) else tool for tool in given])

    async def approve(call: Call) -> Approve | None:
        """Approve a call of which the tool itself says that it needs no approval."""
        tool = deciding.get(call.name)
        if tool is None or not callable(tool.needs_approval):
            return None
        asked = tool.needs_approval(_context(tool, call.args, call.call_id), dict(call.args), call.call_id)
        return None if (await asked if inspect.isawaitable(asked) else asked) else Approve()

    if deciding:
        merged.add_hook(before=approve)
    return merged


def _spec(tool: FunctionTool) -> ToolSpec:
    # A copy whose failures are exceptions: as text they would be results, and a script could not tell.
    raising = dataclasses.replace(tool, _failure_error_function=None, _use_default_failure_error_function=False)
    has_words = not tool._use_default_failure_error_function

    async def call(args: dict[str, Any]) -> Any:
        context = _context(tool, args, current_context().call_id)
        await _check_enabled(tool, context)
        for guardrail in tool.tool_input_guardrails or ():
            data = ToolInputGuardrailData(context=context, agent=context.agent)
            _heed(await guardrail.run(data), guardrail, ToolInputGuardrailTripwireTriggered)
        try:
            output = await raising.on_invoke_tool(context, json.dumps(args))
        except Exception as exc:
            if has_words and tool._failure_error_function is not None:
                said = tool._failure_error_function(context, exc)
                raise ToolError(str(await said if inspect.isawaitable(said) else said)) from exc
            raise
        for guardrail in tool.tool_output_guardrails or ():
            shown = ToolOutputGuardrailData(context=context, agent=context.agent, output=output)
            _heed(await guardrail.run(shown), guardrail, ToolOutputGuardrailTripwireTriggered)
        return _plain(output)

    return framework_tool(
        tool.name,
        tool.description,
        tool.params_json_schema,
        call,
        source=tool,
        requires_approval=tool.needs_approval is not False,
        timeout_s=tool.timeout_seconds,
    )


def _context(tool: FunctionTool, args: Mapping[str, Any], call_id: str) -> ToolContext[Any]:
    """Return the SDK's context of a call that a script makes."""
    outer = _calling.get()
    return ToolContext(
        context=outer.context if outer is not None else None,
        usage=outer.usage if outer is not None else Usage(),
        tool_name=tool.name,
        tool_call_id=call_id or tool.name,
        tool_arguments=json.dumps(dict(args)),
        agent=outer.agent if outer is not None else None,
        run_config=outer.run_config if outer is not None else None,
    )


async def _check_enabled(tool: FunctionTool, context: ToolContext[Any]) -> None:
    enabled = tool.is_enabled
    if callable(enabled):
        answer = enabled(context, context.agent)
        enabled = await answer if inspect.isawaitable(answer) else answer
    if not enabled:
        raise ToolError(f"tool {tool.name} is not enabled now", code="not_permitted")


def _heed(output: ToolGuardrailFunctionOutput, guardrail: Any, tripwire: type[Exception]) -> None:
    """Act on what a guardrail says.

    Raises:
        ToolError: it rejects the call or its result, with a message for the model.
    """
    match output.behavior:
        case {"type": "reject_content", "message": message}:
            raise ToolError(str(message), code="blocked")
        case {"type": "raise_exception"}:
            raise tripwire(guardrail, output)


def _plain(output: Any) -> Any:
    """Return what the SDK would show a model as data: its output classes become plain ones."""
    if isinstance(output, BaseModel):
        return output.model_dump(mode="json")
    return output


# Scripts, as a model that calls what the script calls.


def _approval(run_id: str, call_id: str) -> str:
    return f"{APPROVED} {run_id}/{call_id}"


class _Driver(Agent[Any]):
    """The agent behind the tool. Each tool that a script may call is one of its own, and needs approval."""

    registry: ToolRegistry

    async def get_all_tools(self, run_context: RunContextWrapper[Any]) -> list[Tool]:
        """Return the tools as they are now. The SDK refuses an agent whose `tools` change while two calls run."""
        return [_pending_tool(each) for each in self.registry.definitions(Origin.CODE)]


def _pending_tool(definition: ToolDefinition) -> FunctionTool:
    async def approved(context: ToolContext[Any], arguments: str) -> str:
        return _approval(*context.tool_call_id.rsplit("/", 1))

    return FunctionTool(
        name=definition.name,
        description=definition.description,
        params_json_schema={"type": "object", "properties": {}, "additionalProperties": True},
        on_invoke_tool=approved,
        strict_json_schema=False,
        needs_approval=True,
    )


class _ScriptModel(Model):
    """A script as a model: it calls what needs approval, and its answer is the script's result."""

    def __init__(
        self, runtime: Runtime | Session, registry: ToolRegistry, limits: Limits | None, on_approval: OnApproval
    ) -> None:
        self._runtime, self._registry, self._limits, self._on_approval = runtime, registry, limits, on_approval

    async def get_response(
        self, system_instructions: str | None, input: str | list[Any], *args: Any, **options: Any
    ) -> ModelResponse:
        """Run the script that `input` begins with, or carry it on with the decisions that `input` ends with."""
        outputs: dict[str, dict[str, str]] = {}
        for item in input if isinstance(input, list) else ():
            if item.get("type") == "function_call_output":
                run_id, _, call_id = item["call_id"].rpartition("/")
                outputs[run_id] = {**outputs.get(run_id, {}), call_id: str(item["output"])}
        if outputs:
            result = await self._resume(*list(outputs.items())[-1])
        else:
            result = await self._run(input if isinstance(input, str) else str(input[0]["content"]))
        return _response(result)

    def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Refuse: the tool does not stream the agent behind it."""
        raise UsageError("the answer of this model is a script and cannot be streamed; stream the agent that runs it")

    async def _run(self, source: str) -> ExecutionResult:
        """Run a script to its end, or until it waits.

        Raises:
            CodeExecutionError: there is nothing to run, or no sandbox to run it in.
        """
        if not source.strip():
            raise CodeExecutionError("there is no code to run")
        try:
            return await self._runtime.execute_code(
                source, tools=self._registry, limits=self._limits, on_approval=self._on_approval
            )
        except Misconfigured:
            raise
        except ToolcellError as exc:
            raise CodeExecutionError(f"code execution failed: {exc}") from exc

    async def _resume(self, run_id: str, outputs: Mapping[str, str]) -> ExecutionResult:
        """Carry a script on. `outputs`: by the id of the pending call, what the SDK made of it.

        Raises:
            CodeExecutionError: it cannot be carried on.
        """
        found = await daemon_threads.run_sync(home_of(self._runtime).suspended_runs)
        waiting = [each for each in found if each.run_id == run_id]
        if not waiting:
            raise CodeExecutionError(f"the script {run_id} does not wait any more; run it again")
        decisions: dict[str, ResumeDecision] = {
            call.id: Approve() if outputs[call.id] == _approval(run_id, call.id) else Deny(outputs[call.id])
            for call in waiting[0].calls
            if call.id in outputs
        }
        try:
            return await self._runtime.resume(waiting[0], decisions, tools=self._registry)
        except ToolcellError as exc:
            raise CodeExecutionError(f"code execution failed: {exc}") from exc


def _response(result: ExecutionResult) -> ModelResponse:
    """Return a run's result as a model's answer: calls for those that wait, else the text.

    Raises:
        CodeExecutionError: the script failed.
    """
    if result.outcome is Outcome.SUSPENDED and result.suspension is not None:
        waits = result.suspension
        output: list[Any] = [_call(waits.run_id, call) for call in waits.calls]
    elif not result.ok:
        raise CodeExecutionError(text_for_model(result))
    else:
        if (found := _pictures.get()) is not None:
            found += pictures(result)
        text = ResponseOutputText(text=text_for_model(result), type="output_text", annotations=[])
        output = [
            ResponseOutputMessage(
                id=result.run_id, type="message", role="assistant", status="completed", content=[text]
            )
        ]
    return ModelResponse(output=output, usage=Usage(), response_id=None)


def _call(run_id: str, call: PendingCall) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(
        type="function_call", call_id=f"{run_id}/{call.id}", name=call.tool, arguments=json.dumps(call.args)
    )
