"""Streams and answers as OpenAI, vLLM, llama.cpp, Ollama and the compatible ends of others send them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from agents.api_server import NOTHING, Reply, call_piece, chunk, completion, heard_by, message, ok, serving, tool_use
from agents.test_providers import provider, sleep
from rows import each_row
from toolcell import ToolRegistry
from toolcell.agents import Agent, RetryPolicy, ToolLoopConfig, run_tool_loop, user
from toolcell.agents.loop_result import ToolLoopResult
from toolcell.agents.providers.anthropic import to_anthropic
from toolcell.agents.providers.openai import to_openai
from toolcell.agents.providers.provider import ModelResponse
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.arguments import ToolCall
from toolcell.calls.result import TokenUsage
from toolcell.tools import Budget

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("sdks")]


def files(made: list[tuple[str, Any]]) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    def read_file(path: str) -> str:
        """Read a file from the disk."""
        made.append(("read_file", path))
        return f"text of {path}"

    @registry.tool
    def write_file(path: str) -> str:
        """Write a file to the disk."""
        made.append(("write_file", path))
        return "written"

    @registry.tool
    def ping() -> str:
        """Ask whether anybody is there."""
        made.append(("ping", None))
        return "pong"

    return registry


DONE = [chunk({"content": "done"}), chunk({}, finish="stop"), "[DONE]"]


async def talk(
    *replies: Reply, kind: str = "openai", on_text: Callable[[str], object] | None = None, **config: Any
) -> tuple[ToolLoopResult, list[Any], list[Any]]:
    """Run an agent's loop against a server with these replies. Returns result, calls made and requests."""
    made: list[tuple[str, Any]] = []
    with serving(*replies) as server:
        async with provider(kind, server) as model:
            config |= {"retry": RetryPolicy(attempts=2, sleep=sleep), "stream": on_text is not None}
            settings = ToolLoopConfig(provider=model, model="m", tools=files(made), **config)
            result = await run_tool_loop(settings, [user("go")], context=heard_by(on_text))
    return result, made, server.requests


def piece(**fields: Any) -> dict[str, Any]:
    return {"tool_calls": [fields]}


READ, WRITE = '{"path": "a"}', '{"path": "b"}'
BOTH = [("read_file", "a"), ("write_file", "b")]
SAME = [("read_file", "a"), ("read_file", "b")]

