"""One form of a conversation, and what each provider reads into it and writes from it, whole and in a stream."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from agents.api_server import (
    Reply,
    call_piece,
    chunk,
    completion,
    message,
    ok,
    serving,
    streamed_message,
    text,
    tool_use,
)
from agents.test_providers import provider, run
from agents.test_streams_of_servers import DONE, READ, WRITE, talk
from rows import each_row
from toolcell.agents import Agent, ModelResponse, assistant, user
from toolcell.agents.providers.anthropic import AnthropicProvider, to_anthropic
from toolcell.agents.providers.openai import to_openai
from toolcell.agents.providers.retries import as_provider_error, reported_error
from toolcell.agents.providers.scripted import ScriptedModel, calls

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("sdks")]


THOUGHT = {
    "type": "reasoning.text",
    "format": "anthropic-claude-v1",
    "index": 0,
    "text": "I look.",
    "signature": "c2ln",
}
SECRET = {"type": "reasoning.encrypted", "format": "google-gemini-v1", "index": 0, "id": "r1", "data": "Zm9v"}
THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "I look."}]}

KEPT: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "DeepSeek, Kimi": ({"reasoning_content": "I look."}, [{"reasoning_content": "I "}, {"reasoning_content": "look."}]),
    "Kimi: no thoughts this time": ({"reasoning_content": ""}, [{"reasoning_content": ""}]),
    "OpenRouter": (
        {"reasoning": "I look.", "reasoning_details": [THOUGHT, SECRET]},
        [
            {"reasoning": "I ", "reasoning_details": [THOUGHT | {"text": "I ", "signature": None}]},
            {"reasoning": "look.", "reasoning_details": [THOUGHT | {"text": "look.", "signature": None}]},
            {"reasoning_details": [{**{k: THOUGHT[k] for k in ("type", "format", "index", "signature")}}]},
            {"reasoning_details": [SECRET]},
        ],
    ),
    "Mistral": (
        {"content": [THINKING, text("Now.")]},
        [
            {"content": [THINKING | {"thinking": [{"type": "text", "text": "I "}]}]},
            {"content": [THINKING | {"thinking": [{"type": "text", "text": "look."}]}]},
            {"content": "No"}, {"content": "w."},
        ],
    ),
    "a server of tomorrow": (
        {"plan": {"steps": ["a", "b"], "state": "xyz"}},
        [{"plan": {"steps": ["a"], "state": "x"}}, {"plan": {"steps": ["b"], "state": "yz"}}],
    ),
}  # fmt: skip
"""By server: fields of a message, and the same as deltas."""


@each_row("server", KEPT)
@each_row("streaming", [False, True])
async def test_what_a_server_needs_back_goes_back_as_it_came_over_the_whole_loop(server: str, streaming: bool) -> None:
    fields, deltas = KEPT[server]
    replies: list[Reply] = []
    for ident, path in (("c1", "a"), ("c2", "b")):
        arguments = json.dumps({"path": path})
        whole = completion(None, (ident, "read_file", arguments))
        whole["choices"][0]["message"] |= fields
        pieces = [*map(chunk, deltas), chunk(call_piece(0, arguments, ident, "read_file")), chunk({}, "tool_calls")]
        replies.append(ok([*pieces, "[DONE]"] if streaming else whole))
    last = ok(DONE if streaming else completion("done"))

    result, made, requests = await talk(*replies, last, on_text=(lambda text: None) if streaming else None)

    assert (result.content, made) == ("done", [("read_file", "a"), ("read_file", "b")])
    expected = {"content": None} | fields
    for sent in (each for each in requests[2]["messages"] if each["role"] == "assistant"):
        assert {name: sent[name] for name in sent if name not in ("role", "tool_calls")} == expected


async def test_a_conversation_that_was_kept_as_json_goes_on_with_what_its_server_needs() -> None:
    first = completion(None, ("c1", "ping", "{}"))
    first["choices"][0]["message"]["reasoning_content"] = "I look."
    inner_first = deepcopy(first)
    with serving(
        ok(first), ok(completion("one")), ok(completion("two")), ok(inner_first), ok(completion("x"))
    ) as server:
        async with provider("openai", server) as model:
            before = Agent(model, model="m", tools=[ping])
            await before.run("go")
            after = Agent(model, model="m", tools=[ping])
            after.messages = json.loads(json.dumps(before.messages))
            await after.run("and now")
            helper = Agent(model, model="m", tools=[ping]).as_tool("helper", "Helps with things.")
            outer = Agent(ScriptedModel([calls(("helper", {"task": "x"})), "done"]), tools=[helper])
            await outer.run("go")

    for request in (server.requests[2], server.requests[4]):
        [asked] = [each for each in request["messages"] if each.get("tool_calls")]
        assert asked["reasoning_content"] == "I look."


def ping() -> str:
    """Ask whether anybody is there."""
    return "pong"


async def test_a_provider_of_ones_own_gets_back_the_fields_that_it_returned() -> None:
    seen: list[Any] = []

    class Own:
        async def chat(self, messages: Any, *_: Any) -> Any:
            seen.append(list(messages))
            call = {"id": 7, "function": {"name": "ping", "arguments": ""}, "signature": "s"}
            return {"content": "", "tool_calls": [call], "thoughts": "t"} if len(seen) == 1 else "done"

    await Agent(Own(), tools=[ping]).run("go")

    assert seen[1][1]["extra"] == {"fields": {"thoughts": "t"}, "calls": {"7": {"signature": "s"}}}
    assert seen[1][2]["tool_call_id"] == seen[1][1]["tool_calls"][0]["id"] == "7"


def test_text_that_a_processor_edited_does_not_go_back_as_it_was() -> None:
    response = ModelResponse("secret", extra={"fields": {"content": [THINKING, text("secret")]}})
    edited = assistant(response) | {"content": "***"}
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("secret"), tool_use("c", "f")]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    assert to_openai([edited]) == [{"role": "assistant", "content": "***"}]
    [sent] = to_anthropic([edited | {"tool_calls": [call], "extra": {"blocks": blocks}}])
    assert sent["content"] == [blocks[0], text("***"), tool_use("c", "f")]


def test_of_an_audio_answer_its_id_goes_back() -> None:
    [sent] = to_openai(
        [{"role": "assistant", "content": "", "extra": {"fields": {"audio": {"id": "a", "data": "AA"}}}}]
    )

    assert sent["audio"] == {"id": "a"}


@each_row("write", [to_openai, to_anthropic])
def test_an_empty_answer_is_left_out_of_a_request(write: Any) -> None:
    empty = [{"role": "assistant", "content": each} for each in ("", " \n", None, [])]
    thoughts = {"role": "assistant", "content": "", "extra": {"blocks": [{"type": "thinking", "thinking": "h"}]}}

    assert write([user("a"), *empty, thoughts, user("b")]) == [user("a"), user("b")]


def test_conversations_in_any_common_form_are_written_for_each_api() -> None:
    url = "data:image/png;base64,AAAA"
    call = {"id": 7, "type": "function", "function": {"name": "f", "arguments": " "}, "signature": "s"}
    talked = [
        {"role": "developer", "content": [text("Be brief.")]},
        {"role": "user", "content": [text("see"), {"type": "image_url", "image_url": {"url": url}}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": 7, "content": [text("x")]},
    ]
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}

    assert to_anthropic(talked) == [
        {"role": "user", "content": [text("see"), picture]},
        {"role": "assistant", "content": [tool_use("7", "f")]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "7", "content": [text("x")]}]},
    ]
    request = AnthropicProvider(api_key="k").request(talked, (), "m", {})
    assert request["system"] == [text("Be brief.")]
    written = to_openai(talked)
    assert (written[2]["content"], written[3]["tool_call_id"]) == (None, "7")
    assert written[2]["tool_calls"] == [
        call | {"id": "7", "function": {"name": "f", "arguments": "{}"}}
    ]  # with the signature
    assert to_openai([{"role": "user", "content": [picture]}])[0]["content"] == [talked[1]["content"][1]]


@each_row("delta", [{"content": "done"}, {"content": [text("done")]}])
async def test_a_stream_of_text_may_end_with_done_alone(delta: Any) -> None:
    result, _, _ = await talk(ok([chunk(delta), "[DONE]"]), on_text=lambda text: None)

    assert (result.content, result.stop_reason) == ("done", "final")


async def test_the_calls_of_a_stream_with_one_id_get_one_each() -> None:
    pieces = [call_piece(0, READ, "x", "read_file"), call_piece(1, WRITE, "x", "write_file")]
    stream = [*map(chunk, pieces), chunk({}, finish="tool_calls"), "[DONE]"]

    _, _, requests = await talk(ok(stream), ok(DONE), on_text=lambda text: None)

    answers = [each["tool_call_id"] for each in requests[1]["messages"] if each["role"] == "tool"]
    assert answers == ["x", "x_2"]


ODD_EVENTS: dict[str, list[dict[str, Any]]] = {
    "a start without usage": [{"type": "message_start", "message": {"type": "message", "role": "assistant"}}],
    "a start without a message": [{"type": "message_start"}],
    "a delta of nothing": [{"type": "message_delta", "delta": {}}],
    "an event of tomorrow": [{"type": "tomorrow", "index": 3}],
}


@each_row("odd", ODD_EVENTS)
async def test_anthropics_compatible_ends_may_leave_out_usage_text_and_reason(odd: str) -> None:
    stream = [
        *ODD_EVENTS[odd],
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "\n"}},
        {"type": "content_block_start", "index": 1, "content_block": tool_use("t1", "read_file", path="/a")},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_stop", "index": 7},
        {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"input_tokens": 50, "output_tokens": 9}},
        {"type": "message_stop"},
    ]
    done = streamed_message((text("Do"), [{"type": "text_delta", "text": "ne."}]), stop="end_turn")
    heard: list[str] = []

    result, server = await run("anthropic", ok(stream), ok(done), on_text=heard.append)

    assert (result.content, heard) == ("Done.", ["\n", "Do", "ne."])
    assert server.requests[1]["messages"][1]["content"] == [tool_use("t1", "read_file", path="/a")]
    assert result.usage.total == 59 + 20


@each_row("streaming", [False, True])
async def test_anthropics_blocks_go_back_in_their_order_with_their_fields(streaming: bool) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    use = tool_use("t1", "read_file", path="/a") | {"caller": {"type": "direct"}}
    blocks = [thought, text("First"), thought | {"signature": "s2"}, use]
    reply: Any = message(*blocks, stop="tool_use")
    if streaming:
        reply = streamed_message(*[(block, []) for block in blocks], stop="tool_use")
        done: Any = streamed_message((text("done"), []), stop="end_turn")
    else:
        done = message(text("done"))

    _, server = await run("anthropic", ok(reply), ok(done), on_text=(lambda text: None) if streaming else None)

    assert server.requests[1]["messages"][1]["content"] == blocks


def test_gemini_says_in_its_error_how_long_to_wait() -> None:
    error = {
        "code": 429,
        "status": "RESOURCE_EXHAUSTED",
        "details": [
            {"@type": "type.googleapis.com/google.rpc.Help"},
            {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.07s"},
        ],
    }

    class Busy(Exception):
        status_code = 429

    for body in (error, {"error": error}, [{"error": error}]):
        exc = Busy()
        exc.body = body  # type: ignore[attr-defined]
        found = as_provider_error(exc)
        assert (found.retryable, found.retry_after_s) == (True, 34.07)
    assert reported_error(error).retry_after_s == 34.07
    assert reported_error(error | {"details": [{"retryDelay": "soon"}, 3]}).retry_after_s is None


def test_an_account_without_credit_is_not_asked_again() -> None:
    class UsedUp(Exception):
        status_code = 429

    for fields in ({"code": "insufficient_quota"}, {"type": "insufficient_quota", "code": None}):
        exc = UsedUp()
        exc.body = {"error": {"message": "You exceeded your current quota.", **fields}}  # type: ignore[attr-defined]
        assert not as_provider_error(exc).retryable
    assert as_provider_error(UsedUp()).retryable


def test_requests_are_what_the_sdks_own_models_describe() -> None:
    from anthropic.types import MessageParam
    from openai.types.chat import ChatCompletionMessageParam
    from pydantic import TypeAdapter

    call = {"id": 7, "type": "function", "function": {"name": "f", "arguments": "not json"}}
    talked = [
        user("go"),
        {"role": "user", "content": [text("see"), {"type": "image_url", "image_url": {"url": "https://x.test/a.png"}}]},
        {"role": "assistant", "content": " ", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": 7, "content": "", "images": [{"media_type": "image/png", "data": "AAAA"}]},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": [text("ok"), text(" ")]},
    ]

    TypeAdapter(list[ChatCompletionMessageParam]).validate_python(to_openai(talked))
    TypeAdapter(list[MessageParam]).validate_python(to_anthropic(talked))
