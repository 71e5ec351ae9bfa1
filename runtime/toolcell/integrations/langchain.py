"""toolcell as a tool of LangChain (`pip install 'toolcell[langchain]'`). `deepagents` has the middleware.

`code_execution_tool` runs Python. LangChain's tools that are passed to it are called from there.

A call that needs approval interrupts the graph as `HumanInTheLoopMiddleware` does, with the same request and answer.
What a script has done until then is a task of the graph: the checkpointer keeps it, and nothing is done twice.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

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
from toolcell.results import ExecutionResult
from toolcell.run import RunOptions
from toolcell.runtime import Runtime
from toolcell.sessions import Session
from toolcell.support.checks import brief, check_kind
from toolcell.sync import SyncRuntime
from toolcell.tools import Approve, CodeTool, Deny, Edit, RunContext, ToolRegistry, ToolSpec, current_context

try:
    from langchain.tools import InjectedState, InjectedStore, InjectedToolCallId, ToolRuntime
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import BaseTool, StructuredTool, ToolException
    from langgraph.errors import GraphInterrupt
    from langgraph.func import task
    from langgraph.types import Command, interrupt
except ModuleNotFoundError as exc:
    raise missing_package(exc, "langchain") from exc

Place = Callable[[ToolRuntime | None], Awaitable[Runtime | Session]]
"""Returns what runs the scripts of a call in a graph, or outside of one."""
ToolsOf = Callable[[ToolRuntime | None], ToolRegistry]
"""Returns the tools that these scripts may call."""
DECISIONS = ("approve", "edit", "reject")
_DECISION = "write {'type': 'approve'}, {'type': 'reject'} or {'type': 'edit', 'edited_action': {'name', 'args'}}"

_graph: ContextVar[_Graph | None] = ContextVar("toolcell_langchain_graph", default=None)


@dataclass(frozen=True, slots=True)
class _Graph:
    """The graph in which a script runs, and what its calls want to change there."""

    runtime: ToolRuntime
    updates: list[dict[str, Any]] = field(default_factory=list)


def code_execution_tool(
    runtime: Runtime | SyncRuntime | Session,
    *,
    tools: Iterable[Any] = (),
    name: str = CodeTool.NAME,
    description: str | None = None,
    limits: Limits | None = None,
    on_approval: OnApproval = "suspend",
) -> BaseTool:
    """Return a tool that runs Python in `runtime`, which is open while the agent runs.

    A `Runtime` is for `ainvoke` and `astream`, a `SyncRuntime` for `invoke` and `stream`. With a session in place of a
    Runtime, names and files stay from one script to the next. `tools`: LangChain tools, or tools in any way that a
    registry takes, which scripts may call besides the runtime's own. `on_approval`: "suspend" interrupts the graph for
    calls that need approval, "ask" asks the approval hooks of the registry, "deny" refuses.

    Raises:
        UsageError: an argument is wrong.
        RegistrationError: a tool's name is taken, or its definition is wrong.
    """
    cure = "write code_execution_tool(Runtime(...)), and open it"
    check_kind("runtime", runtime, Runtime, SyncRuntime, Session, cure=cure)
    registry = registry_with(home_of(runtime).registry, tools)

    async def place(graph: ToolRuntime | None) -> Runtime | Session:
        return runtime if isinstance(runtime, Session) else home_of(runtime)

    return GraphScripts(runtime, place, lambda graph: registry, limits, on_approval).as_tool(name, description)


def registry_with(registry: ToolRegistry, tools: Iterable[Any], ask: Iterable[str] = ()) -> ToolRegistry:
    """Return a registry with the tools of `registry` and those in `tools`. Calls of those in `ask` need approval."""
    if isinstance(tools, BaseTool):
        raise UsageError(f"tools= takes a list of tools, not one; write tools=[{tools.name}]")
    asked = set(ask)
    given = [_spec(each, each.name in asked) if isinstance(each, BaseTool) else each for each in tools]
    return tools_with(registry, given)


# LangChain's tools as ours.


def _spec(tool: BaseTool, needs_approval: bool) -> ToolSpec:
    schema = tool.tool_call_schema
    parameters = schema if isinstance(schema, dict) else schema.model_json_schema()

    async def call(args: dict[str, Any]) -> Any:
        graph, call_id = _graph.get(), current_context().call_id
        args, wants_id = _injected(tool, args, graph, call_id)
        config = graph.runtime.config if graph is not None else None
        try:
            callbacks = (config or {}).get("callbacks")
            output = await tool.arun(
                args, config=config, callbacks=callbacks, tool_call_id=call_id if wants_id else None
            )
        except GraphInterrupt as exc:
            cure = "let its calls need approval instead, with interrupt_on"
            raise ToolError(
                f"{tool.name} interrupts the graph, and a script cannot wait inside a tool; {cure}"
            ) from exc
        return _plain(output, tool, graph)

    shown = (ToolException, ValidationError)
    return framework_tool(
        tool.name, tool.description, parameters, call, shows=shown, source=tool, requires_approval=needs_approval
    )


def _injected(tool: BaseTool, args: dict[str, Any], graph: _Graph | None, call_id: str) -> tuple[dict[str, Any], bool]:
    """Return arguments with what the graph injects, as `ToolNode` does it, and whether the call's id is among that."""
    function = getattr(tool, "func", None) or getattr(tool, "coroutine", None) or tool._run
    found, wants_id = dict(args), False
    for name, hint in {**_hints(function), **_hints(tool.args_schema)}.items():
        marks = [hint, get_origin(hint), *get_args(hint)]
        kinds = {each if isinstance(each, type) else type(each) for each in marks}
        wants_id = wants_id or InjectedToolCallId in kinds
        if not kinds & {ToolRuntime, InjectedState, InjectedStore} or name == "return":
            continue
        if graph is None:
            raise ToolError(f"{tool.name} needs the state of a graph, and the script does not run in one")
        if ToolRuntime in kinds:
            found[name] = replace(graph.runtime, tool_call_id=call_id)
        elif InjectedStore in kinds:
            found[name] = graph.runtime.store
        else:
            key = next((each.field for each in marks if isinstance(each, InjectedState)), None)
            found[name] = graph.runtime.state if key is None else graph.runtime.state[key]
    return found, wants_id


