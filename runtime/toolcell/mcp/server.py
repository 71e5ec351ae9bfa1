"""`McpServer`: a runtime as an MCP server. Any transport of the SDK can serve it.

Read `_execute` first: a script runs as a stream of events, which become notifications. Its result is the answer.
A call that needs approval suspends the script; then the client asks its user, or the model gets the token.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self

import anyio
import mcp_types as types
from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.connection import allowed_log_levels
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from toolcell.calls.arguments import ArgumentChecker, InvalidArguments
from toolcell.calls.checker_process import find_problem
from toolcell.calls.events import TOOL_UPDATE
from toolcell.calls.result import without_bytes
from toolcell.calls.values import BadValue, bounded_json, copy_arguments, in_thread_if_large, list_names
from toolcell.config import check_decisions
from toolcell.control import PlanRows
from toolcell.errors import ToolcellError, UsageError
from toolcell.mcp import listing
from toolcell.mcp.answers import is_wrapper
from toolcell.mcp.content import (
    VALUE_BYTES,
    answer,
    decision,
    failed,
    file_blocks,
    output_schema,
    question,
    readable_only,
    structured_value,
    text_answer,
    too_much_to_decide,
)
from toolcell.results import Array, ExecutionResult, Outcome, Suspension, Table
from toolcell.run import CallStarted, LogPrinted, ProgressReported, RunFinished, RunOptions, RunStream
from toolcell.runtime import Runtime
from toolcell.sessions import Session
from toolcell.support.checks import check_count
from toolcell.support.exact_json import json_size, json_start, json_text
from toolcell.support.text import clean, one_line
from toolcell.tools import CodeTool, Event, EventBus, Origin, RunContext, ToolDefinition
from toolcell_bridge import __version__

Context = ServerRequestContext[Any, Any]
Answer = types.CallToolResult | types.InputRequiredResult

GONE = "toolcell.gone"
"""Key of an HTTP request's scope: an event that is set when its client is gone."""

MAX_MESSAGE_CHARS = 500
"""Most characters of one progress message."""

INSTRUCTIONS = (
    "execute_code runs Python in a sandbox. The tools of this server are called from there; search_tools and "
    "describe_tools find them."
)


