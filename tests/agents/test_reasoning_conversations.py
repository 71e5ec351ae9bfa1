"""Whole conversations with models that reason: what each server says is played back in the shape of its documentation.

Sources: DeepSeek API, "Thinking mode" (tool calls); OpenRouter, "Reasoning tokens" (preserving reasoning); Anthropic,
"Extended thinking" (tool use, redacted blocks).
"""

from __future__ import annotations

from collections.abc import Iterator
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
from agents.test_providers import provider
from rows import each_row
from toolcell.agents import Agent

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("sdks")]

Message = dict[str, Any]


def called(ident: str, city: str) -> Message:
    return {
        "id": ident,
        "type": "function",
        "function": {"name": "temperature", "arguments": f'{{"city": "{city}"}}'},
    }


def answer(content: str, *calls: Message, **reasoning: Any) -> Message:
    return {"role": "assistant", "content": content, **reasoning} | ({"tool_calls": [*calls]} if calls else {})


def thought(index: int, said: str) -> Message:
    found = {"type": "reasoning.text", "text": said, "signature": f"c2ln{index}", "id": f"rs_{index}"}
    return found | {"format": "anthropic-claude-v1", "index": index}


HIDDEN = {"type": "reasoning.encrypted", "data": "ZW5j", "id": "rs_9", "format": "openai-responses-v1", "index": 1}
SUMMARY = {"type": "reasoning.summary", "summary": "Compared both.", "format": "openai-responses-v1", "index": 0}
THINKING = {"type": "thinking", "thinking": "Both cities at once.", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"}
REDACTED = {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix/LafPsn4aDFIT2Xlxh0L5L8rLVyIwxtE3"}
OSLO, ROME, BERN = called("call_1", "Oslo"), called("call_2", "Rome"), called("call_3", "Bern")

CONVERSATIONS: dict[str, list[list[Message]]] = {
    "DeepSeek": [
        [
            answer("", OSLO, ROME, reasoning_content="I need both temperatures."),
            answer("One more.", BERN, reasoning_content="Rome is warmer. Bern is missing."),
            answer("Rome is warmest.", reasoning_content="20, 30 and 25."),
        ],
        [answer("30 degrees.", reasoning_content="They mean Rome.")],
    ],
    "OpenRouter": [
        [
            answer("", OSLO, ROME, reasoning="Both.", reasoning_details=[thought(0, "Both."), HIDDEN]),
            answer(
                "One more.", BERN, reasoning="Bern.", reasoning_details=[thought(0, "Bern is "), thought(1, "left.")]
            ),
            answer("Rome is warmest.", reasoning="Compared both.", reasoning_details=[SUMMARY, HIDDEN]),
        ],
        [answer("30 degrees.", reasoning="Rome.", reasoning_details=[thought(0, "Rome.")])],
    ],
    "Anthropic": [
        [
            message(
                THINKING,
                text("I ask for both."),
                tool_use("call_1", "temperature", city="Oslo"),
                tool_use("call_2", "temperature", city="Rome"),
                stop="tool_use",
            ),
            message(
                REDACTED,
                THINKING | {"thinking": "", "signature": "Eu8B"},
                tool_use("call_3", "temperature", city="Bern"),
                stop="tool_use",
            ),
            message(THINKING, text("Rome is warmest.")),
        ],
        [message(THINKING, REDACTED, text("30 degrees."))],
    ],
}
"""By model: what it says to each of two prompts."""


def halves(said: str) -> list[str]:
    return [each for each in (said[: len(said) // 2], said[len(said) // 2 :]) if each]


def deltas(said: Message) -> Iterator[Message]:
    """An answer of Chat Completions in pieces."""
    for name in ("reasoning_content", "reasoning"):
        for each in halves(said.get(name, "")):
            yield {name: each}
    for detail in said.get("reasoning_details", ()):
        if detail["type"] != "reasoning.text":
            yield {"reasoning_details": [detail]}
            continue
        known = {name: detail[name] for name in ("type", "format", "index", "id")}
        for each in halves(detail["text"]):
            yield {"reasoning_details": [known | {"text": each, "signature": None}]}
        yield {"reasoning_details": [known | {"signature": detail["signature"]}]}
    for each in halves(said["content"]):
        yield {"content": each}
    for number, call in enumerate(said.get("tool_calls", ())):
        first, second = halves(call["function"]["arguments"])
        yield call_piece(number, first, call["id"], "temperature")
        yield call_piece(number, second)


def reply(said: Message, is_streamed: bool) -> Reply:
    if "stop_reason" in said:
        blocks = [(block, []) for block in said["content"]]
        return ok(streamed_message(*blocks, stop=said["stop_reason"]) if is_streamed else said)
    if is_streamed:
        end = chunk({}, "tool_calls" if "tool_calls" in said else "stop")
        return ok([*map(chunk, deltas(said)), end, "[DONE]"])
    whole = completion("")
    whole["choices"][0] |= {"message": said, "finish_reason": "tool_calls" if "tool_calls" in said else "stop"}
    return ok(whole)


def shape(said: Message) -> Any:
    """What of a message its server compares with what it said. No text and empty text are one."""
    if isinstance(said["content"], list):
        return said["content"]
    return {name: value for name, value in said.items() if value and name not in ("role", "usage")}


@each_row("model", CONVERSATIONS)
@each_row("is_streamed", [False, True])
async def test_a_whole_conversation_of_a_model_that_reasons_is_sent_back_as_it_was_said(
    model: str, is_streamed: bool
) -> None:
    turns = deepcopy(CONVERSATIONS[model])
    heat = {"Oslo": 20, "Rome": 30, "Bern": 25}
    asked: list[str] = []

    def temperature(city: str) -> int:
        """Return the temperature of a city."""
        asked.append(city)
        return heat[city]

    with serving(*(reply(each, is_streamed) for turn in turns for each in turn)) as server:
        async with provider("anthropic" if model == "Anthropic" else "openai", server) as own:
            agent = Agent(own, model="m", tools=[temperature], parallel_tools=False)
            results = []
            for prompt in ("Where is it warmest?", "How warm?"):
                if not is_streamed:
                    results.append(await agent.run(prompt))
                    continue
                async with agent.stream(prompt) as events:
                    async for _ in events:
                        pass
                    results.append(events.result)

    assert asked == ["Oslo", "Rome", "Bern"]
    assert [each.content for each in results] == ["Rome is warmest.", "30 degrees."]
    said = [shape(each) for each in CONVERSATIONS[model][0] + CONVERSATIONS[model][1]]
    assert len(server.requests) == len(said)
    for number, request in enumerate(server.requests):
        back = [shape(each) for each in request["messages"] if each["role"] == "assistant"]
        assert back == said[:number], number
    roles = [each["role"] for each in server.requests[-1]["messages"]]
    answers = ["user"] if model == "Anthropic" else ["tool", "tool"]
    assert roles == ["user", "assistant", *answers, "assistant", answers[0], "assistant", "user"]
