"""The tool loop: ask a model, run the tools that it calls, and repeat until it answers."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from toolcell.agents import (
    Agent,
    ModelResponse,
    ProviderError,
    RetryPolicy,
    ToolLoopConfig,
    run_tool_loop,
    system,
    user,
)
from toolcell.agents.providers.provider import assistant
from toolcell.agents.providers.retries import as_provider_error, send_with_retries
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.agents.transcript import compacted, repaired
from toolcell.calls import arguments
from toolcell.calls.arguments import ToolCall
from toolcell.errors import UsageError
from toolcell.tools import Budget, RunContext, ToolContext, ToolRegistry, ToolResult
from tools.toolkit import PATIENCE_S, Meeting, recorded

pytestmark = [pytest.mark.quick, pytest.mark.every_loop, pytest.mark.anyio]


def look_registry() -> ToolRegistry:
    async def look(at: str = "nothing") -> str:
        """Look at something for the model."""
        return f"saw {at}"

    return ToolRegistry([look])


async def loop(model: Any, *, context: RunContext | None = None, **config: Any) -> Any:
    config.setdefault("tools", look_registry())
    return await run_tool_loop(ToolLoopConfig(provider=model, **config), [user("go")], context=context)


@pytest.mark.conforms("O1", "O4")
async def test_the_result_has_the_answer_the_stop_reason_and_the_number_of_iterations() -> None:
    result = await loop(ScriptedModel([calls(("look", {})), calls(("look", {})), "done"]))

    assert (result.content, result.iterations, result.stop_reason, result.error) == ("done", 3, "final", None)


async def test_the_text_of_a_calls_arguments_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, texts = arguments.parse_json, list[str]()

    def counted(text: str) -> Any:
        texts.append(text)
        return parse(text)

    monkeypatch.setattr(arguments, "parse_json", counted)
    given = ('{"at": "a"}', '{"at": "b",}', "", '{"at": "c')
    result = await loop(ScriptedModel([calls(*(("look", text) for text in given)), "done"]))

    assert sorted(texts[:3]) == sorted(each for each in given if each) and len(texts) <= 5  # what broke off stays text
    assert [each["content"][:7] for each in result.messages[2:5]] == ["saw a", "saw b", "saw not"]


@pytest.mark.conforms("O2", "K2")
async def test_tools_run_for_the_chat_the_loop_was_given() -> None:
    async def where(ctx: ToolContext) -> str:
        """Return the channel and the id of this chat."""
        return f"{ctx.channel}:{ctx.chat_id}"

    model = ScriptedModel([calls(("where", {})), "done"])
    config = ToolLoopConfig(provider=model, tools=ToolRegistry([where]))

    result = await run_tool_loop(config, [user("go")], "tg", "7")

    assert result.messages[2]["content"] == "tg:7"


@pytest.mark.conforms("O5")
async def test_options_are_passed_on_as_given_or_else_the_defaults() -> None:
    default, given = ScriptedModel(["x"]), ScriptedModel(["x"])

    await loop(default)
    await loop(given, llm_options={"max_tokens": 1})

    assert default.requests[0].options == {"max_tokens": 4096, "temperature": 0.7}
    assert given.requests[0].options == {"max_tokens": 1}


@pytest.mark.conforms("O6")
def test_a_response_is_read_from_the_wire_and_a_call_is_kept_as_a_mapping_inside() -> None:
    function = {"name": "look", "arguments": '{"at": "x"}'}
    answer = {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}

    [call] = ModelResponse.read(answer).tool_calls
    parsed = call.parsed()

    assert (parsed.id, parsed.name, parsed.arguments) == ("c1", "look", {"at": "x"})
    assert ModelResponse.read("text") == ModelResponse("text")
    with pytest.raises(ProviderError, match="not an answer"):
        ModelResponse.read(42)


@pytest.mark.conforms("O7")
async def test_a_response_without_calls_ends_the_run_whatever_its_finish_reason() -> None:
    model = ScriptedModel([{"content": "done", "tool_calls": [], "finish_reason": "tool_calls"}])

    assert (await loop(model)).content == "done"


@pytest.mark.conforms("O8", "O9", "EX-38", "O3")
async def test_answers_follow_their_calls_directly_and_in_order() -> None:
    model = ScriptedModel([calls(("look", {"at": "a"}), ("nowhere", {}), ("look", {"at": "b"}), content="hm"), "done"])

    result = await loop(model)

    asked = result.messages[1]
    assert asked["content"] == "hm"
    assert [call["function"]["arguments"] for call in asked["tool_calls"]] == ['{"at": "a"}', "{}", '{"at": "b"}']
    assert [message["tool_call_id"] for message in result.messages[2:5]] == [call["id"] for call in asked["tool_calls"]]
    assert set(result.messages[2]) == {"role", "content", "tool_call_id"}
    assert result.messages[3]["is_error"]


@pytest.mark.conforms("O11", "O-b3", "V-8")
async def test_at_the_cap_one_more_answer_without_tools_can_be_asked_for() -> None:
    model = ScriptedModel([calls(("look", {}))] * 10 + ["this is what I found"])

    result = await loop(model, synthesize=True)

    assert (result.content, result.stop_reason, result.iterations) == ("this is what I found", "max_iterations", 11)
    assert model.requests[10].tools == ()
    assert model.requests[10].messages[-1] == user(
        "You have used all available tool calls. Summarize what you found and respond to the user."
    )


@pytest.mark.conforms("O12", "V-8")
async def test_ten_rounds_are_the_default_and_the_cap_holds_whatever_is_called() -> None:
    model = ScriptedModel([calls(("nowhere", {}))], repeat=True)

    result = await loop(model)

    assert (model.samplings, result.error) == (10, "Max steps 10 exceeded")


@pytest.mark.conforms("O13")
async def test_a_tool_that_ends_the_run_ends_it_without_another_question() -> None:
    async def final() -> ToolResult:
        """Give the final answer itself."""
        return ToolResult.ok("that is all", terminate=True)

    model = ScriptedModel([calls(("final", {}), content="let me finish")])

    result = await loop(model, tools=ToolRegistry([final]))

    assert (result.stop_reason, result.content, model.samplings) == ("terminated", "let me finish", 1)
    assert result.messages[-1]["content"] == result.last_output == "that is all"


def calling(*ids: str, **extra: Any) -> dict[str, Any]:
    made = tuple(ToolCall(call_id, "look", "{}") for call_id in ids)
    return assistant(ModelResponse("", made)) | extra


def answer(call_id: str, text: str = "saw") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


@pytest.mark.conforms("O14")
def test_a_transcript_with_gaps_is_repaired_before_it_is_sent() -> None:
    messages = [
        user("go"),
        calling("a", "b"),
        answer("b"),
        answer("stray"),
        user("hello?"),
        calling("c", finish_reason="error"),
        answer("c"),
        calling("d", finish_reason="aborted"),
        calling("e"),
    ]

    whole = repaired(messages)

    synthetic = {"role": "tool", "content": "No result provided", "is_error": True}
    assert whole == [
        user("go"),
        calling("a", "b"),
        synthetic | {"tool_call_id": "a"},
        answer("b"),
        user("hello?"),
        calling("e"),
        synthetic | {"tool_call_id": "e"},
    ]
    assert repaired(whole) == whole


@pytest.mark.conforms("O14")
async def test_the_loop_repairs_the_messages_it_was_given() -> None:
    model = ScriptedModel(["done"])

    await run_tool_loop(ToolLoopConfig(provider=model), [user("go"), calling("a"), user("well?")])

    assert [message["role"] for message in model.requests[0].messages] == ["user", "assistant", "tool", "user"]


@pytest.mark.conforms("O15")
async def test_an_agent_runs_one_prompt_at_a_time() -> None:
    meeting = Meeting(2)

    async def meet() -> str:
        """Meet the second prompt."""
        await meeting.join()
        return "met"

    agent = Agent(ScriptedModel([calls(("meet", {})), "done", "again"]), tools=[meet], name="busy")

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(agent.run, "first")
            while meeting.here == 0:
                await anyio.lowlevel.checkpoint()
            with pytest.raises(UsageError, match="'busy' is already running"):
                await agent.run("second")
            await meeting.join()

    assert (await agent.run("third")).content == "again"
    assert [message["content"] for message in agent.messages if message["role"] == "user"] == ["first", "third"]


@pytest.mark.conforms("O16", "O17")
async def test_any_object_with_a_chat_method_can_be_the_model() -> None:
    class Parrot:
        async def chat(self, messages: Any, tools: Any, model: str, options: Any, /) -> Any:
            return {"content": messages[-1]["content"]}

    assert (await loop(Parrot())).content == "go"


@pytest.mark.conforms("O-b1")
async def test_calls_of_one_response_overlap() -> None:
    meeting = Meeting(3)

    async def meet() -> str:
        """Meet the other calls."""
        await meeting.join()
        return "met"

    result = await loop(ScriptedModel([calls(*[("meet", {})] * 3), "done"]), tools=ToolRegistry([meet]))

    answers = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert answers == ["met", "met", "met"]


@pytest.mark.conforms("O-b2")
async def test_a_run_can_be_continued_from_its_messages() -> None:
    capped = await loop(ScriptedModel([calls(("look", {}))], repeat=True), max_iterations=1)
    model = ScriptedModel(["now I know"])

    resumed = await run_tool_loop(ToolLoopConfig(provider=model), [*capped.messages, user("and?")])

    assert capped.stop_reason == "max_iterations"
    assert resumed.content == "now I know"
    assert [message["role"] for message in model.requests[0].messages] == ["user", "assistant", "tool", "user"]
    assert json.loads(json.dumps(capped.messages)) == capped.messages


@pytest.mark.conforms("O-b2", "F10")
async def test_a_cancelled_run_says_so_and_every_call_in_it_has_an_answer() -> None:
    run = RunContext()

    async def leave() -> str:
        """Cancel the whole run."""
        run.cancel("the user left")
        return "left"

    async def later() -> str:
        """Come after the other one."""
        return "later"

    model = ScriptedModel([calls(("leave", {}), ("later", {})), "never said"])
    result = await loop(model, tools=ToolRegistry([leave, later]), sequential=True, context=run)

    assert (result.stop_reason, result.error, model.samplings) == ("cancelled", "the user left", 1)
    assert [message["content"] for message in result.messages[2:]] == ["left", "tool execution aborted"]


@pytest.mark.conforms("O-b2")
async def test_cancelling_while_the_model_thinks_ends_the_run_too() -> None:
    thinking = anyio.Event()

    class Thinker:
        async def chat(self, *_: Any) -> Any:
            thinking.set()
            await anyio.sleep_forever()

    agent = Agent(Thinker(), tools=look_registry())
    results: list[Any] = []

    async def run() -> None:
        results.append(await agent.run("go"))

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await thinking.wait()
            agent.cancel("enough thinking")

    assert (results[0].stop_reason, results[0].error) == ("cancelled", "enough thinking")


async def test_an_agent_cancelled_from_outside_keeps_a_whole_conversation() -> None:
    meeting = Meeting(2)

    async def hang() -> str:
        """Wait for ever and never return."""
        await meeting.join()
        await anyio.sleep_forever()
        return ""

    agent = Agent(ScriptedModel([calls(("hang", {})), "again"]), tools=[hang])

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(agent.run, "go")
            await meeting.join()
            group.cancel_scope.cancel()

    assert agent.messages[-1]["content"] == "tool execution aborted"
    assert agent.pending_tool_calls == []
    assert (await agent.run("and now?")).content == "again"


async def test_calls_that_have_started_and_not_ended_are_pending_and_nobody_has_to_listen() -> None:
    async def look() -> list[str]:
        """Return the ids of all calls that have not ended."""
        return [*agent.pending_tool_calls]

    agent = Agent(ScriptedModel([calls(("look", {}), ("nothing", {})), "seen"]), tools=[look])

    await agent.run("go")

    assert not agent.events.active
    (call, _), answers = agent.messages[1]["tool_calls"], agent.messages[2:4]
    assert json.loads(answers[0]["content"])[0] == call["id"]
    assert agent.pending_tool_calls == []


class Refusing:
    """Raises the given errors, and then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.asked = 0

    async def chat(self, *_: Any) -> Any:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