class McpServer:
    """Serves a runtime that is open. Enter it with `async with` around the transport.

    `keeps_state`: the scripts of one MCP session share a sandbox. `exposes_tools`: clients see each tool as their own.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        keeps_state: bool = False,
        exposes_tools: bool = False,
        has_one_client: bool = False,
        shown_chars: int = listing.SHOWN_CHARS,
    ) -> None:
        """`has_one_client`: the transport carries one client, as stdio does. `shown_chars`: of tools in the description
        of execute_code, in the most detailed way that there is room for."""
        check_count("shown_chars", shown_chars, 0)
        self.runtime = runtime
        self._keeps_state, self._exposes_tools, self._has_one_client = keeps_state, exposes_tools, has_one_client
        self._shown_chars = shown_chars
        self._stack = AsyncExitStack()
        self._state: dict[str, Any] = {}
        self._opening = anyio.Lock()
        self.server: Server[Any] = Server(
            "toolcell",
            version=__version__,
            instructions=INSTRUCTIONS,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
        )
        self.server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, self._set_level)
        self._checkers = {
            name: ArgumentChecker(ToolDefinition(name, f"Arguments of {name} as a tool of MCP.", schema))
            for name, schema in (
                (CodeTool.NAME, listing.code_schema(runtime.limits, runtime.policy.check_types)),
                (listing.SEARCH_TOOL, listing.SEARCH_SCHEMA),
                (listing.DESCRIBE_TOOL, listing.DESCRIBE_SCHEMA),
                (listing.RESUME_TOOL, listing.RESUME_SCHEMA),
            )
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()

    # What clients ask for.

    async def _list_tools(self, ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        offers_resume = not _can_ask(ctx)
        found = listing.own_tools(self.runtime, self._has_session(ctx), offers_resume, self._shown_chars)
        if self._exposes_tools:
            rows = self.runtime.registry.snapshot().to_mcp(Origin.PLAN)
            plain = [row for row in rows if row["name"] not in listing.OWN_TOOLS]
            plain = [{**row, "outputSchema": self._output(row["name"])} for row in plain]
            found += [types.Tool.model_validate(row, by_name=False) for row in plain]
        return types.ListToolsResult(tools=found)

    async def _set_level(self, ctx: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        connection_of(ctx).state["level"] = params.level
        return types.EmptyResult()

    async def _call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> Answer:
        handlers: Mapping[str, Callable[[Context, dict[str, Any]], Awaitable[Answer]]] = {
            CodeTool.NAME: self._execute,
            listing.SEARCH_TOOL: self._search,
            listing.DESCRIBE_TOOL: self._describe,
            listing.RESUME_TOOL: self._resume,
        }
        name, given = params.name, params.arguments or {}
        handler = handlers.get(name)
        if handler is None and not (self._exposes_tools and name in self.runtime.registry):
            known = list_names([*handlers, *(self.runtime.registry.names(Origin.PLAN) if self._exposes_tools else ())])
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {name[:100]!r} to call here; there are {known}")
        try:
            if params.request_state is not None:
                return await self._decided(ctx, params.request_state, params.input_responses or {}, handler is None)
            if handler is None:
                return await self._while_heard(ctx, partial(self._plain_call, ctx, name, given))
            checked = await in_thread_if_large(given, partial(self._checkers[name].check, given))
            return await self._while_heard(ctx, partial(handler, ctx, checked.args))
        except InvalidArguments as exc:
            return failed(f"invalid arguments of {name}: {'; '.join(map(str, exc.problems[:5]))}")
        except ToolcellError as exc:
            return failed(str(exc))

    async def _while_heard(self, ctx: Context, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """Do what a client asked for. One that is gone gets no answer, and its work ends."""
        scope = getattr(ctx.request, "scope", None)
        gone: anyio.Event | None = scope.get(GONE) if scope is not None else None
        if gone is None:
            return await work()
        answers: list[Answer] = []
        async with anyio.create_task_group() as tasks:

            async def end_when_gone() -> None:
                await gone.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(end_when_gone)
            try:
                answers.append(await work())
            except ToolcellError as exc:  # which would leave the group as a group
                answers.append(failed(str(exc)))
            tasks.cancel_scope.cancel()
        return answers[0] if answers else failed("the client is gone")

    # Scripts.

    async def _execute(self, ctx: Context, args: dict[str, Any]) -> Answer:
        limits = self.runtime.limits.model_copy(update=args.get("limits") or {})
        session = await self._session(ctx)
        stream = (self.runtime if session is None else session).stream(
            args["code"],
            inputs=args.get("inputs"),
            limits=limits,
            on_approval="suspend",
            check_types=args.get("check_types"),
        )
        return await self._finish(ctx, await self._relay(ctx, stream))

    async def _resume(self, ctx: Context, args: dict[str, Any]) -> Answer:
        if _can_ask(ctx):  # a model must not answer in the place of a person who can be asked
            raise UsageError("this client asks its user about each call; resume is for clients that cannot")
        check_decisions(args["decisions"])
        content = {ident: {"decision": choice} for ident, choice in args["decisions"].items()}
        given = {ident: types.ElicitResult(action="accept", content=dict(each)) for ident, each in content.items()}
        return await self._decided(ctx, args["token"], given)

    async def _decided(self, ctx: Context, token: str, given: Mapping[str, Any], is_plain: bool = False) -> Answer:
        """Carry on with a client's decisions. `is_plain`: what waits is one call, the client's own, and no script."""
        decisions = {ident: decision(each) for ident, each in given.items()}
        if _can_ask(ctx):
            decisions = readable_only(decisions, token)
        result = await self._carry_on(ctx, token, decisions)
        if is_plain and result.ok and isinstance(result.value, list):
            rows = _rows(result)
            return await self._of_row(rows, rows[0]["tool"])
        return await self._finish(ctx, result)

    async def _carry_on(self, ctx: Context, token: str, decisions: Mapping[str, Any]) -> ExecutionResult:
        async def resume(options: RunOptions) -> ExecutionResult:
            return await self.runtime.resume(
                token,
                decisions,
                context=options.context,
                cancel=options.cancel,
                on_log=options.on_log,
                on_progress=options.on_progress,
            )

        return await self._relay(ctx, RunStream(resume, RunOptions(), self.runtime.runs.task_group))

    async def _finish(self, ctx: Context, result: ExecutionResult) -> Answer:
        """Return the answer, after every decision that the client's user can make."""
        while result.outcome is Outcome.SUSPENDED and (waiting := result.suspension) is not None and _can_ask(ctx):
            if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
                if (refusal := too_much_to_decide(waiting)) is not None:
                    return refusal
                asked: dict[str, Any] = {call.id: types.ElicitRequest(params=question(call)) for call in waiting.calls}
                return types.InputRequiredResult(input_requests=asked, request_state=waiting.to_json())
            result = await self._carry_on(ctx, waiting.to_json(), await self._ask(ctx, waiting))
        make = partial(answer, result, with_logs=self.runtime.policy.logs_to_model)
        return await in_thread_if_large([result.value, result.logs.text], make)

    async def _ask(self, ctx: Context, waiting: Suspension) -> dict[str, Any]:
        decisions = dict[str, Any]()
        for call in waiting.calls:
            form = question(call)
            given = await ctx.session.elicit_form(form.message, form.requested_schema, ctx.request_id)
            decisions[call.id] = decision(given)
        return readable_only(decisions, waiting.to_json())

    async def _relay(self, ctx: Context, stream: RunStream) -> ExecutionResult:
        """Tell the client what happens in a run, and return the result."""
        count = 0
        async with stream:
            async for event in stream:
                message = ""
                match event:
                    case LogPrinted(name, text):
                        await self._log(ctx, "info" if name == "stdout" else "warning", name, clean(text))
                    case ProgressReported(value):
                        message = (
                            value if isinstance(value, str) else json_start(without_bytes(value), MAX_MESSAGE_CHARS)
                        )
                    case CallStarted(tool=tool, parent_call_id=None):
                        message = f"calls {tool}"
                    case RunFinished(result):
                        return result
                if message:
                    count += 1
                    await self._report(ctx, count, message)
        raise UsageError("the run was ended before it had a result")

    async def _log(self, ctx: Context, level: types.LoggingLevel, stream: str, text: str) -> None:
        """Send a log notification, unless the client wants none of this level."""
        levels: list[str] = list(types.LoggingLevel.__args__)  # type: ignore[attr-defined]  # a Literal, lowest first
        least = connection_of(ctx).state.get("level", "debug")
        if level not in allowed_log_levels(ctx.protocol_version, ctx.meta) or levels.index(level) < levels.index(least):
            return
        params = types.LoggingMessageNotificationParams(level=level, logger=stream, data=text)
        notification = types.LoggingMessageNotification(params=params)
        await ctx.session.send_notification(notification, related_request_id=ctx.request_id)

    # Sessions.

    def _has_session(self, ctx: Context) -> bool:
        return self._keeps_state and (self._has_one_client or ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS)

    async def _session(self, ctx: Context) -> Session | None:
        """Return the session of a client, if it has one. It ends with the client's own."""
        if not self._has_session(ctx):
            return None
        connection = connection_of(ctx)
        state, stack = connection.state, connection.exit_stack
        if self._has_one_client:
            state, stack = self._state, self._stack
        async with self._opening:
            if "session" not in state:
                session = self.runtime.session()
                await session.open()
                stack.push_async_callback(session.close)
                state["session"] = session
        found: Session = state["session"]
        return found

    # The catalogue.

    async def _search(self, ctx: Context, args: dict[str, Any]) -> Answer:
        registry = self.runtime.registry.snapshot()
        found = await registry.search_tools(
            args["query"], limit=args.get("limit", listing.SEARCH_SCHEMA["properties"]["limit"]["default"])
        )
        if not found:
            return text_answer(f"none of {len(registry.names(Origin.CODE))} tools fits; use other words")
        return text_answer(
            registry.describe_tools([each.name for each in found], detail=args.get("detail", "signatures"))
        )

    async def _describe(self, ctx: Context, args: dict[str, Any]) -> Answer:
        registry = self.runtime.registry.snapshot()
        return text_answer(registry.describe_tools(args["names"], detail=args.get("detail", "full")))

    # Tools as the client's own.

    async def _plain_call(self, ctx: Context, name: str, args: dict[str, Any]) -> Answer:
        """Make one call as the only step of a plan: with the rules, records and approvals that calls have."""
        try:
            copied = await in_thread_if_large(args, partial(copy_arguments, args))
        except BadValue as exc:
            raise InvalidArguments(name, [exc.problem], args) from exc
        steps = [{"tool": name, "args": copied.args}]
        made, context = list[PlanRows](), RunContext(events=EventBus())
        async with anyio.create_task_group() as tasks:
            with context.events.stream() as events:
                tasks.start_soon(self._report_updates, ctx, events)
                try:
                    made.append(await self.runtime.execute_plan(steps, on_approval="suspend", context=context))
                except ToolcellError as exc:  # which would leave the group as a group
                    problem = failed(str(exc))
        if not made:
            return problem
        rows = made[0]
        while (waiting := rows.suspension) is not None and _can_ask(ctx):
            if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
                return await self._finish(ctx, _suspended(rows, waiting))
            rows = _rows(await self.runtime.resume(waiting, await self._ask(ctx, waiting)))
        if waiting is not None:
            return answer(_suspended(rows, waiting))
        return await self._of_row(rows, name)

    async def _report_updates(self, ctx: Context, events: AsyncIterable[Event]) -> None:
        """Tell the client what tools report, until the stream is closed."""
        count = 0
        async for event in events:
            if event.type != TOOL_UPDATE:
                continue
            update = event.update or {}
            said = update.get("text") or update.get("details")
            count += 1
            await self._report(
                ctx, count, said if isinstance(said, str) else json_start(without_bytes(said), MAX_MESSAGE_CHARS)
            )

    async def _report(self, ctx: Context, count: int, message: str) -> None:
        shown = one_line(clean(message[: 2 * MAX_MESSAGE_CHARS]), MAX_MESSAGE_CHARS)
        await ctx.session.report_progress(count, message=shown)

    async def _of_row(self, rows: PlanRows, name: str) -> types.CallToolResult:
        """Return what came of a plan's only step, a call of this tool, with the files that it returned."""
        schema = self._output(name)
        made = await in_thread_if_large(rows[0].get("result"), partial(_answer_of_row, rows, schema))
        if schema is None or made.is_error:
            return made
        tool = self.runtime.registry.registered(name)
        is_foreign = tool is None or tool.spec.is_foreign
        if (problem := await find_problem(schema, made.structured_content, is_foreign=is_foreign)) is not None:
            return failed(f"its result is not of the type that it declares: {problem}")
        return made

    def _output(self, name: str) -> dict[str, Any] | None:
        tool = self.runtime.registry.registered(name)
        return None if tool is None else output_schema(name, tool.options.returns)


