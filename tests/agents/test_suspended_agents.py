"""An agent that waits for a person: its loop ends as suspended, and goes on from its transcript, also in another process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolcell import Agent, AuditLog, PoolConfig, ResumeError, RunContext, Runtime, ToolRegistry, UsageError
from toolcell.agents import ToolLoopResult
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.control.agent_turns import TurnApprovals
from toolcell.flows import Flow
from toolcell.journal.store import JournalStore
from toolcell.tools import AlreadyMade, Approve, Deny, Edit, Event, Rewrite

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


class Bank:
    """Payments that need approval, a note that does not, and a ledger of both."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.registry = registry = ToolRegistry()

        @registry.tool(requires_approval=True)
        async def pay(to: str, euros: int = 1) -> str:
            """Send money to somebody."""
            self.done.append(f"pay {to} {euros}")
            return f"paid {to} {euros}"

        @registry.tool
        async def note(text: str) -> str:
            """Write a text into the notebook."""
            self.done.append(f"note {text}")
            return "noted"

        @registry.tool(reads="private", read_only=True)
        async def mail() -> str:
            """Read all the mail there is."""
            return "secret"

        @registry.tool(sends="public")
        async def post(text: str) -> str:
            """Post a text where everybody can read it."""
            self.done.append(f"post {text}")
            return "posted"

    def agent(self, *replies: Any, **options: Any) -> Agent:
        options.setdefault("on_approval", "suspend")
        return Agent(ScriptedModel(replies), tools=self.registry, **options)


def answers(result: ToolLoopResult) -> list[str]:
    return [message["content"] for message in result.messages if message["role"] == "tool"]


BOTH = calls(("pay", {"to": "a"}), ("note", {"text": "n"}), ("pay", {"to": "b"}))
A, B = "call_0_pay", "call_2_pay"


async def test_calls_that_need_approval_wait_and_the_others_are_made() -> None:
    bank = Bank()
    agent = bank.agent(BOTH, "end")
    result = await agent.run("go")

    assert result.stop_reason == "suspended" and not result.is_error and result.suspension is not None
    assert [(call.id, call.tool, call.args["to"]) for call in result.suspension.calls] == [
        (A, "pay", "a"),
        (B, "pay", "b"),
    ]
    assert bank.done == ["note n"] and answers(result) == ["noted"]

    result = await agent.resume(result.suspension, {A: Approve(), B: Deny("not b")})
    assert (result.content, result.stop_reason) == ("end", "final")
    assert bank.done == ["note n", "pay a 1"]
    assert answers(result) == ["paid a 1", "noted", "not b"]


async def test_a_call_without_a_decision_waits_again_and_an_edit_is_what_runs() -> None:
    bank = Bank()
    agent = bank.agent(BOTH, "end")
    first = (await agent.run("go")).suspension
    assert first is not None
    second = (await agent.resume(first, {B: Edit({"to": "c", "euros": 7})})).suspension
    assert second is not None and [call.id for call in second.calls] == [A]
    assert bank.done == ["note n", "pay c 7"]
    assert (await agent.resume(second.to_json(), {A: Approve()})).content == "end"
    assert bank.done == ["note n", "pay c 7", "pay a 1"]


async def test_what_is_wrong_with_a_token_is_said_and_nothing_is_made() -> None:
    bank = Bank()
    agent = bank.agent(BOTH, "end", "more")
    suspension = (await agent.run("go")).suspension
    assert suspension is not None
    token, before = suspension.to_json(), list(bank.done)
    changed = json.loads(token)
    changed["toolcell_turn"]["toolcell_suspension"]["calls"][0]["args"]["to"] = "eve"
    other = bank.agent("x")
    other.messages = agent.messages
    late = json.loads(json.dumps(agent.messages))

    for given, decisions, message in [
        ("{}", {}, "is not a token of a suspended agent"),
        (json.dumps(changed["toolcell_turn"]), {}, "token of a suspended run, not of an agent"),
        (json.dumps(changed), {}, "was changed"),
        (token, {"call_9": Approve()}, f"no call call_9 waits for a decision; these do: {A}, {B}"),
        (token, {A: AlreadyMade(1)}, "was not made: decide with"),
        (token, {A: "yes"}, "is Approve"),
    ]:
        with pytest.raises(UsageError, match=message):
            await agent.resume(given, decisions)
    with pytest.raises(ResumeError, match="signed elsewhere"):
        await other.resume(token)
    agent.messages = [*late, {"role": "user", "content": "and also"}]
    with pytest.raises(ResumeError, match="conversation is not the one"):
        await agent.resume(token)
    agent.messages = late
    with pytest.raises(ResumeError, match="other tools"):
        await agent.resume(token, tools=ToolRegistry())
    assert bank.done == before

    await agent.resume(token, {A: Approve(), B: Approve()})
    agent.messages = late
    with pytest.raises(ResumeError, match=r"agent.messages|used already"):
        await agent.resume(token, {A: Approve()})
    assert sorted(bank.done) == sorted([*before, "pay a 1", "pay b 1"])