class HttpError(Exception):
    def __init__(self, status_code: int, **headers: str) -> None:
        super().__init__(f"HTTP {status_code}")
        self.status_code = status_code
        self.response = type("Response", (), {"headers": {k.replace("_", "-"): v for k, v in headers.items()}})()


@pytest.mark.conforms("O-b4")
async def test_a_busy_provider_is_asked_again_after_its_retry_after_or_with_growing_waits() -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    policy = RetryPolicy(attempts=5, base_s=1, jitter=0, sleep=sleep)
    model = Refusing(HttpError(429, retry_after="7"), HttpError(503), ConnectionError("reset"), HttpError(500))

    result = await loop(model, retry=policy)

    assert (result.content, model.asked) == ("done", 5)
    assert waited == [7, 2, 4, 8]


@pytest.mark.conforms("O-b4")
@pytest.mark.parametrize("error", [HttpError(400), HttpError(413), ValueError("bad code")])
async def test_a_permanent_provider_error_is_not_retried(error: Exception) -> None:
    model = Refusing(error)

    result = await loop(model)

    assert (result.stop_reason, model.asked) == ("provider_error", 1)
    assert str(error) in (result.error or "")


@pytest.mark.conforms("O-b4")
@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refused_key_or_an_unknown_model_is_raised_at_once(status: int) -> None:
    model = Refusing(HttpError(status))

    with pytest.raises(UsageError, match=r"LLM call failed: .*check the provider's key"):
        await loop(model)

    assert model.asked == 1