STREAMS: dict[str, tuple[list[dict[str, Any]], list[tuple[str, Any]]]] = {
    "OpenAI: in pieces, each call at its index": (
        [
            call_piece(0, "", "c1", "read_file"), call_piece(0, '{"pa'), call_piece(0, 'th": "a"}'),
            call_piece(1, "", "c2", "write_file"), call_piece(1, WRITE),
        ],
        BOTH,
    ),
    "OpenAI: interleaved by index": (
        [
            call_piece(0, "", "c1", "read_file"), call_piece(1, "", "c2", "write_file"), call_piece(0, '{"path"'),
            call_piece(1, '{"path"'), call_piece(0, ': "a"}'), call_piece(1, ': "b"}'),
        ],
        BOTH,
    ),
    "Ollama, gateways of Gemini: two whole calls at index 0": ([call_piece(0, READ, "c1", "read_file"), call_piece(0, WRITE, "c2", "write_file")], BOTH),
    "vLLM, SGLang: two calls in pieces at index 0": (
        [call_piece(0, '{"path"', "c1", "read_file"), call_piece(0, ': "a"}'),
         call_piece(0, '{"path"', "c2", "read_file"), call_piece(0, ': "b"}')],
        SAME,
    ),
    "Gemini's compatible end, Ollama before 0.4.7: no index": (
        [piece(id="c1", function={"name": "read_file", "arguments": READ}),
         piece(id="c2", function={"name": "write_file", "arguments": WRITE})],
        BOTH,
    ),
    "Gemini's compatible end: in pieces without an index": (
        [piece(index=None, id="c1", function={"name": "read_file", "arguments": ""}),
         piece(index=None, function={"arguments": '{"path"'}), piece(index=None, function={"arguments": ': "a"}'}),
         piece(index=None, id="c2", function={"name": "write_file", "arguments": WRITE})],
        BOTH,
    ),
    "vLLM: no ids": ([call_piece(0, READ, name="read_file"), call_piece(0, WRITE, name="write_file")], BOTH),
    "gateways: neither ids nor index, of one tool": (
        [piece(function={"name": "read_file", "arguments": READ}),
         piece(function={"name": "read_file", "arguments": WRITE})],
        SAME,
    ),
    "gateways: two calls without arguments, ids and index": (
        [piece(function={"name": "ping"}), piece(function={"name": "read_file"}), piece(function={"arguments": READ})],
        [("ping", None), ("read_file", "a")],
    ),
    "vLLM with Llama 3: the name on every piece": (
        [call_piece(0, '{"path"', "c1", "read_file"), call_piece(0, ': "a"}', "c1", "read_file"),
         call_piece(1, WRITE, "c2", "write_file")],
        BOTH,
    ),
    "llama.cpp until May 2025: the name on every piece, the id inside the function": (
        [piece(index=0, function={"id": "c1", "name": "read_file", "arguments": '{"path"'}),
         piece(index=0, function={"id": "c1", "name": "read_file", "arguments": ': "a"}'})],
        BOTH[:1],
    ),
    "llama.cpp: the beginning of the arguments with the name": (
        [call_piece(0, "{", "c1", "read_file"), call_piece(0, '"path": "a"}')], BOTH[:1],
    ),
    "gateways: a name in pieces": (
        [call_piece(0, "", "c1", "read_"), call_piece(0, "", name="file"), call_piece(0, READ)], BOTH[:1],
    ),
    "vLLM with a named tool: another id for each piece": (
        [call_piece(0, "", "x1", "read_file"), call_piece(0, '{"path"', "x2"), call_piece(0, ': "a"}', "x3"),
         call_piece(1, "", "x4", "write_file"), call_piece(1, WRITE, "x5")],
        BOTH,
    ),
    "gateways of Ollama: arguments as an object": (
        [piece(index=0, id="c1", function={"name": "read_file", "arguments": {"path": "a"}}),
         piece(index=1, id="c2", function={"name": "write_file", "arguments": {"path": "b"}})],
        BOTH,
    ),
    "OpenAI, vLLM: a name of null after the first piece": (
        [call_piece(0, "", "c1", "read_file"), piece(index=0, function={"name": None, "arguments": READ})], BOTH[:1],
    ),
    "NVIDIA NIM: a name of null in the first piece": (
        [piece(index=0, id="c1", function={"name": None, "arguments": ""}), call_piece(0, READ, name="read_file")], BOTH[:1],
    ),
    "vLLM with Command A: an empty name in the first piece": (
        [piece(index=0, id="c1", function={"name": "", "arguments": ""}), call_piece(0, READ, name="read_file")], BOTH[:1],
    ),
    "llama.cpp: one id for two calls": (
        [call_piece(0, READ, "x", "read_file"), call_piece(1, WRITE, "x", "write_file")], BOTH,
    ),
    "llama.cpp: one id for two calls of one tool, in pieces": (
        [call_piece(0, "", "x", "read_file"), call_piece(0, READ, "x"), call_piece(1, "", "x", "read_file"), call_piece(1, WRITE)],
        SAME,
    ),
    "Nebius, Cerebras: each piece at another index, its id and name on the first alone": (
        [call_piece(0, "", "c1", "read_file"), call_piece(1, '{"path"'), call_piece(2, ': "a"}'),
         call_piece(3, "", "c2", "write_file"), call_piece(4, WRITE)],
        BOTH,
    ),
    "gateways: the tail at another index, under an id of its own": (
        [call_piece(0, "", "c1", "read_file"), call_piece(1, READ, "c1b")], BOTH[:1],
    ),
    "gateways: ids are numbers": (
        [piece(index=0, id=0, function={"name": "read_file", "arguments": READ}),
         piece(index=1, id=7, function={"name": "write_file", "arguments": WRITE})],
        BOTH,
    ),
    "gateways: the whole call once more at its end": (
        [call_piece(0, '{"path":', "c1", "read_file"), call_piece(0, ' "a"}'), call_piece(0, READ, "c1", "read_file")],
        BOTH[:1],
    ),
    "gateways: a function of null": (
        [call_piece(0, READ, "c1", "read_file"), piece(index=0, function=None)], BOTH[:1],
    ),
}  # fmt: skip


@each_row("name", STREAMS)
@each_row("finish", ["tool_calls", "stop"])  # Gemini's end and Ollama end such a stream with "stop"
async def test_calls_of_a_stream_are_told_apart_however_a_server_marks_them(name: str, finish: str) -> None:
    pieces, expected = STREAMS[name]
    stream = [chunk({"content": None}), *[chunk(each) for each in pieces], chunk({}, finish=finish), "[DONE]"]

    result, made, requests = await talk(ok(stream), ok(DONE), on_text=lambda text: None, sequential=True)

    assert made == expected
    assert result.content == "done"
    sent = requests[1]["messages"][1]["tool_calls"]
    assert len({call["id"] for call in sent}) == len(expected)
    assert [json.loads(call["function"]["arguments"]) for call in sent if call["function"]["name"] != "ping"]