async def test_a_token_works_once_for_the_same_conversation() -> None:
    bank = Bank()
    agent = bank.agent(calls(("pay", {"to": "a"})), "end")
    suspension = (await agent.run("go")).suspension
    assert suspension is not None
    saved = json.loads(json.dumps(agent.messages))
    await agent.resume(suspension, {"call_0_pay": Approve()})
    agent.messages = saved
    with pytest.raises(ResumeError, match="used already"):
        await agent.resume(suspension, {"call_0_pay": Approve()})
    assert bank.done == ["pay a 1"]


async def test_a_new_prompt_leaves_the_calls_unmade_and_deny_refuses_them() -> None:
    bank = Bank()
    agent = bank.agent(calls(("pay", {"to": "a"})), "end")
    await agent.run("go")
    assert answers(await agent.run("never mind")) == ["No result provided"]
    refused = await bank.agent(calls(("pay", {"to": "a"})), "end", on_approval="deny").run("go")
    assert "cannot ask for approval" in answers(refused)[0]
    assert not bank.done
    with pytest.raises(UsageError, match="on_approval must be"):
        bank.agent(on_approval="later")


async def test_a_call_below_that_of_the_model_cannot_wait_and_says_what_to_do() -> None:
    bank = Bank()
    agent = bank.agent(calls(("aide", {"task": "pay"})), "end")
    model = ScriptedModel([calls(("pay", {"to": "a"})), "done"])
    agent.add_subagent(Agent(model, tools=bank.registry).as_tool("aide", "Pays what there is to pay."))
    result = await agent.run("go")

    assert result.content == "end" and not bank.done
    assert "let the tool that the model calls require approval" in model.requests[1].messages[-1]["content"]


async def test_a_step_of_a_plan_cannot_wait_and_the_model_reads_what_to_do() -> None:
    bank = Bank()
    plan = calls(("execute_plan", {"steps": [{"tool": "pay", "args": {"to": "a"}}]}))
    agent = bank.agent(plan, calls(("pay", {"to": "a"})), "end", plan_execution=True)
    result = await agent.run("go")

    assert result.stop_reason == "suspended" and not bank.done
    assert "call the tool by itself, not in a plan" in answers(result)[0]
    assert result.suspension is not None
    assert (await agent.resume(result.suspension, {"call_0_pay": Approve()})).content == "end"
    assert bank.done == ["pay a 1"]


async def test_a_flow_that_asks_makes_the_model_wait_and_labels_are_kept_meanwhile() -> None:
    bank = Bank()
    bank.registry.policy.add_flow(Flow("private", "public", "ask"))
    post = calls(("post", {"text": "x"}))
    agent = bank.agent(calls(("mail", {}), ("post", {"text": "x"})), "end", post)
    result = await agent.run("go")
    assert result.suspension is not None
    assert result.suspension.calls[0].reason.endswith('sends to "public", and this run has read "private"')
    await agent.resume(result.suspension, {"call_1_post": Approve()})
    assert bank.done == ["post x"]
    assert (await agent.run("again")).stop_reason == "suspended"


async def test_arguments_that_a_hook_changes_after_the_decision_are_not_run() -> None:
    bank, euros = Bank(), iter([5, 6])
    bank.registry.add_hook(before=lambda call: Rewrite({"to": "a", "euros": next(euros)}))
    agent = bank.agent(calls(("pay", {"to": "a"})), "end")
    suspension = (await agent.run("go")).suspension
    assert suspension is not None and suspension.calls[0].args["euros"] == 5
    result = await agent.resume(suspension, {"call_0_pay": Approve()})
    assert answers(result) == ["its arguments are not those that were decided about; it was not made"]
    assert not bank.done


def test_a_token_that_one_process_used_is_used_in_all(tmp_path: Path) -> None:
    turns = []
    with AuditLog(tmp_path / "runs.db") as one, AuditLog(tmp_path / "runs.db") as other:
        for log in (one, other):
            store = JournalStore(log)
            store.open()
            turns.append((store, [{"role": "user", "content": "x"}], None))
        token = TurnApprovals(*turns[0]).suspend("run").to_json()

        assert TurnApprovals.resumed(*turns[1], token, {}).is_resumed
        for turn in turns:
            with pytest.raises(ResumeError, match="used already"):
                TurnApprovals.resumed(*turn, token, {})