@pytest.mark.conforms("O-b4")
async def test_retries_are_limited_and_a_date_as_retry_after_is_ignored() -> None:
    async def sleep(seconds: float) -> None:
        assert seconds <= 30

    model = Refusing(*[HttpError(429, retry_after="Wed, 21 Oct 2015 07:28:00 GMT")] * 9)
    with pytest.raises(ProviderError, match="HTTP 429"):
        await send_with_retries(RetryPolicy(attempts=3, sleep=sleep), model.chat)

    assert model.asked == 3
    assert as_provider_error(HttpError(429, retry_after="9999")).retry_after_s == 9999


@pytest.mark.conforms("O-b5")
async def test_budgets_of_tokens_time_and_calls_end_or_bound_a_run() -> None:
    usage = {"input_tokens": 60, "output_tokens": 0}
    asks = {"content": "", "tool_calls": [calls(("look", {})).tool_calls[0].to_openai()], "usage": usage}

    class Thinker:
        async def chat(self, *_: Any) -> Any:
            await anyio.sleep_forever()

    tokens = await loop(ScriptedModel([asks], repeat=True), budget=Budget(tokens=100))
    time = await loop(Thinker(), wall_s=0.01)
    few = await loop(
        ScriptedModel([calls(("look", {}), ("look", {}), ("look", {})), "done"]), budget=Budget(tool_calls=2)
    )

    assert (tokens.stop_reason, tokens.iterations, tokens.usage.total) == ("budget", 2, 120)
    assert (time.stop_reason, time.error) == ("budget", "the run's time is used up")
    assert [message["content"] for message in few.messages[2:5]] == [
        "saw nothing",
        "saw nothing",
        "no tool calls left: the run's budget of 2 is used up",
    ]
    assert few.stop_reason == "final"