SIGNED = {"google": {"thought_signature": "c2lnbmVk"}}


@each_row("streaming", [False, True])
async def test_what_gemini_signs_of_a_call_goes_back_with_it(streaming: bool) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "read_file", "arguments": READ},
        "extra_content": SIGNED,
    }
    other = {"id": "c2", "type": "function", "function": {"name": "write_file", "arguments": WRITE}}
    reply: Any = completion(None, finish="stop")
    reply["choices"][0]["message"]["tool_calls"] = [call, other]
    if streaming:
        reply = [chunk({"tool_calls": [call]}), chunk({"tool_calls": [other]}), chunk({}, finish="stop"), "[DONE]"]
    options = {"on_text": lambda text: None} if streaming else {}

    _, made, requests = await talk(ok(reply), ok(DONE if streaming else completion("done")), sequential=True, **options)

    assert made == BOTH
    sent = requests[1]["messages"][1]["tool_calls"]
    assert [each.get("extra_content") for each in sent] == [SIGNED, None]


SMILE = "a\ud83d", "\ude00b"
ODD_ANSWERS: dict[str, tuple[list[Any], str]] = {
    "halves of a character in two pieces": ([chunk({"content": each}) for each in SMILE] + DONE[1:], "a\U0001f600b"),
    "half a character": ([chunk({"content": "a\ud800"}), *DONE[1:]], "a\ufffd"),
    "two answers": ([chunk({"content": "A"}), chunk({"content": "B"}) | {"choices": [
        {"index": 1, "delta": {"content": "B"}, "finish_reason": "length"}]}, *DONE[1:]], "A"),
    "a whole message": ([chunk({}) | {"choices": [
        {"index": 0, "message": {"role": "assistant", "content": "whole"}, "finish_reason": "stop"}]}], "whole"),
    "a whole message after its pieces": ([chunk({"content": "A"}), chunk({}) | {"choices": [
        {"index": 0, "message": {"role": "assistant", "content": "A"}, "finish_reason": "stop"}]}], "A"),
    "calls that end with [DONE] alone": ([chunk(call_piece(0, READ, "c1", "read_file")), "[DONE]"], "done"),
}  # fmt: skip


async def test_odd_streams_are_read_as_whole_answers_are() -> None:
    for name, (stream, expected) in ODD_ANSWERS.items():
        heard: list[str] = []
        result, made, requests = await talk(ok(stream), ok(DONE), on_text=heard.append)
        assert (name, result.content, result.error) == (name, expected, None)
        assert "".join(heard).encode() and ("".join(heard) == expected or "\ufffd" in expected)
        assert len(requests) == 1 + len(made)


async def test_what_the_server_says_of_an_error_is_told_and_what_is_not_json_is_asked_for_again() -> None:
    for kind in ("openai", "anthropic"):
        for body, said in (({"error": "no template"}, "no template"), ({"detail": [{"msg": "bad role"}]}, "bad role")):
            result, _, requests = await talk((400, {}, body), kind=kind)
            assert said in (result.error or "") and len(requests) == 1
        result, _, requests = await talk((200, {}, NOTHING), (200, {}, NOTHING), kind=kind)
        assert "not JSON" in (result.error or "") and len(requests) == 2


async def test_no_count_of_a_server_gives_a_budget_back() -> None:
    whole = completion("done") | {"usage": {"prompt_tokens": -9, "completion_tokens": 2}}
    result, _, _ = await talk(ok(whole))
    assert (result.usage.input_tokens, result.usage.output_tokens) == (0, 2)


ODD_CHUNKS = [
    chunk() | {"choices": None},
    {key: value for key, value in chunk().items() if key not in ("choices", "usage")},
    chunk({}) | {"choices": [{"index": 0, "delta": None, "finish_reason": None}]},
    chunk({}) | {"choices": [{"index": 0, "finish_reason": None}]},
    chunk({"content": None, "tool_calls": None}),
]


@each_row("odd", ODD_CHUNKS)
async def test_a_chunk_without_choices_or_delta_is_passed_over(odd: dict[str, Any]) -> None:
    result, _, _ = await talk(ok([odd, chunk({"content": "do"}), odd, *DONE[1:]]), on_text=lambda text: None)

    assert (result.content, result.stop_reason, result.error) == ("do", "final", None)


