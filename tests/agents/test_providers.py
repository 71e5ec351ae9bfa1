"""The adapters for OpenAI's and Anthropic's SDKs, tested with a local server that implements their APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agents.api_server import (
    ApiServer,
    Reply,
    call_piece,
    chunk,
    completion,
    heard_by,
    message,
    ok,
    serving,
    streamed_message,
    text,
    tool_use,
)
from rows import each_row
from toolcell import Agent, UsageError
from toolcell.agents import RetryPolicy, ToolLoopConfig, run_tool_loop, system, user
from toolcell.agents.providers.anthropic import AnthropicProvider, to_anthropic
from toolcell.agents.providers.openai import OpenAIProvider, to_openai
from toolcell.tools import Image, Text, ToolRegistry, ToolResult

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("sdks")]


def reading() -> ToolRegistry:
    async def read_file(path: str) -> str:
        """Read the contents of a file at the given path."""
        if path == "/missing":
            raise FileNotFoundError(path)
        return f"Hello from {path}"

    async def draw() -> ToolResult:
        """Draw a small picture."""
        return ToolResult(parts=(Text("drawn"), Image(b"\x89PNG\r\n\x1a\n")))

    return ToolRegistry([read_file, draw])


def provider(kind: str, server: ApiServer) -> Any:
    if kind == "openai":
        return OpenAIProvider(api_key="k", base_url=f"{server.url}/v1")
    return AnthropicProvider(api_key="k", base_url=server.url)


async def sleep(seconds: float) -> None:
    """Do not wait between attempts."""


async def run(
    kind: str, *replies: Reply, on_text: Callable[[str], object] | None = None, **config: Any
) -> tuple[Any, ApiServer]:
    config.setdefault("retry", RetryPolicy(attempts=3, sleep=sleep))
    with serving(*replies) as server:
        async with provider(kind, server) as model:
            loop = ToolLoopConfig(provider=model, model="m", tools=reading(), stream=on_text is not None, **config)
            result = await run_tool_loop(loop, [system("Be brief."), user("read it")], context=heard_by(on_text))
    return result, server


@pytest.mark.conforms("O6", "O8", "O9", "O16")
async def test_openai_gets_the_whole_conversation_in_its_own_format() -> None:
    asks = completion(
        "I'll look.", ("c1", "read_file", '{"path": "/tmp/foo"}'), ("c2", "read_file", '{"path": "/missing"}')
    )

    result, server = await run("openai", ok(asks), ok(completion("It says hello.")))

    first, second = server.requests
    assert first["path"] == "/v1/chat/completions"
    assert set(first) == {"path", "model", "messages", "tools"}  # and nothing that nobody asked for
    assert first["model"] == "m"
    assert [tool["function"]["name"] for tool in first["tools"]] == ["read_file", "draw"]
    assert second["messages"][2] == {
        "role": "assistant",
        "content": "I'll look.",
        "tool_calls": asks["choices"][0]["message"]["tool_calls"],
    }
    assert second["messages"][3] == {"role": "tool", "content": "Hello from /tmp/foo", "tool_call_id": "c1"}
    assert set(second["messages"][4]) == {"role", "content", "tool_call_id"}
    assert (result.content, result.usage.total) == ("It says hello.", 36)


@pytest.mark.conforms("O10", "E7", "O16")
async def test_anthropic_gets_the_whole_conversation_in_its_own_format() -> None:
    asks = message(
        text("I'll look."),
        tool_use("t1", "read_file", path="/tmp/foo"),
        tool_use("t2", "read_file", path="/missing"),
        stop="tool_use",
    )

    result, server = await run("anthropic", ok(asks), ok(message(text("It says hello."))))

    first, second = server.requests
    assert first["path"] == "/v1/messages"
    assert (first["system"], first["max_tokens"]) == ("Be brief.", 4096)
    assert "temperature" not in first
    assert set(first["tools"][0]) == {"name", "description", "input_schema"}
    assert [each["role"] for each in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == asks["content"]
    good, bad = second["messages"][2]["content"]
    assert good == {"type": "tool_result", "tool_use_id": "t1", "content": "Hello from /tmp/foo"}
    assert (bad["tool_use_id"], bad["is_error"]) == ("t2", True)
    assert (result.content, result.usage.total) == ("It says hello.", 36)


@pytest.mark.conforms("O16")
async def test_openai_streams_text_and_calls_in_pieces() -> None:
    shown: list[str] = []
    usage = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    tool_turn = [
        chunk({"role": "assistant", "content": "I'll "}),
        chunk({"content": "look."}),
        chunk(call_piece(0, "", "c1", "read_file")),
        chunk(call_piece(0, '{"path": ')),
        chunk(call_piece(1, '{"path": "/b"}', "c2", "read_file")),
        chunk(call_piece(0, '"/a"}')),
        chunk({}, finish="tool_calls"),
        chunk(usage=usage),
        "[DONE]",
    ]
    done = [chunk({"content": "Done."}), chunk({}, finish="stop"), "[DONE]"]

    result, server = await run("openai", ok(tool_turn), ok(done), on_text=shown.append)

    assert server.requests[0]["stream"] is True
    assert shown == ["I'll ", "look.", "Done."]
    assert [each["content"] for each in result.messages if each["role"] == "tool"] == ["Hello from /a", "Hello from /b"]
    assert result.usage.total == 11


@pytest.mark.conforms("O10", "O16")
async def test_anthropic_streams_text_thoughts_and_calls_in_pieces() -> None:
    shown: list[str] = []
    tool_turn = streamed_message(
        (
            {"type": "thinking", "thinking": "", "signature": ""},
            [{"type": "thinking_delta", "thinking": "hm"}, {"type": "signature_delta", "signature": "s1"}],
        ),
        (text(""), [{"type": "text_delta", "text": "I'll "}, {"type": "text_delta", "text": "look."}]),
        (
            tool_use("t1", "read_file"),
            [{"type": "input_json_delta", "partial_json": part} for part in ("", '{"path": ', '"/a"}')],
        ),
        (tool_use("t2", "read_file", path="/b"), [{"type": "input_json_delta", "partial_json": ""}]),  # given at once
        stop="tool_use",
    )
    done = streamed_message((text(""), [{"type": "text_delta", "text": "Done."}]), stop="end_turn")

    result, server = await run("anthropic", ok(tool_turn), ok(done), on_text=shown.append)

    assert server.requests[0]["stream"] is True
    assert shown == ["I'll ", "look.", "Done."]
    assert server.requests[1]["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "s1"},
        {"type": "text", "text": "I'll look."},
        {"type": "tool_use", "id": "t1", "name": "read_file", "input": {"path": "/a"}},
        {"type": "tool_use", "id": "t2", "name": "read_file", "input": {"path": "/b"}},
    ]
    assert [each["content"] for each in result.messages if each["role"] == "tool"] == ["Hello from /a", "Hello from /b"]
    assert result.content == "Done."
    assert result.usage.total == 40


@each_row("kind", ["openai", "anthropic"])
def test_an_agent_may_be_run_in_one_event_loop_after_another(kind: str) -> None:
    done = ok(completion("done") if kind == "openai" else message(text("done")))
    with serving(*[done] * 4) as server:
        agent = Agent(provider(kind, server), model="m", retry=RetryPolicy(attempts=1))
        results = [agent.run_sync("go"), asyncio.run(agent.run("go")), agent.run_sync("go"), agent.run_sync("go")]

    assert [each.content or each.error for each in results] == ["done"] * 4


@pytest.mark.every_loop
@each_row("kind", ["openai", "anthropic"])
@each_row("own", [False, True])
async def test_a_provider_answers_on_every_event_loop_and_closes_its_connections(kind: str, own: bool) -> None:
    done = ok(completion("done") if kind == "openai" else message(text("done")))
    clients, results = list[Any](), list[Any]()
    with serving(done, done) as server:
        made = provider(kind, server)
        made = type(made)(made._client) if own else made
        for _ in range(1 if own else 2):  # after it was closed too
            async with made:
                results.append(await Agent(made, model="m", retry=RetryPolicy(attempts=1)).run("go"))
                clients.append(await made._client_here())

    assert all((each.content, each.error) == ("done", None) for each in results)
    assert all(each.is_closed() for each in clients)


@each_row("kind", ["openai", "anthropic"])
def test_event_loops_have_connections_of_their_own_that_close_with_them(kind: str) -> None:
    done = ok(completion("done") if kind == "openai" else message(text("done")))
    with serving(*[done] * 3) as server:
        made = provider(kind, server)

        async def ask() -> Any:
            result = await Agent(made, model="m", retry=RetryPolicy(attempts=1)).run("go")
            return result.content or result.error, await made._client_here()

        async def ask_while_another_loop_does_and_closes() -> list[Any]:
            async def other() -> Any:
                async with made:
                    return await ask()

            return [await ask(), await anyio.to_thread.run_sync(anyio.run, other), await ask()]

        asked = anyio.run(ask_while_another_loop_does_and_closes, backend="trio")

    assert [said for said, _ in asked] == ["done"] * 3
    assert asked[0][1] is asked[2][1] is not asked[1][1]
    assert all(client.is_closed() for _, client in asked)


@pytest.mark.conforms("C20")
@each_row("kind", ["openai", "openai without any", "anthropic", "anthropic whole", "anthropic without any"])
async def test_a_call_that_was_cut_off_by_the_token_limit_is_not_run(kind: str) -> None:
    """What a server made an object of may be the beginning of the arguments."""
    kind, _, how = kind.partition(" ")
    done: Any = completion("Sorry.") if kind == "openai" else message(text("Sorry."))
    if kind == "openai":
        cut: Any = completion(None, ("c1", "read_file", "" if how else '{"path": "/etc/pas'), finish="length")
    elif how:
        cut = message(
            tool_use("t1", "read_file", **({"path": "/etc/pas"} if how == "whole" else {})), stop="max_tokens"
        )
    else:
        pieces = [{"type": "input_json_delta", "partial_json": '{"path": "/etc/pas'}]
        cut = streamed_message((tool_use("t1", "read_file"), pieces), stop="max_tokens")
        done = streamed_message((text(""), [{"type": "text_delta", "text": "Sorry."}]), stop="end_turn")

    on_text = (lambda piece: None) if (kind, how) == ("anthropic", "") else None
    result, _ = await run(kind, ok(cut), ok(done), on_text=on_text)

    [answer] = [each for each in result.messages if each["role"] == "tool"]
    assert answer["content"].startswith("invalid args: ")
    assert answer["content"].endswith("at the limit of tokens of an answer: send less at once")
    assert result.content == "Sorry."


@each_row("streaming", [False, True])
async def test_anthropic_never_gets_input_back_that_is_no_object(streaming: bool) -> None:
    """It refuses the whole conversation for it. Who wrote it, the model or a server between, is told by an error."""
    own = {**tool_use("s1", "web_search"), "type": "server_tool_use"}
    asks = message({**tool_use("t1", "read_file"), "input": ["/a"]}, own, stop="tool_use")
    if streaming:
        pieces = [{"type": "input_json_delta", "partial_json": '["/a"]'}]
        asks = streamed_message((tool_use("t1", "read_file"), pieces), (own, pieces), stop="tool_use")
    done: Any = streamed_message((text(""), []), stop="end_turn") if streaming else message(text("Sorry."))

    result, server = await run("anthropic", ok(asks), ok(done), on_text=(lambda piece: None) if streaming else None)

    [answer] = [each for each in result.messages if each["role"] == "tool"]
    assert (
        answer["content"].startswith("invalid tool arguments: ") and "must be an object, not list" in answer["content"]
    )
    inputs = [each["input"] for each in server.requests[1]["messages"][1]["content"]]
    assert all(isinstance(each, dict) for each in inputs) and '["/a"]' in inputs[0].values(), inputs
    assert inputs[1] == {}


@pytest.mark.parametrize("provider_class", [OpenAIProvider, AnthropicProvider])
async def test_a_server_that_cannot_be_reached_is_named_without_its_password(
    provider_class: type[OpenAIProvider | AnthropicProvider], free_tcp_port: int
) -> None:
    place = f"127.0.0.1:{free_tcp_port}"
    provider = provider_class(api_key="k", base_url=f"http://ann:secret@{place}/v1")
    config = ToolLoopConfig(provider=provider, model="m", retry=RetryPolicy(attempts=1))

    result = await run_tool_loop(config, [user("hi")])

    assert result.stop_reason == "provider_error"
    assert result.error == f"LLM call failed: APIConnectionError at {place}: Connection error."


@pytest.mark.conforms("O-b4")
@each_row("kind", ["openai", "anthropic"])
@each_row("streaming", [False, True])
async def test_a_request_is_sent_again_to_a_busy_server_and_not_to_one_that_refuses_it(
    kind: str, streaming: bool
) -> None:
    busy: Reply = (
        429,
        {"retry-after": "0"},
        {"type": "error", "error": {"type": "rate_limit", "message": "slow down"}},
    )
    refuses: Reply = (401, {}, {"type": "error", "error": {"type": "authentication_error", "message": "bad key"}})
    if kind == "openai":
        plain, pieces = completion("hi"), list[Any]([chunk({"content": "hi"}), chunk({}, finish="stop"), "[DONE]"])
    else:
        plain = message(text("hi"))
        pieces = streamed_message((text(""), [{"type": "text_delta", "text": "hi"}]), stop="end_turn")
    options: Any = {"on_text": lambda piece: None} if streaming else {}

    patient, server = await run(kind, busy, (500, {}, {}), ok(pieces if streaming else plain), **options)

    assert (patient.content, len(server.requests)) == ("hi", 3)
    with pytest.raises(UsageError, match=r"LLM call failed: .*bad key.*; check the provider's key"):
        await run(kind, refuses, ok(pieces if streaming else plain), **options)


@pytest.mark.conforms("O-b4")
@each_row("kind", ["openai", "anthropic"])
async def test_a_broken_stream_is_not_requested_again_once_its_text_was_shown(kind: str) -> None:
    shown: list[str] = []
    broken: Any = [chunk({"content": "half"})]
    if kind == "anthropic":
        broken = streamed_message((text(""), [{"type": "text_delta", "text": "half"}]), stop=None)

    result, server = await run(kind, ok(broken), on_text=shown.append)

    assert (result.stop_reason, len(server.requests), shown) == ("provider_error", 1, ["half"])


@pytest.mark.conforms("B5")
@each_row("kind", ["openai", "anthropic"])
async def test_images_from_tools_reach_a_model_that_supports_images(kind: str) -> None:
    if kind == "openai":
        replies = [ok(completion(None, ("c1", "draw", "{}"), ("c2", "draw", "{}"))), ok(completion("nice"))]
    else:
        replies = [ok(message(tool_use("t1", "draw"), stop="tool_use")), ok(message(text("nice")))]

    _, server = await run(kind, *replies)

    sent = server.requests[1]["messages"]
    if kind == "openai":
        assert [each["role"] for each in sent] == ["system", "user", "assistant", "tool", "tool", "user"]
        assert [part["type"] for part in sent[5]["content"]] == ["text", "image_url", "image_url"]
        assert "tools above" in sent[5]["content"][0]["text"]
        assert sent[5]["content"][1]["image_url"]["url"] == "data:image/png;base64,iVBORw0KGgo="
    else:
        [block] = sent[2]["content"]
        assert [part["type"] for part in block["content"]] == ["text", "image"]
        assert block["content"][1]["source"] == {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


@each_row("kind", ["openai", "anthropic"])
async def test_options_that_an_sdk_does_not_know_are_sent_in_the_body(kind: str) -> None:
    reply = completion("hi") if kind == "openai" else message(text("hi"))

    _, server = await run(kind, ok(reply), llm_options={"max_tokens": 5, "new_knob": 1})

    newer = "max_completion_tokens" if kind == "openai" else "max_tokens"
    assert (server.requests[0][newer], server.requests[0]["new_knob"]) == (5, 1)
    assert ("max_tokens" in server.requests[0]) == (kind == "anthropic")


def test_keys_that_the_apis_do_not_know_are_not_sent() -> None:
    messages = [
        user("go"),
        {"role": "assistant", "content": "ok", "tool_calls": [], "extra": {"blocks": []}, "finish_reason": "stop"},
        {"role": "tool", "tool_call_id": "a", "content": "no", "is_error": True},
        {"role": "tool", "tool_call_id": "b", "content": "", "images": [{"media_type": "image/png", "data": "AA"}]},
        user("next"),
    ]

    assert [set(each) for each in to_openai(messages)] == [
        {"role", "content"},
        {"role", "content"},
        {"role", "content", "tool_call_id"},
        {"role", "content", "tool_call_id"},
        {"role", "content"},
        {"role", "content"},
    ]
    anthropic = to_anthropic(messages)
    assert [each["role"] for each in anthropic] == ["user", "assistant", "user", "user"]
    assert [block["tool_use_id"] for block in anthropic[2]["content"]] == ["a", "b"]
    assert anthropic[2]["content"][1]["content"][0]["type"] == "image"
