"""What a run has read, it does not send where a flow forbids it: from a model, a batch, a plan, a nested call, an agent."""

from __future__ import annotations

import fnmatch
import json
from contextlib import nullcontext
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rows import each_row
from toolcell import Policy, RegistrationError, Runtime, UsageError
from toolcell.agents import Agent
from toolcell.agents.loop import ToolLoopConfig, run_tool_loop
from toolcell.agents.providers.openai import to_openai
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.run_state import RunState
from toolcell.flows import Flow, Labels, flow_of
from toolcell.testing import FakeBackend
from toolcell.tools import Approve, Block, RunContext, Substitute, ToolContext, ToolRegistry, ToolResult, approval_hook

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

DENY = Flow("private", "public", "deny")
ASK = Flow("private", "public", "ask")
REFUSAL = 'tool "post" is not permitted: it sends to "public", and this run has read "private"'


class Office:
    """Private mail, a public web, and a log of what was done."""

    def __init__(self, *flows: Flow) -> None:
        self.done: list[str] = []
        self.registry = ToolRegistry()
        registry = self.registry
        registry.policy.add_flow(*flows)

        @registry.tool(reads="private", read_only=True)
        async def mail() -> str:
            """Read all the mail there is."""
            self.done.append("mail")
            return "the code is 1234"

        @registry.tool(sends=["public", "log"])
        async def post(text: str) -> str:
            """Post a text where everybody can read it."""
            self.done.append("post")
            return "posted"

        @registry.tool
        async def note(text: str) -> str:
            """Write a text into the notebook."""
            self.done.append("note")
            return "noted"

        @registry.tool
        async def through(context: ToolContext, tool: str) -> Any:
            """Call another of these tools."""
            result = await context.call_tool(tool, {} if tool == "mail" else {"text": "x"})
            return result.text

    async def call(self, tool: str, run: RunContext) -> ToolResult:
        return await self.registry.dispatch(tool, {} if tool == "mail" else {"text": "x"}, context=run)


async def test_private_mail_is_not_posted_in_the_run_that_has_read_it() -> None:
    office, run = Office(DENY), RunContext()

    assert (await office.call("post", run)).text == "posted"
    assert (await office.call("mail", run)).text == "the code is 1234"
    refused = await office.call("post", run)

    assert (refused.text, str(refused.error and refused.error.code)) == (REFUSAL, "not_permitted")
    assert (await office.call("note", run)).text == "noted"
    assert (await office.call("post", RunContext())).text == "posted"
    assert office.done == ["post", "mail", "note", "post"]


async def test_a_batch_sends_only_what_comes_before_its_first_private_read() -> None:
    office = Office(DENY)
    post = ("post", {"text": "x"})

    results = await office.registry.execute_batch([post, ("mail", {}), post])

    assert [result.text for result in results] == ["posted", "the code is 1234", REFUSAL]


async def test_a_plan_has_read_what_any_of_its_steps_has_read() -> None:
    office = Office(DENY)
    office.registry.enable_plan_execution()
    steps = [
        {"tool": "mail", "args": {}, "id": "m"},
        {"tool": "note", "args": {"text": "x"}, "id": "n", "depends_on": ["m"]},
        {"tool": "post", "args": {"text": {"$ref": "n"}}},
    ]

    rows = (await office.registry.execute("execute_plan", {"steps": steps})).value

    assert [row["status"] for row in rows] == ["ok", "ok", "error"] and rows[2]["error"] == REFUSAL


@each_row("own", [False, True])
async def test_calls_of_a_tool_count_for_the_run_that_called_it_also_in_a_run_of_their_own(own: bool) -> None:
    office, run = Office(DENY), RunContext()

    @office.registry.tool
    async def inside(context: ToolContext, tool: str) -> str:
        """Call another of these tools in some run."""
        return (await office.call(tool, RunContext() if own else context.run)).text

    async def call_inside(tool: str) -> str:
        return (await office.registry.dispatch("inside", {"tool": tool}, context=run)).text

    assert await call_inside("mail") == "the code is 1234"
    assert (await office.call("post", run)).text == REFUSAL
    assert await call_inside("post") == REFUSAL


