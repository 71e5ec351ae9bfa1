"""Servers that send without end, ask without end or read nothing: what they can take from the host and its other calls."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import pytest
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter

from hostile.loop_silence import watched
from rows import each_row
from toolcell import Limits, Runtime
from toolcell.calls.result import Status, ToolResult
from toolcell.mcp import client, http_bounds, pace, requests, structure, traffic, transports
from toolcell.mcp.broken_tools import ToolPages
from toolcell.support import daemon_threads
from toolcell.tools import ToolRegistry

from .conftest import a_tool, raw

pytestmark = pytest.mark.anyio

SILENT_S = 0.05
"""A wrong item that is described takes microseconds: all of them would take a second."""
HANGS_S = 10.0
"""What ends at its time takes less; what does not, hangs."""


async def called(timeout_s: float = 60.0, **script: Any) -> tuple[ToolResult, float]:
    """Call the tool of a raw server; return the result, and the seconds that it took."""
    registry = ToolRegistry()
    options = {name: script.pop(name) for name in ("elicitation", "sampling") if name in script}
    await registry.add_mcp_server("l", command=raw(pages=[[a_tool()]], **script), timeout_s=timeout_s, **options)
    began = time.monotonic()
    result = await registry.dispatch("l.t", {})
    took_s = time.monotonic() - began
    await registry.close()
    return result, took_s


# Floods.


@pytest.mark.parametrize("flood", ["blanks", "pings"])
async def test_what_answers_no_request_is_read_slowly(flood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "BURST", 5)
    monkeypatch.setattr(pace, "MESSAGES_PER_S", 50.0)

    result, took_s = await called(**{flood: 30})

    assert result.text == "done" and took_s >= 24 / 50


async def test_what_is_long_and_answers_no_request_counts_more() -> None:
    server = traffic.Traffic("x", ToolPages())
    long = SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=7, result={}))
    await server.admit(long, 8 << 20)

    assert server._pace.pause_after(anyio.current_time(), 0) == 0
    assert server._pace.pause_after(anyio.current_time(), pace.BURST - 500) > 0  # it counted as more than 500


@pytest.mark.parametrize("script", [{"deaf": 8_000}, {"asks": 3_000, "elicitation": print, "answer": {}}])
async def test_a_server_whose_requests_cannot_be_answered_is_ended(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "ANSWERED_S", 0.05)
    monkeypatch.setattr(pace, "BURST", 10_000)
    result, _ = await called(**script)

    assert result.error is not None and result.error.code == "unavailable"
    assert "no answer that it has read" in result.message


async def test_requests_that_are_answered_or_cancelled_end_no_connection() -> None:
    server = traffic.Traffic("x", ToolPages())
    for number in range(100):
        ident: Any = number % 3
        await server.admit(SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=ident, method="ping")))
        if number % 2:
            server.note_written(SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=ident, result={})))
        else:
            cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": ident}}
            message = await transports._message(json.dumps(cancelled).encode())
            await server.admit(message)
    assert not server._open


async def test_a_call_ends_at_its_time_though_the_server_reads_nothing() -> None:
    registry = ToolRegistry()
    await registry.add_mcp_server("l", command=raw(pages=[[a_tool()]], deaf=0), timeout_s=0.3)
    first = await registry.dispatch("l.t", {})  # after which it reads nothing
    with anyio.fail_after(HANGS_S):
        second = await registry.dispatch("l.t", {"a": "x" * 1_000_000})
    assert first.status == second.status == Status.TIMEOUT
    assert first.message == second.message == "timed out after 0.3 s"  # not by what else bounds a request
    await registry.close()


async def test_a_run_ends_at_its_time_though_a_server_reads_nothing() -> None:
    registry = ToolRegistry()
    await registry.add_mcp_server("l", command=raw(pages=[[a_tool()]], deaf=0))
    async with Runtime(registry) as runtime:
        calls = "call_tools_parallel([('l.t', {}), ('l.t', {'a': 'x' * 1_000_000}), ('l.t', {'a': 'x' * 1_000_000})])"
        with anyio.fail_after(HANGS_S):
            result = await runtime.execute_code(calls, limits=Limits(wall_s=0.5))
    assert result.outcome == "timeout"
    await registry.close()


async def test_more_messages_than_can_wait_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MAX_WAITING", 3)
    problems: list[str] = []
    outbox = traffic.Outbox(problems.append, transports._packed)
    ping = SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=1, method="ping"))
    for _ in range(3):
        await outbox.send(ping)
    with pytest.raises(anyio.BrokenResourceError):
        await outbox.send(ping)
    with pytest.raises(anyio.ClosedResourceError):
        await outbox.send(ping)
    assert problems == ["it does not read what it is sent: 3 messages wait"]
    assert len([each async for each in outbox.messages()]) == 3


async def test_a_message_that_is_not_taken_ends_an_http_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "WRITE_S", 0.05)
    problems: list[str] = []
    told = anyio.Event()

    def give_up(problem: str) -> None:
        problems.append(problem)
        told.set()

    never, read = anyio.create_memory_object_stream[Any](0)
    write, taken = anyio.create_memory_object_stream[Any](0)
    items: Any = ((item, 0) async for item in read)
    of_server = traffic.Traffic("x", ToolPages())
    with never, read, write, taken:
        async with transports.bounded(items, lambda each, _: write.send(each), of_server, give_up) as (_, outbox):
            with anyio.fail_after(60):
                await outbox.send(SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=1, method="ping")))
                await told.wait()
    assert problems == ["it has not read what it was sent for 0.05 s"]


async def test_a_list_that_takes_long_to_read_is_read_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [client.relist_pause_s(took_s) for took_s in (0.0, 0.01, 1.0, 100.0)] == [0.2, 0.2, 9.0, 60.0]
    registry, begun = ToolRegistry(), list[float]()
    of_server = await registry.add_mcp_server("l", command=raw(pages=[[a_tool()]]))

    async def slow(*_: Any) -> None:
        begun.append(anyio.current_time())
        of_server._changed.set()  # the server says that it changed again
        await anyio.sleep(0.05)

    monkeypatch.setattr(of_server._catalogue, "refresh", slow)
    of_server._changed.set()
    with anyio.fail_after(60):
        while len(begun) < 2:
            await anyio.sleep(0.01)
    await registry.close()
    assert begun[1] - begun[0] >= 10 * 0.05


# Questions.


@each_row("kind", ["elicitation", "sampling"])
async def test_questions_of_a_server_take_no_thread_of_others_and_end_with_their_call(kind: str) -> None:
    method = {"elicitation": "elicitation/create", "sampling": "sampling/createMessage"}[kind]
    asked, over = [0], threading.Event()

    def never(*args: Any) -> None:
        asked[0] += 1
        over.wait(60)

    result, took_s = await called(0.5, asks=60, **{"with": method, kind: never})
    assert result.status == Status.TIMEOUT and took_s < 10
    with anyio.fail_after(60):
        others = await daemon_threads.run_sync(lambda: "others have their threads")
    over.set()
    assert asked == [1] and others


async def test_a_call_may_ask_some_questions_one_after_the_other() -> None:
    open_now, most = [0], [0]

    async def answer(message: str, schema: Any) -> dict[str, Any]:
        open_now[0] += 1
        most[0] = max(most[0], open_now[0])
        await anyio.lowlevel.checkpoint()
        open_now[0] -= 1
        return {"name": "Ada"}

    result, _ = await called(asks=14, elicitation=answer)
    assert result.error is None, result.message
    said = result.value["said"]
    answered = [each for each in said if "result" in each]
    assert most == [1] and len(said) == 14
    assert requests.MAX_OPEN_QUESTIONS <= len(answered) <= requests.MAX_QUESTIONS_OF_CALL
    assert all("the question was not asked: " in each["error"]["message"] for each in said if "error" in each)


@pytest.mark.quick
async def test_there_are_no_questions_before_or_after_a_call_and_not_many_in_one() -> None:
    questions = requests.Questions()
    for _ in range(2):
        with pytest.raises(requests.Refused, match="no call"):
            await questions.ask(print)
        with questions.during_call():
            for _ in range(requests.MAX_QUESTIONS_OF_CALL):
                assert await questions.ask(lambda: 1) == 1
            with pytest.raises(requests.Refused, match="has"):
                await questions.ask(lambda: 1)
        with questions.during_call():
            """What this one does not ask, the next may not ask besides its own."""


async def test_threads_that_nobody_waits_for_any_more_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_OPEN_QUESTIONS", 2)
    questions, over, began = requests.Questions(), threading.Event(), threading.Semaphore(0)

    def never() -> None:
        began.release()
        over.wait(60)

    async def ask_in_vain() -> None:
        with pytest.raises(requests.Refused, match="ended"):
            await questions.ask(never)

    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            with questions.during_call():
                tasks.start_soon(ask_in_vain)
                await daemon_threads.run_sync(began.acquire)
    with questions.during_call(), pytest.raises(requests.Refused, match="2 questions"):
        await questions.ask(never)
    over.set()


async def test_whoever_fills_the_threads_of_one_purpose_keeps_no_others_from_theirs() -> None:
    limiter = daemon_threads.limiter_of("a store that hangs")
    limiter.total_tokens = 1
    over, began = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        over.wait(60)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: daemon_threads.run_sync(hang, limiter=limiter))
        await daemon_threads.run_sync(began.wait)
        with anyio.fail_after(60):
            assert await daemon_threads.run_sync(threading.get_ident)
        over.set()
    purposes = [structure.at_most, pace.logger.name.upper, traffic.Traffic("x", ToolPages()).note_sending]
    assert [daemon_threads._module_of(each) for each in purposes] == [
        "toolcell.mcp.structure",
        "",
        "toolcell.mcp.traffic",
    ]


async def test_a_large_answer_that_was_in_time_counts_though_its_turn_comes_late() -> None:
    registry, is_late = ToolRegistry(), threading.Event()
    await registry.add_mcp_server("l", command=raw(pages=[[a_tool()]], structure=5_000), timeout_s=1.0)

    async def hold() -> None:
        await daemon_threads.run_large(is_late.wait, 10)

    async def late() -> None:
        await anyio.sleep(1.5)
        is_late.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(late)
        result = await registry.execute("l.t", {})
    await registry.close()

    assert result.ok and len(result.value["lists"]) == 5_000


# Structure.


@each_row("id_last", [False, True])
async def test_an_answer_of_very_many_elements_fails_its_call_before_it_is_parsed(id_last: bool) -> None:
    result, _ = await called(structure=300_000, id_last=id_last)

    assert f"more than {structure.MAX_ELEMENTS} lists, dicts" in result.message
    assert result.error is not None and result.error.code != "unavailable"


async def test_the_structure_of_an_answer_is_work_for_the_host() -> None:
    registry = ToolRegistry()
    await registry.add_mcp_server("l", command=raw(pages=[[a_tool()]], structure=50_000))
    async with Runtime(registry) as runtime:
        few = await runtime.execute_code(
            "for number in range(3):\n    call_tool('l.t')", limits=Limits(host_work=5 << 20)
        )
        one = await runtime.execute_code("len(call_tool('l.t')['lists'])")
    await registry.close()

    assert (one.outcome, one.value) == ("ok", 50_000) and one.usage.host_work > 50_000 * 64
    assert few.outcome == "host_work_limit"


async def test_so_is_what_stands_as_json_in_its_texts() -> None:
    lists = {"type": "text", "text": json.dumps([[]] * 15_000, separators=(",", ":"))}
    registry = ToolRegistry()
    await registry.add_mcp_server("l", command=raw(pages=[[a_tool()]], answer={"content": [lists, lists]}))
    async with Runtime(registry) as runtime:
        result = await runtime.execute_code("len(call_tool('l.t')[1])")
    await registry.close()

    assert (result.outcome, result.value) == ("ok", 15_000) and result.usage.host_work > 30_000 * 64


@each_row(
    ("text", "count"),
    [
        ("[]", 1),
        (json.dumps({"a": [1, {"b": 2}], "c": "[[[,,,{{"}), 6),
        (json.dumps({'a"[': '\\"[,\\\\', "b": "\\"}), 4),
        (json.dumps(["[,]" * 50_000, "x"]), 2),
    ],
)
async def test_structure_is_counted_outside_of_strings(text: str, count: int) -> None:
    assert await structure.elements(text.encode(), most=0) == min(count, await structure.elements(text.encode(), 0))
    assert await structure.elements(text.encode(), most=count) == count
    assert structure.at_most(text.encode()) >= count


async def test_messages_over_http_are_handed_on_past_the_sdk() -> None:
    many = json.dumps({"jsonrpc": "2.0", "id": 7, "result": {"a": [[]] * (structure.MAX_ELEMENTS + 1)}}).encode()
    events = [
        b"event: message\ndata: {}\n\n",
        b"data: " + many[:1000],
        many[1000:] + b"\n",
        b"\ndata: 1\r\n\r\nda",
        b"ta",
    ]
    for content, kind in (([many[:10], many[10:]], "application/json"), (events, "text/event-stream; charset=utf-8")):

        async def chunks(content: list[bytes] = content) -> AsyncIterator[bytes]:
            for chunk in content:
                yield chunk

        def answer(request: httpx2.Request, kind: str = kind, content: Any = chunks) -> httpx2.Response:
            return httpx2.Response(200, content=content(), headers={"content-type": kind})

        taken: list[tuple[Any, bytes]] = []

        async def take(ident: Any, data: bytes, taken: list[tuple[Any, bytes]] = taken) -> SessionMessage | Exception:
            taken.append((ident, data))
            return SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=7, result={})) if data == many else ValueError()

        transport = http_bounds.BoundedTransport(httpx2.MockTransport(answer), "x", print, take)
        async with httpx2.AsyncClient(transport=transport) as http:
            body = (await http.post("http://x", json={"jsonrpc": "2.0", "id": 7, "method": "tools/call"})).text
            await http.get("http://x")
        whole = [many] if kind == "application/json" else [b"{}", many, b"1"]
        assert taken == [(ident, each) for ident in (7, None) for each in whole]
        assert "[]" not in body and body.count('"message": "toolcell/') == 1


async def test_a_stream_of_events_that_ends_at_once_is_not_asked_for_without_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_bounds, "REOPENED_S", 0.1)

    async def take(ident: Any, data: bytes) -> None:
        pass

    answered = httpx2.MockTransport(lambda request: httpx2.Response(200))
    transport = http_bounds.BoundedTransport(answered, "x", print, take)
    began = time.monotonic()
    async with httpx2.AsyncClient(transport=transport) as http:
        for _ in range(4):
            await http.get("http://x")
    assert time.monotonic() - began >= 0.3


def test_lists_whose_items_become_objects_are_cut() -> None:
    result: dict[str, Any] = {"content": [{}] * 50_000, "tools": [{}] * 50_000, "other": [1] * 50_000}
    structure.cut_lists(result)
    assert [len(each) for each in result.values()] == [structure.MAX_BLOCKS, structure.MAX_TOOLS + 1, 50_000]


WRONG = [0] * 40_000
"""Items that are not what a model of the SDK wants. An error is made for each, and for each form that it might have."""
WRONG_ANSWERS: dict[str, Any] = {
    "a list of choices": {"content": [{"type": "text", "text": "x", "annotations": {"audience": WRONG}}]},
    "a list of objects": {"content": [{"type": "resource_link", "uri": "a:b", "name": "n", "icons": WRONG}]},
    "what a server says of itself": {"content": [], "_meta": {"io.modelcontextprotocol/serverInfo": {"icons": WRONG}}},
    "a request named as what no model checks": {
        "resultType": "input_required",
        "inputRequests": {"data": {"method": "sampling/createMessage", "params": {"messages": WRONG}}},
    },
    "an object of requests": {"resultType": "input_required", "inputRequests": {str(n): 0 for n in range(10_000)}},
}


@each_row("kind", WRONG_ANSWERS)
async def test_items_that_are_all_wrong_are_counted_before_a_model_checks_them(kind: str) -> None:
    registry = ToolRegistry()
    await registry.add_mcp_server("l", command=raw(pages=[[a_tool()]], answer=WRONG_ANSWERS[kind]))
    seen = await watched(registry.dispatch("l.t", {}))
    await registry.close()

    assert structure.TOO_MANY_CHECKED in seen.outcome.message and seen.silent_s < SILENT_S


@each_row("asked", [("sampling/createMessage", "messages"), ("notifications/message", "level")])
def test_so_are_those_of_questions_and_notifications(asked: tuple[str, str]) -> None:
    for name, refusal in ((asked[1], structure.TOO_MANY_CHECKED), ("_meta", "more than 16384 values")):
        value = WRONG[:10_000] if name == asked[1] else {"x": WRONG}
        line = json.dumps({"jsonrpc": "2.0", "id": 1, "method": asked[0], "params": {name: value}})
        item = transports._mended(SessionMessage(jsonrpc_message_adapter.validate_json(line)))

        assert isinstance(item, ValueError) and refusal in str(item)


@each_row("count", [9_000, 140_000])
@each_row(
    "form",
    ['{{"jsonrpc": "2.0", "id": 1, {}}}', '{{"id": 1, "jsonrpc": "2.0", {}}}', '{{{}, "jsonrpc": "2.0", "id": 1}}'],
)
async def test_a_question_that_is_not_read_is_no_answer_to_the_call_with_its_id(form: str, count: int) -> None:
    """Both sides count their requests from one."""
    members = f'"params": {[1] * count}'
    asked = await transports._message(form.format(f'"method": "sampling/createMessage", {members}').encode())
    answered = await transports._message(form.format(members).encode())

    assert isinstance(asked, ValueError)
    assert count < structure.MAX_ELEMENTS or (isinstance(asked, transports.Unread) and asked.ident == 1)
    assert isinstance(answered, SessionMessage) and isinstance(answered.message, JSONRPCError)


async def test_a_question_that_is_too_long_to_be_read_is_answered_with_why() -> None:
    question = {"messages": WRONG[:6_000], "maxTokens": 1}
    result, _ = await called(asks=1, question=question, sampling=str, **{"with": "sampling/createMessage"})

    assert structure.TOO_MANY_CHECKED in result.value["said"][0]["error"]["message"]


@each_row("text", [rb"\\" * 2_000_000 + rb"\ud83d", rb"\ud83d" * 600_000, b"\xff" * 4_000_000])
async def test_half_characters_and_backslashes_are_looked_at_in_short_steps(text: bytes) -> None:
    seen = await watched(structure.with_whole_characters(b'"' + text + b'"'))
    assert seen.silent_s < SILENT_S and len(seen.outcome) < len(text) + structure.MAX_GROWN_BYTES


PARTS = {
    "links": {"type": "resource_link", "uri": "http://x/" + "a" * 7_000, "name": "n"},
    "files": {"type": "resource", "resource": {"uri": "http://x/" + "%41" * 2_000, "blob": "AAAA"}},
}


@each_row("kind", PARTS)
async def test_the_parts_of_an_answer_are_read_while_others_go_on(kind: str) -> None:
    registry = ToolRegistry()
    await registry.add_mcp_server("l", command=raw(pages=[[a_tool()]], part=PARTS[kind]))
    seen = [await watched(registry.dispatch("l.t", {})) for _ in range(3)]  # a neighbour may have taken our caches
    await registry.close()

    assert len(seen[0].outcome.value) == 1000 and min(each.silent_s for each in seen) < SILENT_S


async def test_long_numbers_count_and_long_digits_in_texts_do_not() -> None:
    line = '{{"jsonrpc": "2.0", "id": 1, "result": {{"content": [], "structuredContent": {{"a": [{}]}}}}}}'
    few, many = ",".join(["9" * 4_000] * 10), ",".join(["9" * 4_000] * 20)
    found = [await transports._message(line.format(each).encode()) for each in (few, f'"{many}"', many)]

    assert [type(each.message) for each in found if isinstance(each, SessionMessage)] == [
        JSONRPCResponse, JSONRPCResponse, JSONRPCError,
    ]  # fmt: skip


async def test_a_tool_whose_items_are_all_wrong_is_left_out_and_the_others_stay() -> None:
    pages = ToolPages()
    pages.version = "2025-11-25"
    page = {"tools": [a_tool("a"), a_tool("b", icons=WRONG), a_tool("c", icons=WRONG[:1_000])], "_meta": {"x": WRONG}}
    seen = await watched(pages.mend(page))

    assert [each["name"] for each in page["tools"]] == ["a"] and seen.silent_s < SILENT_S
    assert pages.take_broken() == {
        "b": "more than 32768 items of it would have to be checked one by one",
        "c": "it has 1000 errors",
    }


async def test_what_no_model_checks_may_be_long() -> None:
    free = {"structuredContent": {"rows": WRONG}, "_meta": {"x": WRONG}}
    assert not structure.has_too_many({"content": [{"type": "text", "text": "x"}] * structure.MAX_BLOCKS, **free})


async def test_a_server_with_many_tools_leaves_a_registry_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, steps, unregister = ToolRegistry(), list[int](), ToolRegistry.unregister

    def counted(self: ToolRegistry, *names: str) -> bool:
        steps.append(len(names))
        return unregister(self, *names)

    monkeypatch.setattr(ToolRegistry, "unregister", counted)
    await registry.add_mcp_server("l", command=raw(many=300))
    await registry.close()

    assert steps[-1] == 300 and sum(steps) == 300 and not registry.names()


FORM = {
    "message": "How many?",
    "requestedSchema": {
        "type": "object",
        "properties": {"count": {"type": "integer", "minimum": 1}, "wrap": {"type": "boolean", "default": False}},
        "required": ["count"],
    },
}


async def test_answers_fit_their_question_and_pages_to_open_are_handed_over_as_such() -> None:
    heard: list[tuple[str, Any]] = []
    page = "https://login.example/x?state=1"

    async def said(question: dict[str, Any], answer: Any) -> Any:
        def elicit(message: str, schema: Any) -> Any:
            heard.append((message, schema))
            return answer

        result, _ = await called(asks=1, question=question, elicitation=elicit)
        return result.value["said"][0]

    assert (await said(FORM, {"count": 2}))["result"]["content"] == {"count": 2, "wrap": False}
    for wrong in ({"count": 0}, {"count": "two"}):
        assert "does not fit the schema at count" in (await said(FORM, wrong))["error"]["message"]
    assert "does not fit the schema" in (await said(FORM, {}))["error"]["message"]
    open_page = {"mode": "url", "message": "Log in", "url": page, "elicitationId": "e1"}
    assert (await said(open_page, {}))["result"] == {"action": "accept"}
    assert (await said(open_page, None))["result"] == {"action": "decline"}
    asked = len(heard)
    refused = await said(open_page | {"url": "javascript:alert(1)"}, {})
    assert "http or https URL" in refused["error"]["message"]
    assert heard[-1] == ("Log in", {"url": page}) and len(heard) == asked