@pytest.mark.conforms("O-b5")
async def test_a_tool_never_outlasts_the_run() -> None:
    async def hang() -> str:
        """Wait for ever and never return."""
        await anyio.sleep_forever()
        return ""

    result = await loop(ScriptedModel([calls(("hang", {})), "never"]), tools=ToolRegistry([hang]), wall_s=1.0)

    assert result.stop_reason == "budget"
    assert result.messages[2]["content"] == "timed out: the run's time is used up"


async def test_an_agent_ends_at_the_deadline_of_its_context_or_its_own_whichever_comes_first() -> None:
    """Whether its tool hangs or its model."""

    async def hang() -> None:
        """Wait for ever and never return."""
        await anyio.sleep_forever()

    class Thinker(ScriptedModel):
        async def chat(self, *_: Any, **__: Any) -> ModelResponse:
            await anyio.sleep_forever()
            raise AssertionError

    found = list[str]()
    with anyio.fail_after(60):
        for make in (ScriptedModel, Thinker):
            for context_s, own_s in ((0.05, None), (0.05, 600.0), (600.0, 0.05)):
                agent = Agent(make([calls(("hang", {})), "never"]), tools=ToolRegistry([hang]), wall_s=own_s)
                context = RunContext(deadline=anyio.current_time() + context_s)
                found.append((await agent.run("go", context=context)).stop_reason)

    assert found == ["budget"] * 6