def _rows(result: ExecutionResult) -> PlanRows:
    rows = PlanRows(result.value, result.run_id, result.journal_id)
    rows.suspension, rows.files = result.suspension, result.files
    return rows


def _answer_of_row(rows: PlanRows, schema: dict[str, Any] | None) -> types.CallToolResult:
    """Return the answer to the only step of a plan. `schema`: what its tool declares, which is not checked here."""
    row = rows[0]
    if row["status"] != "ok":
        return failed(str(row.get("error", row["status"])))
    given = row.get("result")
    value = without_bytes(given)
    if isinstance(given, bytes) and rows.files:  # a file is its own value, and comes as such
        value = "\n".join(f"({file.name}, {file.size} bytes)" for file in rows.files)
    cut = f" (cut: it has more than {VALUE_BYTES} characters)"
    text = text_answer(value[:VALUE_BYTES] if isinstance(value, str) else bounded_json(value, VALUE_BYTES, cut))
    content = [*text.content, *file_blocks(rows.run_id, rows.files, given)]
    if schema is None:
        data = structured_value(given) if isinstance(given, Array | Table) else None
        structured = json.loads(json_text(data)) if isinstance(data, dict) else None
        return types.CallToolResult(content=content, structured_content=structured)
    if (size := json_size(value, VALUE_BYTES)) > VALUE_BYTES:
        return failed(f"its result has {size} bytes of JSON, and an answer holds {VALUE_BYTES}; use {CodeTool.NAME}")
    plain = json.loads(json_text(value))
    structured = {"result": plain} if is_wrapper(schema, row["tool"]) else plain
    return types.CallToolResult(content=content, structured_content=structured)


def _suspended(rows: PlanRows, waiting: Suspension) -> ExecutionResult:
    return ExecutionResult(rows.run_id, Outcome.SUSPENDED, suspension=waiting, journal_id=rows.journal_id)


def connection_of(ctx: Context) -> Any:
    """Return the connection of a request. The SDK has no public name for it in this kind of context."""
    return ctx.session._connection


def _can_ask(ctx: Context) -> bool:
    """Return True when the client can ask its user in a form."""
    capabilities = ctx.session.client_capabilities
    asks = capabilities.elicitation if capabilities is not None else None
    return asks is not None and (asks.form is not None or asks.url is None)