@each_row(("reader", "sender"), [("main", "aide"), ("aide", "main"), ("aide", "aide")])
async def test_a_sub_agent_neither_loses_labels_nor_keeps_them_to_itself(reader: str, sender: str) -> None:
    office = Office(DENY)
    mail, post, ask = calls(("mail", {})), calls(("post", {"text": "x"})), calls(("aide", {"task": "help"}))
    of_aide = [mail] * (reader == "aide") + [post] * (sender == "aide")
    of_main = [mail] * (reader == "main") + [ask] + [post] * (sender == "main")
    aide = Agent(ScriptedModel([*of_aide, "done"]), tools=office.registry)
    main = Agent(ScriptedModel([*of_main, "end"]), tools=office.registry)
    main.add_subagent(aide.as_tool("aide", "Helps with all the mail there is."))

    assert (await main.run("go")).content == "end"
    assert office.done == ["mail"]


async def test_a_conversation_keeps_its_labels_from_prompt_to_prompt_and_as_json() -> None:
    office = Office(DENY)
    post = calls(("post", {"text": "x"}))
    agent = Agent(ScriptedModel([post, "a", calls(("mail", {})), "b", post, "c", post, "d"]), tools=office.registry)
    for prompt in ("post", "read", "post"):
        await agent.run(prompt)
    saved = json.loads(json.dumps(agent.messages))
    later = ToolLoopConfig(provider=ScriptedModel([post, "e"]), tools=office.registry)

    assert (await run_tool_loop(later, saved)).messages[-2]["content"] == REFUSAL
    agent.reset()
    await agent.run("post")
    assert office.done == ["post", "mail", "post"]
    assert not any("labels" in message for message in to_openai(saved))

    @office.registry.tool
    async def recall() -> str:
        """Go on with a conversation of another day."""
        loop = ToolLoopConfig(provider=ScriptedModel(["the code is 1234"]), tools=office.registry)
        return (await run_tool_loop(loop, saved, context=RunContext())).content

    await Agent(ScriptedModel([calls(("recall", {})), post, "f"]), tools=office.registry).run("recall and post")
    assert office.done == ["post", "mail", "post"]


async def test_a_prompt_may_have_labels_and_wrong_ones_are_refused() -> None:
    office = Office(DENY)
    agent = Agent(ScriptedModel([calls(("post", {"text": "x"})), "a"]), tools=office.registry)

    with pytest.raises(UsageError, match="a message's labels: a label is a text"):
        await agent.run([{"role": "user", "content": "x", "labels": [7]}])
    await agent.run([{"role": "user", "content": "my letter", "labels": ["private"]}])
    assert not office.done


async def test_ask_means_that_somebody_approves_each_call_and_reads_why() -> None:
    office, run, asked = Office(ASK), RunContext(), list[str]()

    def decide(call: Any) -> Any:
        asked.append(call.approval_reason)
        return Approve() if len(asked) == 1 else None

    office.registry.add_hook(approval_hook(decide))
    texts = [(await office.call(tool, run)).text for tool in ("post", "mail", "post", "post")]

    assert texts[:3] == ["posted", "the code is 1234", "posted"] and "no valid approval decision" in texts[3]
    assert asked == ['needs approval: it sends to "public", and this run has read "private"'] * 2


async def test_without_anybody_to_ask_such_a_call_is_refused() -> None:
    office, run = Office(ASK), RunContext()
    await office.call("mail", run)

    refused = (await office.call("post", run)).text
    assert refused.startswith('tool "post" needs approval: it sends to "public"') and "nobody approved" in refused


async def test_an_answer_of_a_hook_is_as_private_as_that_of_its_tool_and_a_blocked_call_reads_nothing() -> None:
    for answer, label in ((Substitute(ToolResult.ok("cached mail")), "private"), (Block("no"), "")):
        office, run = Office(DENY), RunContext()
        office.registry.add_hook(before=lambda call, answer=answer: answer if call.name == "mail" else None)
        await office.call("mail", run)
        assert run.state.labels.names == ({label} if label else frozenset())


async def test_rules_of_a_registry_hold_in_those_made_of_it_and_deny_is_stronger_than_ask() -> None:
    office = Office(ASK)
    office.registry.policy.add_flow(Flow("*", "pub*"))
    for registry in (office.registry.subset(["mail", "post"]), office.registry.merged(), office.registry.snapshot()):
        run = RunContext(state=RunState(labels=["private"]))
        assert (await registry.dispatch("post", {"text": "x"}, context=run)).text == REFUSAL