@pytest.mark.conforms("O-b5")
def test_old_answers_are_shortened_once_a_transcript_is_too_long() -> None:
    long = "x" * 1000
    messages = [
        user("go"),
        calling("a"),
        answer("a", long),
        calling("b"),
        answer("b", long),
        calling("c"),
        answer("c", long),
    ]

    short = compacted(messages, above_chars=2000, keep_iterations=2)

    assert short[2]["content"].startswith("x" * 200 + "\n[800 characters")
    assert [message["content"] for message in short[3:]] == [message["content"] for message in messages[3:]]
    size = sum(len(str(each.get("content") or "")) for each in messages)
    size += sum(len(str(call)) for each in messages for call in each.get("tool_calls") or ())
    assert compacted(messages, above_chars=size) == messages != compacted(messages, size - 1, keep_iterations=2)
    assert messages[2]["content"] == long


@pytest.mark.conforms("O-b5")
async def test_shortening_changes_the_request_and_not_the_transcript() -> None:
    model = ScriptedModel([calls(("look", {})), "done"])

    result = await loop(model, compact=lambda messages: [system("shortened"), *messages[-1:]])

    assert model.requests[1].messages[0]["content"] == "shortened"
    assert [message["role"] for message in result.messages] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.conforms("O-b6")
async def test_text_for_the_user_is_delivered_in_order_also_by_async_callbacks() -> None:
    shown: list[str] = []

    async def say(text: str) -> ToolResult:
        """Say something to the user."""
        return ToolResult.user(text)

    async def on_user(text: str, result: ToolResult) -> None:
        await anyio.lowlevel.checkpoint()
        shown.append(text)

    model = ScriptedModel([calls(("say", {"text": "one"}), ("say", {"text": "two"})), "done"])
    await loop(model, tools=ToolRegistry([say]), on_user=on_user)

    assert shown == ["one", "two"]


async def test_a_scripted_model_without_replies_left_raises_an_error_that_says_so() -> None:
    result = await loop(ScriptedModel([]), retry=RetryPolicy(attempts=1))

    assert "the scripted model has 0 replies" in (result.error or "")


async def test_an_agent_keeps_its_conversation_until_it_is_reset() -> None:
    model = ScriptedModel(["one", "two", "three"])
    agent = Agent(model, system_prompt="Be brief.")
    log = recorded(agent.events)

    await agent.run("a")
    await agent.run("b")
    agent.reset()
    await agent.run("c")

    assert [[message["content"] for message in request.messages] for request in model.requests] == [
        ["Be brief.", "a"],
        ["Be brief.", "a", "one", "b"],
        ["Be brief.", "c"],
    ]
    assert len([event for event in log if event.type == "agent_end"]) == 3


async def test_an_agents_listeners_get_the_events_of_a_run_with_its_own_bus() -> None:
    agent = Agent(ScriptedModel([calls(("look", {})), "done", "again"]), tools=look_registry())
    mine, log = RunContext(), recorded(agent.events)
    theirs = recorded(mine.events)

    await agent.run("go", context=mine)
    own_events = len(log)
    first, second = await agent.run("more"), log[-1].run_id

    assert log[:own_events] == theirs
    assert first.content == "again"
    assert second not in ("", mine.run_id)