def _hints(annotated: Any) -> dict[str, Any]:
    try:
        return get_type_hints(annotated, include_extras=True)
    except (NameError, TypeError):  # a partial, a schema as a dict, or annotations that nobody can read
        return {}


def _plain(output: Any, tool: BaseTool, graph: _Graph | None) -> Any:
    """Return what a tool gave as data, and note what it wants to change in the graph's state.

    Raises:
        ToolError: it answers with an error, or wants to leave the node.
    """
    match output:
        case ToolMessage():
            if output.status == "error":
                raise ToolError(output.text)
            return output.content
        case Command():
            leaves = output.goto or output.graph or output.resume
            if leaves or not isinstance(output.update, dict):
                raise ToolError(f"{tool.name} leads to another place of the graph, and a script cannot go there")
            update = dict(output.update)
            messages = [each for each in update.pop("messages", ()) if isinstance(each, ToolMessage)]
            if update and graph is not None:
                graph.updates.append(update)
            return _plain(messages[-1], tool, graph) if messages else None
        case [*items] if items and all(isinstance(each, ToolMessage | Command) for each in items):
            found = [given for given in (_plain(each, tool, graph) for each in items) if given is not None]
            return found[-1] if found else None
        case BaseModel():
            return output.model_dump(mode="json")
    return output


# Scripts.


@dataclass(frozen=True, slots=True)
class _Step:
    """A script to run, or one to carry on."""

    code: str = ""
    token: str = ""
    decisions: Mapping[str, ResumeDecision] = field(default_factory=dict)


Answer = dict[str, Any]
"""What came of a step, as plain data that a checkpointer can keep."""
_NOTHING: Answer = {"text": "", "ok": False, "images": (), "result": None, "updates": (), "token": "", "calls": ()}