@each_row("streaming", [False, True])
async def test_content_may_be_a_list_of_parts(streaming: bool) -> None:
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    whole = completion(None)
    whole["choices"][0]["message"]["content"] = parts
    reply = ok([chunk({"content": parts}), chunk({}, finish="stop"), "[DONE]"] if streaming else whole)
    heard: list[str] = []

    result, _, _ = await talk(reply, on_text=heard.append if streaming else None)

    assert result.content == "one two"
    assert "".join(heard) == ("one two" if streaming else "")


@each_row(
    "odd", [{"name": None, "arguments": "{}"}, {"name": "ping", "arguments": None}, {"name": "", "arguments": ""}]
)
async def test_a_call_without_a_name_is_answered_and_the_run_goes_on(odd: dict[str, Any]) -> None:
    first = completion(None, ("c1", "ping", "{}"))
    first["choices"][0]["message"]["tool_calls"][0]["function"] = odd

    result, made, requests = await talk(ok(first), ok(completion("done")))

    assert result.content == "done"
    assert made == ([("ping", None)] if odd["name"] else [])
    assert requests[1]["messages"][2]["role"] == "tool"


@each_row("text", ['{"path":"a",}', '```json\n{"path": "a"}\n```', '{"path": "a\n"}'])
@each_row("streaming", [False, True])
async def test_arguments_that_were_mended_go_back_as_what_was_called(text: str, streaming: bool) -> None:
    first: Any = completion(None, ("c1", "read_file", text))
    if streaming:
        first = [chunk(call_piece(0, text, "c1", "read_file")), chunk({}, finish="tool_calls"), "[DONE]"]
    last = ok(DONE if streaming else completion("done"))

    result, made, requests = await talk(ok(first), last, on_text=(lambda text: None) if streaming else None)

    [(_, path)] = made
    sent = requests[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"path": path}
    assert json.loads(result.messages[1]["tool_calls"][0]["function"]["arguments"]) == {"path": path}


@each_row(("text", "sent"), [("null", {}), (json.dumps('{"path": "a"}'), {"path": "a"})])
def test_arguments_in_the_ways_of_single_models_go_back_as_what_was_called(text: str, sent: dict[str, Any]) -> None:
    call = ToolCall("c1", "read_file", text)

    assert json.loads(call.to_openai()["function"]["arguments"]) == call.sent_arguments == sent


@each_row("streaming", [False, True])
async def test_an_answer_that_ended_in_an_error_is_asked_for_again_and_its_calls_are_not_made(streaming: bool) -> None:
    first: Any = completion(None, ("c1", "read_file", '{"path": "a"}'), finish="error")
    if streaming:
        first = [chunk({"content": "half of"}), chunk({}, finish="error"), "[DONE]"]
    reply = ok(completion("done"))

    result, made, _ = await talk(ok(first), reply, on_text=(lambda text: None) if streaming else None)

    assert (made, result.content) == ([], "" if streaming else "done")
    assert ("'error'" in (result.error or "")) is streaming  # its text was shown


@each_row(("tokens", "used"), [(None, 60), (21, 40), (20, 20)])
async def test_tokens_of_an_answer_that_ended_in_an_error_are_counted(tokens: int | None, used: int) -> None:
    failed = ModelResponse("half of", (), "error", TokenUsage(10, 10))
    model = ScriptedModel([failed, failed, ModelResponse("done", (), "stop", TokenUsage(10, 10))])
    budget = Budget(tokens=tokens)

    result = await run_tool_loop(
        ToolLoopConfig(provider=model, budget=budget, retry=RetryPolicy(sleep=sleep)), [user("go")]
    )

    assert result.usage.total == 20 * model.samplings == used
    assert (result.content, "'error'" in (result.error or "")) == ("" if tokens else "done", tokens is not None)


@each_row("kind", ["openai", "anthropic"])
@each_row("text", ['{"path": "a', "not json", "[1]", '"a"', "{'path': 'a'}"])
async def test_a_refused_call_goes_back_as_an_object_that_quotes_it(kind: str, text: str) -> None:
    model = ScriptedModel([calls(("read_file", text)), "done"])
    result = await run_tool_loop(ToolLoopConfig(provider=model, tools=files([])), [user("go")])

    assert result.messages[2]["is_error"]
    if kind == "openai":
        arguments = json.loads(to_openai(result.messages)[1]["tool_calls"][0]["function"]["arguments"])
    else:
        arguments = to_anthropic(result.messages)[1]["content"][0]["input"]
    assert list(arguments) == ["unreadable_arguments"]


