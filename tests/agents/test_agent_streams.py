"""`agent.stream`: what models say as it comes, from each provider and from sub-agents, until its reader leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from agents.api_server import call_piece, chunk, ok, serving, streamed_message, text, tool_use
from agents.test_providers import provider, reading, sleep
from rows import each_row
from toolcell import Runtime, ToolRegistry, UsageError
from toolcell.agents import Agent, ModelResponse, Processor, RetryPolicy
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import Event, RunContext

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("sdks")]

PATIENCE_S = 60.0
PATH = '{"path": "/a"}'
OPENAI: list[Any] = [
    chunk({"role": "assistant", "reasoning_content": "A file "}),
    chunk({"reasoning_content": "it is."}),
    chunk({"content": "I'll "}),
    chunk({"content": "look."}),
    chunk(call_piece(0, "", "c1", "read_file")),
    chunk(call_piece(0, '{"path"')),
    chunk(call_piece(0, ': "/a"}')),
    chunk({}, finish="tool_calls"),
    "[DONE]",
]
ANTHROPIC: list[Any] = streamed_message(
    (
        {"type": "thinking", "thinking": "", "signature": ""},
        [{"type": "thinking_delta", "thinking": each} for each in ("A file ", "it is.")],
    ),
    (text(""), [{"type": "text_delta", "text": each} for each in ("I'll ", "look.")]),
    (
        tool_use("c1", "read_file"),
        [{"type": "input_json_delta", "partial_json": each} for each in ('{"path"', ': "/a"}')],
    ),
    stop="tool_use",
)
DONE: dict[str, list[Any]] = {
    "openai": [chunk({"content": "Done."}), chunk({}, finish="stop"), "[DONE]"],
    "anthropic": streamed_message((text(""), [{"type": "text_delta", "text": "Done."}]), stop="end_turn"),
}
TURN = {"openai": OPENAI, "anthropic": ANTHROPIC}
SCRIPTED = ModelResponse(
    "I'll look.",
    calls(("read_file", PATH)).tool_calls,
    extra={"fields": {"reasoning_content": "A file it is."}},
)


class Whole:
    """A provider that does not stream."""

    def __init__(self, model: ScriptedModel) -> None:
        self._model = model

    async def chat(self, *request: Any) -> Any:
        return await self._model.chat(*request)


class Waiting:
    """A model that never answers."""

    async def chat(self, *request: Any) -> Any:
        await anyio.sleep_forever()


def agent_of(model: Any, **config: Any) -> Agent:
    config = {"tools": reading(), "retry": RetryPolicy(attempts=2, sleep=sleep), "model": "m"} | config
    return Agent(model, **config)


async def read(agent: Agent, prompt: str = "go", **options: Any) -> tuple[list[Event], Any]:
    with anyio.fail_after(PATIENCE_S):
        async with agent.stream(prompt, **options) as events:
            found = [event async for event in events]
    return found, events.result


def said(events: list[Event], **of: Any) -> dict[str, str]:
    """Join the pieces of each kind."""
    whole: dict[str, str] = {}
    for event in events:
        if event.type == "message_update" and of.items() <= event.data.items():
            [(kind, piece)] = event.update.items()
            whole[kind] = whole.get(kind, "") + piece
    return whole


def result_of(result: Any) -> dict[str, Any]:
    return {
        name: getattr(result, name) for name in ("content", "stop_reason", "iterations", "messages", "usage", "error")
    }


@each_row("kind", ["openai", "anthropic", "scripted", "whole"])
async def test_text_reasoning_and_arguments_come_in_pieces_and_end_in_the_result_of_run(kind: str) -> None:
    async def both(model: Any, again: Any) -> tuple[list[Event], Any, Any]:
        events, result = await read(agent_of(model))
        return events, result, await agent_of(again).run("go")

    if kind in TURN:
        # The second agent gets the same from the same server, without a reader: as a stream as well, for its parts.
        with serving(*[ok(each) for each in (TURN[kind], DONE[kind])] * 2) as server:
            async with provider(kind, server) as model:
                events, result = await read(agent_of(model))
                plain = await agent_of(model, stream=True).run("go")
            assert [request["stream"] for request in server.requests] == [True] * 4
    else:
        made = [ScriptedModel([SCRIPTED, "Done."]) for _ in range(2)]
        events, result, plain = await both(*(made if kind == "scripted" else map(Whole, made)))

    assert result_of(result) == result_of(plain)
    assert said(events) == {"reasoning": "A file it is.", "text": "I'll look.Done.", "arguments": PATH}
    pieces = [event for event in events if event.type == "message_update"]
    assert len(pieces) > 4 or kind == "whole"
    [call] = [event for event in events if event.type == "tool_execution_start"]
    named = {(event.tool, event.call_id) for event in pieces if "arguments" in event.update}
    assert named == {("read_file", call.call_id)}
    order = [event.type for event in events if event.type.startswith("message") or event is call]
    first, last = order.index("message_update"), order.index("message_end", order.index("message_start", 2))
    assert order[first - 1] == "message_start"  # that of the answer, after that of the prompt
    assert set(order[first : order.index("message_end", first)]) == {"message_update"}
    assert order.index("tool_execution_start") < last
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


async def _cancel(agent: Agent, events: Any, scope: anyio.CancelScope) -> bool:
    agent.cancel("enough")
    return False


async def _leave(agent: Agent, events: Any, scope: anyio.CancelScope) -> bool:
    return True


async def _be_cancelled(agent: Agent, events: Any, scope: anyio.CancelScope) -> bool:
    scope.cancel()
    return False


@each_row("kind", ["openai", "anthropic"])
@each_row("after", ["text", "arguments"])
@each_row("stop", [_cancel, _leave, _be_cancelled])
async def test_a_stream_that_is_cancelled_in_the_middle_ends_the_run_and_the_next_prompt_works(
    kind: str, after: str, stop: Callable[..., Any]
) -> None:
    gate = threading.Event()
    cut = 3 if kind == "openai" else next(n for n, each in enumerate(ANTHROPIC) if "text_delta" in str(each)) + 1
    if after == "arguments":
        cut = -3 if kind == "openai" else -4
    with serving(ok([*TURN[kind][:cut], gate]), ok(DONE[kind])) as server:
        async with provider(kind, server) as model:
            agent = agent_of(model)
            seen: list[Event] = []
            with anyio.fail_after(PATIENCE_S), anyio.CancelScope() as scope:
                async with agent.stream("go") as events:
                    async for event in events:
                        seen.append(event)
                        if (
                            event.type == "message_update"
                            and event.update.get(after)
                            and await stop(agent, events, scope)
                        ):
                            break
            if stop is not _be_cancelled:  # whoever is cancelled gets no result
                result = events.result
                assert (result.stop_reason, result.is_error, result.iterations) == ("cancelled", True, 1)
            assert said(seen)[after]
            assert "tool_execution_start" not in [event.type for event in seen]
            assert [each["role"] for each in agent.messages] == ["user"]
            gate.set()
            assert (await read(agent, "again"))[1].content == "Done."
    assert [each["content"] for each in server.requests[1]["messages"]] == ["go", "again"]


async def test_what_a_body_of_the_block_raises_stays_as_it_is_and_ends_the_run() -> None:
    agent = agent_of(ScriptedModel(["one two"]))
    with pytest.raises(KeyError, match="mine"):
        async with agent.stream("go") as events:
            async for _ in events:
                raise KeyError("mine")
    assert (await agent_of(ScriptedModel(["one two"])).run("go")).content == "one two"


async def test_misuse_of_a_stream_is_named_and_errors_of_run_come_from_its_steps() -> None:
    agent = agent_of(ScriptedModel(["one"]))
    with pytest.raises(UsageError, match="`async with agent"):
        async for _ in agent.stream("go"):
            pass
    async with agent.stream("go") as events:
        with pytest.raises(UsageError, match="no result yet"):
            _ = events.result
        assert [event async for event in events]
    with pytest.raises(UsageError, match="list of messages"):
        await read(agent, prompt=5)  # type: ignore[arg-type]
    waiting = Agent(Waiting())
    async with waiting.stream("go") as events:
        await anext(events)
        with pytest.raises(UsageError, match="already running"):
            await read(waiting)


@pytest.mark.conforms("Q9")
@pytest.mark.isolation
async def test_what_sub_agents_say_comes_too_whether_a_model_or_a_script_calls_them() -> None:
    inner = Agent(ScriptedModel(["Paris it is."], repeat=True), name="geographer")
    registry = ToolRegistry()
    registry.add(inner.as_tool("ask", "Ask a geographer a question."))
    script = calls(("execute_code", {"code": "set_result(call_tool('ask', {'task': 'capital?'}))"}))
    for model in (
        ScriptedModel([calls(("ask", {"task": "capital?"})), "Done."]),
        ScriptedModel([script, "Done."]),
    ):
        async with Runtime(registry) as runtime:
            events, result = await read(Agent(model, tools=registry, code_execution=runtime, name="outer"))
        assert result.content == "Done."
        assert said(events, agent="geographer", depth=1) == {"text": "Paris it is."}
        assert said(events, agent="outer", depth=0)["text"] == "Done."
        nested = [event for event in events if event.data.get("agent") == "geographer"]
        assert all(event.parent_call_id for event in nested)


async def test_what_a_processor_edits_is_not_seen_before() -> None:
    def edit(response: ModelResponse) -> ModelResponse:
        return ModelResponse(response.content.replace("secret", "***"))

    agent = agent_of(ScriptedModel(["a secret"]), processors=(Processor(post_llm=edit),))
    events, result = await read(agent)
    assert (said(events), result.content) == ({"text": "a ***"}, "a ***")


@each_row("kind", ["openai", "anthropic"])
async def test_a_request_that_fails_before_its_text_begins_again_with_another_message_start(kind: str) -> None:
    broken = {
        "openai": [*OPENAI[:2], {"error": {"type": "server_error", "message": "overloaded"}}],
        "anthropic": [
            *ANTHROPIC[:3],
            {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
        ],
    }
    with serving(ok(broken[kind]), ok(DONE[kind])) as server:
        async with provider(kind, server) as model:
            events, result = await read(agent_of(model))
    kinds = [event.type for event in events if event.type.startswith("message")]
    assert result.content == "Done."
    assert kinds.count("message_start") == kinds.count("message_end") + 1
    last = len(kinds) - kinds[::-1].index("message_start")
    assert set(kinds[last:-1]) == {"message_update"}


async def test_streams_of_one_context_have_their_own_events_and_listeners_hear_each_once() -> None:
    context = RunContext()
    heard: list[Event] = []
    context.events.subscribe(heard.append)
    agents = {name: agent_of(ScriptedModel([name]), name=name) for name in ("one", "two")}
    found: dict[str, list[Event]] = {}

    async def go(name: str) -> None:
        found[name] = (await read(agents[name], context=context))[0]

    async with anyio.create_task_group() as tasks:
        for name in agents:
            tasks.start_soon(go, name)

    for name, events in found.items():
        assert {event.data["agent"] for event in events} == {name}
    assert len(heard) == sum(map(len, found.values()))
    own: list[Event] = []
    agent = agent_of(ScriptedModel(["one two"]))
    agent.subscribe(own.append)
    events, _ = await read(agent)
    assert [(each.type, each.update) for each in own] == [(each.type, each.update) for each in events]


def test_without_an_event_loop_listeners_hear_a_model_that_is_set_to_stream() -> None:
    pieces: list[str] = []
    agent = Agent(ScriptedModel(["one two three"]), stream=True)
    agent.subscribe(lambda event: pieces.append(event.update["text"]) if event.type == "message_update" else None)
    assert (agent.run_sync("go").content, pieces) == ("one two three", ["one", " two", " three"])
    silent = Agent(ScriptedModel(["one two three"]))
    silent.subscribe(lambda event: pieces.append(event.type))
    silent.run_sync("go")
    assert "message_update" not in pieces
