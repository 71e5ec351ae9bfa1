"""What providers answer besides text and calls: passing errors, refusals, pauses, and how long to wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from agents.api_server import Reply, chunk, completion, heard_by, message, ok, serving, streamed_message, text, tool_use
from agents.test_providers import provider, sleep
from rows import each_row
from toolcell import UsageError
from toolcell.agents import Agent, RetryPolicy, ToolLoopConfig, run_tool_loop, user
from toolcell.agents.providers.anthropic import to_anthropic
from toolcell.agents.providers.retries import as_provider_error
from toolcell.agents.providers.scripted import ScriptedModel

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("sdks")]

KINDS = pytest.mark.parametrize("kind", ["openai", "anthropic"])


async def run(
    kind: str, *replies: Reply, on_text: Callable[[str], object] | None = None, **config: Any
) -> tuple[Any, list[dict[str, Any]]]:
    with serving(*replies) as server:
        async with provider(kind, server) as model:
            retry = RetryPolicy(attempts=3, sleep=sleep)
            loop = ToolLoopConfig(provider=model, model="m", retry=retry, stream=on_text is not None, **config)
            result = await run_tool_loop(loop, [user("read it")], context=heard_by(on_text))
    return result, server.requests


def says(kind: str, *, streaming: bool) -> Reply:
    if kind == "openai":
        return ok([chunk({"content": "hi"}), chunk({}, finish="stop"), "[DONE]"] if streaming else completion("hi"))
    if streaming:
        return ok(streamed_message((text(""), [{"type": "text_delta", "text": "hi"}]), stop="end_turn"))
    return ok(message(text("hi")))


def overloaded(kind: str, *before: Any) -> Reply:
    if kind == "openai":
        return ok([*before, {"error": {"type": "server_error", "message": "overloaded"}}])
    return ok([*before, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}])


@pytest.mark.conforms("O-b4")
@KINDS
async def test_an_error_inside_a_stream_is_retried_until_text_was_heard(kind: str) -> None:
    heard: list[str] = []
    half: list[Any] = [chunk({"content": "half"})]
    if kind == "anthropic":
        half = streamed_message((text(""), [{"type": "text_delta", "text": "half"}]), stop=None)

    result, requests = await run(kind, overloaded(kind), says(kind, streaming=True), on_text=heard.append)
    assert (result.content, len(requests), heard) == ("hi", 2, ["hi"])

    broken, requests = await run(kind, overloaded(kind, *half), says(kind, streaming=True), on_text=heard.append)
    assert (broken.stop_reason, len(requests), heard) == ("provider_error", 1, ["hi", "half"])


@pytest.mark.conforms("O-b4")
@KINDS
async def test_the_server_says_whether_to_try_again(kind: str) -> None:
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}
    again, requests = await run(kind, (400, {"x-should-retry": "true"}, error), says(kind, streaming=False))
    assert (again.content, len(requests)) == ("hi", 2)

    final, requests = await run(kind, (429, {"x-should-retry": "false"}, error), says(kind, streaming=False))
    assert (final.stop_reason, len(requests)) == ("provider_error", 1)


class Refused(Exception):
    def __init__(self, **headers: str) -> None:
        super().__init__("busy")
        self.status_code = 429
        self.response = self
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.mark.conforms("O-b4")
def test_the_server_says_how_long_to_wait_in_any_of_the_forms() -> None:
    in_a_minute = as_provider_error(Refused(retry_after=formatdate(time.time() + 60, usegmt=True))).retry_after_s

    assert in_a_minute is not None
    assert 30 < in_a_minute < 61
    assert as_provider_error(Refused(retry_after=formatdate(0, usegmt=True))).retry_after_s == 0
    assert as_provider_error(Refused(retry_after="7")).retry_after_s == 7
    assert as_provider_error(Refused(retry_after="7", retry_after_ms="250")).retry_after_s == 0.25
    for nonsense in ("soon", "nan", "inf", "", "Wed, 99 Foo 2026"):
        assert as_provider_error(Refused(retry_after=nonsense)).retry_after_s is None
    assert as_provider_error(Refused()).retry_after_s is None


@KINDS
@each_row("status", [401, 403, 404])
async def test_a_wrong_key_model_or_address_is_raised(kind: str, status: int) -> None:
    error = {"type": "error", "error": {"type": "error", "message": "no such thing"}}

    with pytest.raises(UsageError, match=f"{status}.*no such thing.*check the provider's key, address and model='m'"):
        await run(kind, (status, {}, error))


@KINDS
@each_row("streaming", [False, True])
async def test_a_refusal_is_heard_and_ends_the_run_as_one(kind: str, streaming: bool) -> None:
    heard: list[str] = []
    if kind == "openai":
        whole = completion(None)
        whole["choices"][0]["message"]["refusal"] = "I can't."
        reply = ok([chunk({"refusal": "I can't."}), chunk({}, finish="stop"), "[DONE]"] if streaming else whole)
    else:
        pieces = streamed_message((text(""), [{"type": "text_delta", "text": "I can't."}]), stop="refusal")
        pieces.insert(
            -1, {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 9}}
        )  # no reason to forget one
        reply = ok(pieces if streaming else message(text("I can't."), stop="refusal"))

    result, _ = await run(kind, reply, on_text=heard.append if streaming else None)

    assert (result.stop_reason, result.content, result.is_error) == ("refused", "I can't.", True)
    assert heard == (["I can't."] if streaming else [])


@each_row("streaming", [False, True])
async def test_a_paused_turn_goes_on_with_everything_it_had(streaming: bool) -> None:
    search = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
    whole: Any = message(text("Let me look."), search, found, text("So far"), stop="pause_turn")
    if streaming:
        whole = streamed_message(
            (text(""), [{"type": "text_delta", "text": "Let me look."}]),
            (search | {"input": {}}, [{"type": "input_json_delta", "partial_json": '{"query": "x"}'}]),
            (found, []),
            (text(""), [{"type": "text_delta", "text": "So far"}]),
            stop="pause_turn",
        )
    heard: list[str] = []

    result, requests = await run(
        "anthropic", ok(whole), says("anthropic", streaming=streaming), on_text=heard.append if streaming else None
    )

    assert (result.stop_reason, result.content, result.iterations) == ("final", "hi", 2)
    asked = requests[1]["messages"]
    assert [each["role"] for each in asked] == ["user", "assistant"]
    assert asked[1]["content"] == [text("Let me look."), search, found, text("So far")]


def test_thoughts_texts_and_calls_go_back_in_their_order() -> None:
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    sent = to_anthropic(
        [{"role": "assistant", "content": "I'll look.", "tool_calls": [call], "extra": {"blocks": blocks}}]
    )

    assert sent[0]["content"] == [*blocks, text("I'll look."), tool_use("c", "f")]


@each_row(
    ("options", "said"),
    [
        ({"temperature": 0.1}, "Agent has no setting 'temperature'; options of the model go into llm_options"),
        ({"max_iteration": 3}, "did you mean max_iterations"),
        ({"wall": 3}, "did you mean wall_s"),
    ],
)
def test_an_agents_unknown_settings_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Agent(ScriptedModel(["x"]), **options)