class GraphScripts:
    """Runs what one tool is given, and interrupts the graph where a decision is needed."""

    def __init__(
        self,
        runtime: Any,
        place: Place,
        tools: ToolsOf,
        limits: Limits | None,
        on_approval: OnApproval,
        reviews: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        RunOptions(on_approval=on_approval)  # checks it
        self._given, self._place, self._tools, self._limits = runtime, place, tools, limits
        self._on_approval, self._reviews = on_approval, reviews

    def as_tool(self, name: str, description: str | None) -> BaseTool:
        """Return the tool. Its description has the tools that scripts may call anywhere."""

        def run(code: str, runtime: ToolRuntime = None) -> Any:
            if not isinstance(self._given, SyncRuntime):
                raise UsageError(f"{name} runs in a Runtime: use ainvoke or astream, or give it a SyncRuntime")
            steps = self._steps(code, name, runtime)
            try:
                step = next(steps)
                while True:
                    work = partial(self._given.call, step)
                    step = steps.send(task(work, name=name)().result() if self._may_wait(runtime) else work())
            except StopIteration as done:
                return done.value

        async def run_async(code: str, runtime: ToolRuntime = None) -> Any:
            if isinstance(self._given, SyncRuntime):
                raise UsageError(f"{name} runs in a SyncRuntime: use invoke or stream, or give it a Runtime")
            steps = self._steps(code, name, runtime)
            try:
                step = next(steps)
                while True:
                    step = steps.send(await (task(step, name=name)() if self._may_wait(runtime) else step()))
            except StopIteration as done:
                return done.value

        home = home_of(self._given)
        return StructuredTool.from_function(
            run,
            run_async,
            name=name,
            description=description or CodeTool(home).describe(self._tools(None).state.visible),
            args_schema=CodeArguments,
            infer_schema=False,
            response_format="content_and_artifact",
            handle_tool_error=True,
            metadata={"ls_code_input_language": "python"},
        )

    def _steps(
        self, code: str, name: str, graph: ToolRuntime | None
    ) -> Generator[Callable[[], Coroutine[Any, Any, Answer]], Answer, tuple[Any, Any]]:
        """Yield the steps of a script: each is answered before the next. Between them the graph is interrupted.

        Returns content and artifact of the tool's message.
        """
        step = _Step(code)
        while True:
            answer = yield partial(self._do, step, graph)
            if not answer["token"]:
                return _message_parts(answer, name, graph)
            given = interrupt(_request(answer["calls"], self._reviews))
            step = _Step(token=answer["token"], decisions=_decided(answer["calls"], given))

    def _may_wait(self, graph: ToolRuntime | None) -> bool:
        """Return True when a script may wait for a decision: then what it has done outlives the interrupt as a task."""
        if graph is None or self._on_approval != "suspend":
            return False
        tools = self._tools(graph).state.tools.values()
        return bool(CodeTool(home_of(self._given)).flows) or any(each.options.requires_approval for each in tools)

    async def _do(self, step: _Step, graph: ToolRuntime | None) -> Answer:
        held = _Graph(graph) if graph is not None else None
        before = _graph.set(held)
        try:
            place, registry = await self._place(graph), self._tools(graph)
            if step.token:
                result = await home_of(place).resume(step.token, step.decisions, tools=registry)
            elif step.code.strip():
                configurable = graph.config.get("configurable", {}) if graph is not None else {}
                result = await place.execute_code(
                    step.code,
                    tools=registry,
                    limits=self._limits,
                    context=RunContext(thread_id=str(configurable.get("thread_id", ""))),
                    on_approval="deny" if graph is None and self._on_approval == "suspend" else self._on_approval,
                )
            else:
                return _NOTHING | {"text": "there is no code to run"}
        except Misconfigured:
            raise
        except ToolcellError as exc:
            return _NOTHING | {"text": f"code execution failed: {exc}"}
        finally:
            _graph.reset(before)
        return _answer(result, held.updates if held is not None else [])


def _answer(result: ExecutionResult, updates: list[dict[str, Any]]) -> Answer:
    waits = result.suspension
    calls = [{"id": each.id, "name": each.tool, "args": dict(each.args)} for each in waits.calls] if waits else []
    images = [(base64.b64encode(each.data).decode("ascii"), each.media_type) for each in pictures(result)]
    return {
        "text": text_for_model(result),
        "ok": result.ok,
        "images": images,
        "result": None if waits else result.to_dict(),
        "updates": updates,
        "token": waits.to_json() if waits else "",
        "calls": calls,
    }


def _message_parts(answer: Answer, name: str, graph: ToolRuntime | None) -> tuple[Any, Any]:
    """Return content and artifact of the tool's message.

    Raises:
        ToolException: the script failed.
    """
    if not answer["ok"] and not answer["updates"]:
        raise ToolException(answer["text"])
    content: Any = answer["text"]
    if answer["images"]:
        images = [{"type": "image", "base64": data, "mime_type": kind} for data, kind in answer["images"]]
        content = [{"type": "text", "text": content}, *images]
    if not answer["updates"] or graph is None:
        return content, answer["result"]
    message = ToolMessage(
        content,
        name=name,
        tool_call_id=graph.tool_call_id,
        artifact=answer["result"],
        status="success" if answer["ok"] else "error",
    )
    return [*(Command(update=each) for each in answer["updates"]), message], None


def _request(calls: Sequence[Mapping[str, Any]], reviews: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request of `HumanInTheLoopMiddleware` for the calls that wait."""
    actions: list[dict[str, Any]] = []
    configs: dict[str, dict[str, Any]] = {}
    for name, args in ((call["name"], call["args"]) for call in calls):
        review = {"description": f"A script calls {name}, which needs approval."} | reviews.get(name, {})
        actions.append({"name": name, "args": args, "description": review["description"]})
        configs[name] = {"action_name": name, "allowed_decisions": list(review.get("allowed_decisions", DECISIONS))}
    return {"action_requests": actions, "review_configs": list(configs.values())}


def _decided(calls: Sequence[Mapping[str, Any]], answer: Any) -> dict[str, ResumeDecision]:
    """Return the decisions in an answer to `_request`.

    Raises:
        UsageError: it is none, or none for these calls.
    """
    given = answer.get("decisions") if isinstance(answer, Mapping) else None
    if not isinstance(given, list) or len(given) != len(calls):
        raise UsageError(
            f"resume with {{'decisions': [...]}}, one for each of {len(calls)} calls in order, not {brief(answer)}"
        )
    decisions: dict[str, ResumeDecision] = {}
    for call, decision in zip(calls, given, strict=True):
        match decision:
            case {"type": "approve"}:
                decisions[call["id"]] = Approve()
            case {"type": "reject"}:
                decisions[call["id"]] = Deny(decision.get("message") or f"the user rejected the call of {call['name']}")
            case {"type": "edit", "edited_action": {"name": name, "args": {} as args}} if name == call["name"]:
                decisions[call["id"]] = Edit(args)
            case _:
                raise UsageError(f"{brief(decision)} is not a decision about a call of {call['name']}; {_DECISION}")
    return decisions