def test_a_conversation_that_was_kept_with_unmended_arguments_is_sent_with_mended_ones() -> None:
    kept = [
        user("go"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a",}'}}
            ],
        },
    ]

    [block] = to_anthropic(kept)[1]["content"]
    [call] = to_openai(kept)[1]["tool_calls"]

    assert block["input"] == json.loads(call["function"]["arguments"]) == {"path": "a"}


def test_arguments_that_are_an_object_stay_the_text_that_they_were() -> None:
    text = '{ "b": 1.0,\n  "a": "\\u00e9" }'

    assert ToolCall("c", "t", text).to_openai()["function"]["arguments"] == text
    assert [ToolCall("c", "t", blank).to_openai()["function"]["arguments"] for blank in ("", " \n")] == ["{}", "{}"]


@each_row(("kind", "streaming"), [("openai", False), ("openai", True), ("anthropic", False)])
async def test_an_answer_that_was_cut_off_is_told_apart_from_a_whole_one(kind: str, streaming: bool) -> None:
    if kind == "anthropic":
        reply = ok(message({"type": "text", "text": "half of"}, stop="max_tokens"))
    elif streaming:
        reply = ok([chunk({"content": "half of"}), chunk({}, finish="length"), "[DONE]"])
    else:
        reply = ok(completion("half of", finish="length"))

    result, _, _ = await talk(reply, kind=kind, on_text=(lambda text: None) if streaming else None)

    assert (result.stop_reason, result.content) == ("truncated", "half of")
    assert "cut off" in (result.error or "")


@each_row("content", [None, "", " \n"])
async def test_an_empty_answer_is_not_a_final_one(content: str | None) -> None:
    result, _, _ = await talk(ok(completion(content)))

    assert (result.stop_reason, result.is_error) == ("empty", True)
    assert result.error == "the model gave an empty answer"


async def test_the_caller_of_a_sub_agent_reads_that_its_answer_was_cut_off_or_empty() -> None:
    for reply, mark in (
        (ModelResponse("half of", (), "length"), "half of\n\n[the model's answer was cut off"),
        ("", "Sub-agent failed: the model gave an empty answer"),
    ):
        inner = Agent(ScriptedModel([reply]))
        outer = Agent(
            ScriptedModel([calls(("helper", {"task": "x"})), "done"]),
            tools=[inner.as_tool("helper", "Helps with things.")],
        )
        result = await outer.run("go")

        assert result.messages[2]["content"].startswith(mark)


@each_row(
    ("body", "retries"),
    [
        ({"error": {"message": "overloaded", "code": 503}}, True),
        ({"error": {"message": "slow down", "type": "rate_limit_exceeded"}}, True),
        ({"error": {"message": "context too long", "code": 400}}, False),
        ({"error": "no such model"}, False),
        ({"object": "error", "message": "bad template", "type": "BadRequestError", "code": 400}, False),
        (completion(None) | {"choices": [{"index": 0, "error": {"code": 502, "message": "upstream"}}]}, True),
    ],
)
@each_row("streaming", [False, True])
async def test_an_error_with_status_200_is_that_error_with_its_retry(body: Any, retries: bool, streaming: bool) -> None:
    replies = [ok([body, "[DONE]"] if streaming else body), ok(DONE if streaming else completion("done"))]

    result, _, requests = await talk(*replies, on_text=(lambda text: None) if streaming else None)

    assert len(requests) == (2 if retries else 1)
    if not retries:
        said = body["error"] if isinstance(body.get("error"), str) else (body.get("error") or body)["message"]
        assert said in (result.error or "")
        assert result.stop_reason == "provider_error"


@each_row("body", [{"id": "c"}, {"choices": None}, {"choices": []}, [], "busy", 7, None])
async def test_an_answer_that_is_not_a_completion_ends_the_run_with_words(body: Any) -> None:
    result, _, _ = await talk((200, {}, body))

    assert result.stop_reason == "provider_error"
    assert "NoneType" not in (result.error or "")
    assert "attribute" not in (result.error or "")


@each_row("answer", [{"tool_calls": [3]}, {"tool_calls": [{"function": {"name": None}}]}, 7, None])
async def test_what_a_provider_of_ones_own_returns_never_raises_out_of_an_agent(answer: Any) -> None:
    class Odd:
        async def chat(self, *_: Any) -> Any:
            return answer

    result = await Agent(Odd()).run("go")

    assert result.stop_reason == "provider_error"


async def test_the_blocks_of_anthropics_compatible_ends_may_lack_a_usage() -> None:
    first = message(tool_use("t1", "ping"), stop="tool_use")
    del first["usage"]

    result, made, _ = await talk(ok(first), ok(message({"type": "text", "text": "done"})), kind="anthropic")

    assert (result.content, made) == ("done", [("ping", None)])