@pytest.mark.slow
@pytest.mark.isolation
async def test_what_a_script_that_waits_has_read_counts_for_the_calls_that_wait_beside_it() -> None:
    bank = Bank()
    bank.registry.policy.add_flow(Flow("private", "public", "ask"))

    @bank.registry.tool(requires_approval=True, sends="public")
    async def announce() -> str:
        """Announce what is to be announced."""
        bank.done.append("announce")
        return "announced"

    turn = calls(("execute_code", {"code": "call_tool('mail')\ncall_tool('pay', to='x')"}), ("announce", {}))
    reasons = []
    async with Runtime(pool=PoolConfig(warm=1)) as runtime:
        agent = bank.agent(turn, "end", code_execution=runtime)
        result = await agent.run("go")
        while (waiting := result.suspension) is not None:
            reasons.append([call.reason for call in waiting.calls if call.tool == "announce"])
            result = await agent.resume(waiting, {call.id: Approve() for call in waiting.calls})

    asked = 'needs approval: it sends to "public", and this run has read "private"'
    assert reasons == [["needs approval"], [asked]]
    assert bank.done == ["pay x 1", "announce"]


SCRIPT = "call_tool('note', text='begin')\nset_result([call_tool('pay', to=to) for to in 'xy'])"


FIRST = (
    "execute_code start", "pay start", "{'details': 'begun'}", "note start", "note end", r"{'text': 'printed\n'}",
    "pay start", "pay end",
)  # fmt: skip
LAST = ("{'details': 'paid'}", "note start", "note end", r"{'text': 'printed\nprinted last\n'}")


@pytest.mark.slow
@pytest.mark.isolation
async def test_listeners_are_told_of_what_happens_after_a_resume_as_before_it() -> None:
    """Listeners of the agent, also where the run has a context with a stream of events of its own."""
    script = """
progress("begun"); tools.note(text="first"); print("printed")
tools.pay(to="a")
progress("paid"); tools.note(text="last"); print("printed last")
"""
    told = list[str]()

    def listen(event: Event) -> None:
        if event.type in ("tool_execution_start", "tool_execution_end"):
            told.append(f"{event.tool} {event.type.rpartition('_')[2]}")
        elif event.type == "tool_execution_update":
            told.append(str(event.update))

    async with Runtime(pool=PoolConfig(warm=0)) as runtime:
        for first, again in ((None, None), (RunContext(), RunContext())):
            reply = calls(("execute_code", {"code": script}), ("pay", {"to": "b"}))
            agent = Bank().agent(reply, "end", code_execution=runtime)
            agent.events.subscribe(listen)
            waits = await agent.run("go", context=first)
            assert waits.suspension is not None
            assert sorted(told) == sorted([*FIRST, "pay end", "execute_code end"])
            told.clear()
            await agent.resume(waits.suspension, {each.id: Approve() for each in waits.suspension.calls}, context=again)
            assert sorted(told) == sorted([*FIRST, *LAST, "pay end", "execute_code end"])
            told.clear()


@pytest.mark.slow
@pytest.mark.isolation
async def test_a_script_of_the_model_waits_and_goes_on_in_another_process(tmp_path: Path) -> None:
    bank = Bank()
    turn = calls(("execute_code", {"code": SCRIPT}), ("pay", {"to": "z"}))
    async with Runtime(record=tmp_path / "runs", pool=PoolConfig(warm=1)) as runtime:
        result = await bank.agent(turn, code_execution=runtime).run("go")
    steps = []
    while result.stop_reason == "suspended":
        assert result.suspension is not None
        saved, token = json.dumps(result.messages), result.suspension.to_json()
        steps.append([call.id for call in result.suspension.calls])
        decisions = {
            call.id: Approve() for call in result.suspension.calls if call.id != "call_1_pay" or len(steps) > 1
        }
        async with Runtime(record=tmp_path / "runs", pool=PoolConfig(warm=1)) as later:
            agent = bank.agent("end", code_execution=later, repair=True)
            agent.messages = json.loads(saved)
            swapped = json.loads(token)
            swapped["scripts"] = {"call_1_pay": swapped["scripts"].popitem()[1]}
            with pytest.raises(ResumeError, match="conversation is not the one"):
                await agent.resume(json.dumps(swapped), decisions)
            result = await agent.resume(token, decisions)
            agent.messages = json.loads(saved)
            with pytest.raises(ResumeError, match="used already"):
                await agent.resume(token, decisions)

    script = "call_0_execute_code"
    assert steps == [[f"{script}/call_2", "call_1_pay"], [f"{script}/call_3", "call_1_pay"]]
    assert result.content == "end" and any("paid x 1" in text for text in answers(result))
    assert sorted(bank.done) == ["note begin", "pay x 1", "pay y 1", "pay z 1"]