@each_row(
    ("make", "message"),
    [
        (lambda: Flow("", "x"), "Flow.src.: a label is a text of 1 to 64 characters, not ''"),
        (lambda: Flow("a", 7), "Flow.dst.: a label is a text"),  # type: ignore[arg-type]
        (lambda: Flow("a", "b", "warn"), 'must be "ask" or "deny", not \'warn\''),  # type: ignore[arg-type]
        (lambda: ToolRegistry().policy.add_flow(("a", "b")), "write Flow"),  # type: ignore[arg-type]
        (lambda: RunState(labels=[""]), "labels: a label"),
    ],
)
def test_what_is_no_label_or_flow_is_refused_where_it_is_written(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@each_row(
    ("flow", "said"),
    [
        (Flow("privat", "public"), "no tool has reads='privat'; did you mean 'private'[?]"),
        (Flow("private", "pubic", "ask"), "no tool has sends='pubic'; did you mean 'public'[?]"),
        (Flow("private", "mars"), "no tool has sends='mars'$"),
        (Flow("priv*", "public"), ""),
        (Flow("secret*", "m[a]rs"), ""),
    ],
    ids=str,
)
async def test_a_rule_about_a_label_that_no_tool_has_is_warned_of_when_a_runtime_opens(flow: Flow, said: str) -> None:
    policy, office = Policy(flows=(flow,)), Office()
    for registry in (office.registry, ToolRegistry()):  # without labels, the tools may come with each run
        runtime = Runtime(registry, backend=FakeBackend([]), policy=policy, allow_unisolated=True)
        is_warned = bool(said) and registry is office.registry
        with pytest.warns(UserWarning, match=said) if is_warned else nullcontext():
            await runtime.open()
        await runtime.close()


def test_a_tool_with_a_wrong_label_is_not_registered() -> None:
    with pytest.raises(RegistrationError, match="reads: a label"):
        ToolRegistry().tool(lambda: None, name="x", description="Does nothing.", reads=["x" * 65])  # type: ignore[call-overload]


LABELS = st.sampled_from(["mail", "files", "web", "log"])
FLOWS = st.builds(Flow, st.sampled_from(["mail", "files", "*"]), LABELS, st.sampled_from(["ask", "deny"]))


@given(flows=st.lists(FLOWS, max_size=4), sends=st.sets(LABELS), held=st.sets(LABELS))
def test_the_strictest_rule_decides(flows: list[Flow], sends: set[str], held: set[str]) -> None:
    about = {
        flow.action
        for flow in flows
        if any(fnmatch.fnmatch(each, flow.dst) for each in sends)
        and any(fnmatch.fnmatch(each, flow.src) for each in held)
    }
    found = flow_of(flows, sends, held)
    assert (found[0] if found else None) == ("deny" if "deny" in about else "ask" if about else None)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["add", "join"]), LABELS), max_size=20
    )
)
def test_joined_runs_have_all_labels_in_common(steps: list[tuple[int, int, str, str]]) -> None:
    runs = [Labels() for _ in range(4)]
    groups: list[set[int]] = [{index} for index in range(4)]
    read: list[set[str]] = [set() for _ in range(4)]
    for one, other, what, label in steps:
        if what == "add":
            runs[one].add({label})
            read[one].add(label)
        else:
            runs[one].join(runs[other])
            together = groups[one] | groups[other]
            for index in together:
                groups[index] = together
    for index in range(4):
        assert runs[index].names == set().union(*(read[each] for each in groups[index]))


ROUTES = st.sampled_from(["call", "batch", "plan", "through"])
TOOLS = st.lists(st.sampled_from(["mail", "post", "note"]), min_size=1, max_size=3)


@pytest.mark.slow
@given(script=st.lists(st.tuples(ROUTES, TOOLS), max_size=6))
@settings(deadline=None, max_examples=60)
def test_whatever_way_a_run_calls_nothing_is_posted_after_mail_was_read(script: list[tuple[str, list[str]]]) -> None:
    office = Office(DENY)
    office.registry.enable_plan_execution()

    async def main() -> None:
        run = RunContext()
        for route, tools in script:
            pairs = [(tool, {} if tool == "mail" else {"text": "x"}) for tool in tools]
            if route == "batch":
                await office.registry.execute_batch(pairs, context=run)
            elif route == "plan":
                steps = [{"tool": tool, "args": args} for tool, args in pairs]
                await office.registry.dispatch("execute_plan", {"steps": steps}, context=run)
            else:
                for tool, args in pairs:
                    name, given_args = (tool, args) if route == "call" else ("through", {"tool": tool})
                    await office.registry.dispatch(name, given_args, context=run)

    anyio.run(main)
    assert "mail" not in office.done or "post" not in office.done[office.done.index("mail") :]
