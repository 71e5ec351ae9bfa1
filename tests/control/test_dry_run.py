"""A dry run collects the calls of tools that write; a commit makes exactly those, once, on the path of every call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

import journals
from rows import each_row
from toolcell import (
    Agent,
    ExecutionResult,
    Outcome,
    PoolConfig,
    RunContext,
    Runtime,
    SyncRuntime,
    ToolError,
    ToolRegistry,
    UsageError,
)
from toolcell.agents.providers.provider import ModelResponse
from toolcell.calls.arguments import ToolCall
from toolcell.calls.call import Block, Rewrite
from toolcell.calls.context import current_context
from toolcell.calls.hooks import approval_hook
from toolcell.control import Draft
from toolcell.control.draft import COMMITTED
from toolcell.flows import Flow
from toolcell.results import CommitResult
from toolcell.support.host_work import about_bytes
from toolcell.tools import Approve

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


class Folders:
    """A tree of folders: each write depends on the ids that earlier ones returned."""

    def __init__(self) -> None:
        self.ledger: list[Any] = []
        self.registry = ToolRegistry()
        registry = self.registry

        @registry.tool
        async def create(name: str, parent: int | None = None) -> int:
            """Create a folder and return its number."""
            self.ledger.append(["create", name, parent])
            return 100 + len(self.ledger)

        @registry.tool(requires_approval=True)
        async def move(ids: list[int], to: int, note: str = "") -> dict[str, Any]:
            """Move folders into another."""
            self.ledger.append(["move", ids, to, note])
            return {"to": to, "ids": ids}

        @registry.tool(read_only=True)
        async def count() -> int:
            """Count what was made."""
            return len(self.ledger)

        @registry.tool(read_only=True)
        async def look_at(folder: int) -> str:
            """Describe a folder."""
            return f"folder {folder}"

        @registry.tool
        async def refuse(folder: int) -> None:
            """Fail after a part of the work."""
            self.ledger.append(["refuse", folder])
            raise ValueError("the disk is full")


@pytest.fixture
def folders() -> Folders:
    return Folders()


def dry(runtime: SyncRuntime, folders: Folders, source: str, **options: Any) -> ExecutionResult:
    return runtime.execute_code(source, tools=folders.registry, dry_run=True, **options)


TWENTY = """
root = call_tool('create', name='root')
made = [root]
for n in range(12):
    made.append(call_tool('create', name=f'f{n}', parent=made[n // 2]))
made += call_tools_parallel([('create', {'name': f'p{n}', 'parent': made[-1]}) for n in range(4)])
for n in range(3):
    call_tool('move', ids=[made[n], made[n + 1]], to=made[-1], note=str(n))
set_result({'root': root, 'all': made})
"""


def test_twenty_writes_that_depend_on_each_other_are_listed_and_committed_as_the_script_would_have_made_them(
    opened: SyncRuntime, folders: Folders
) -> None:
    direct = Folders()
    direct.registry.add_hook(approval_hook(lambda call: Approve()))
    made = opened.execute_code(TWENTY, tools=direct.registry)
    draft = dry(opened, folders, TWENTY)

    assert draft.ok and not folders.ledger
    assert len(draft.effects) == 20 and {call.status for call in draft.calls} == {"collected"}
    assert draft.effects[0].line == 2 and draft.effects[1].depends_on == ("effect-1",)
    assert draft.effects[-1].depends_on == ("effect-3", "effect-4", "effect-17")
    assert 'effect-2: create(name="f0", parent=<result of effect-1>)  (line 5)' in str(draft)

    done = opened.commit(draft)

    assert done.ok and folders.ledger == direct.ledger and len(folders.ledger) == 20
    assert done.value == made.value and done.has_value


A_AND_B = "r = call_tool('create_issue', title='A')\n{}\nx = call_tool('create_issue', title='B')\nset_result(1)"
EACH = "for t in ['A', 'B']:\n    try:\n        {}\n    except Exception as e:\n        errors.append(str(e))\n"

AS_MODELS_WRITE: dict[str, tuple[str, bool, int]] = {
    "prints results": (A_AND_B.format("print(r); print('made', r)"), True, 2),
    "formats a result": (A_AND_B.format("print(f'created {r}')"), True, 2),
    "formats members": (A_AND_B.format("print(f\"created {r['id']} at {r['url']}\")"), True, 2),
    "passes an id on": (
        "r = call_tool('create_issue', title='A')\ncall_tool('comment', issue=r['id'], text='x')",
        True,
        2,
    ),
    "collects ids in a loop": (
        "ids = []\nfor name in sorted(call_tool('names')):\n    r = call_tool('create_issue', title=name)\n"
        "    ids.append(r['id'])\nprint(f'{len(ids)} made')\nset_result({'ids': ids, 'first': ids[0]})",
        True,
        2,
    ),
    "compares with None": (
        "r = call_tool('create_issue', title='A')\nif r is not None and r != None:\n"
        "    call_tool('comment', issue=r.get('id'), text='x')",
        True,
        2,
    ),
    "passes a result on": (
        "r = call_tool('create_issue', title='A')\n[call_tool('create_issue', title='B', of=r), r]",
        True,
        2,
    ),
    "catches errors": (
        "made, errors = [], []\n"
        + EACH.format("r = call_tool('create_issue', title=t); made.append({'title': t, 'id': r['id']})")
        + "print(made, errors)\nset_result({'made': made, 'errors': errors})",
        True,
        2,
    ),
    "calls in parallel": (
        "rs = call_tools_parallel([('create_issue', {'title': t}) for t in 'AB'])\n"
        "set_result({'urls': [r['url'] for r in rs], 'labels': rs[0]['labels'][0]})",
        True,
        2,
    ),
    "asks whether there is a result": (A_AND_B.format("assert r"), False, 1),
    "writes JSON": (A_AND_B.format("import json; print(json.dumps(r))"), False, 1),
    "counts": (A_AND_B.format("print(len(r['labels']))"), False, 1),
    "sorts results": (
        "rs = [call_tool('create_issue', title=t) for t in 'AB']\nrs.sort(key=lambda r: r['id'])\nset_result(rs)",
        False,
        2,
    ),
}
"""A script, whether its dry run comes to the end, and how many of its two writes it shows."""


def tracker(ledger: list[Any]) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(read_only=True)
    def names() -> list[str]:
        """List the names of what is missing."""
        return ["b", "a"]

    @registry.tool
    def create_issue(title: str, of: Any = None) -> dict[str, Any]:
        """Create an issue in the tracker."""
        ledger.append([title, of])
        return {"id": len(ledger), "url": f"u/{len(ledger)}", "labels": ["x"]}

    @registry.tool
    def comment(issue: int, text: str) -> dict[str, Any]:
        """Add a comment to an issue."""
        ledger.append([issue, text])
        return {"id": len(ledger)}

    return registry


def test_scripts_as_models_write_them_show_their_writes_and_the_commit_makes_what_they_would_have_made(
    opened: SyncRuntime,
) -> None:
    direct, ledger = list[Any](), list[Any]()
    plain, collected = tracker(direct), tracker(ledger)
    shown = dict[str, tuple[bool, int]]()
    for name, (source, is_whole, _) in AS_MODELS_WRITE.items():
        draft = opened.execute_code(source, tools=collected, dry_run=True)
        shown[name] = draft.ok, len(draft.effects)
        assert not ledger and is_whole == ("may not be all" not in str(draft.error))
        if is_whole:
            made, done = opened.execute_code(source, tools=plain), opened.commit(draft)
            assert done.ok and ledger == direct and done.value == made.value, name
        ledger.clear(), direct.clear()
    assert shown == {name: (is_whole, writes) for name, (_, is_whole, writes) in AS_MODELS_WRITE.items()}

    draft = Draft()
    steps = [
        {"tool": "create_issue", "args": {"title": "A"}, "id": "a"},
        {"tool": "comment", "args": {"issue": {"$ref": "a.id"}, "text": {"$ref": "a.labels[0]"}}},
    ]
    assert [row["status"] for row in opened.execute_plan(steps, tools=collected, dry_run=draft)] == ["collected"] * 2
    assert opened.commit(draft).ok and ledger == [["A", None], [1, "x"]]


def test_tools_that_read_run_and_a_draft_without_writes_says_so(opened: SyncRuntime, folders: Folders) -> None:
    draft = dry(opened, folders, "call_tool('count') + 1")

    assert draft.value == 1 and draft.effects == ()
    assert "nothing was to be written" in str(draft)
    assert opened.commit(draft).effects == ()


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ("try:\n    a > 1\nexcept Exception:\n    pass", "not look into them"),
        ("match a:\n    case {'id': 1}: pass\n    case _: pass", "not look into them"),
        ("match a:\n    case {}: pass", "not look into them"),
        ("match [1, {'x': a}]:\n    case [1, {'x': [first, *_]}]: pass\n    case _: pass", "not look into them"),
        ("call_tool('look_at', folder=a)", "look_at has to run in a dry run"),
        ("try:\n    call_tool('look_at', folder=a)\nexcept BaseException:\n    pass", "look_at has to run"),
    ],
)
def test_looking_into_a_result_ends_the_draft_with_the_writes_until_there(
    opened: SyncRuntime, folders: Folders, rest: str, why: str
) -> None:
    source = (
        f"a = call_tool('create', name='a')\ncall_tool('move', ids=[], to=a)\n{rest}\ncall_tool('create', name='b')"
    )
    draft = dry(opened, folders, source)

    assert draft.outcome is Outcome.ERROR and draft.error is not None
    assert draft.error.type == "DraftEnded" and why in draft.error.message
    assert [effect.tool for effect in draft.effects] == ["create", "move"]
    assert opened.commit(draft).ok
    assert folders.ledger == [["create", "a", None], ["move", [], 101, ""]]


@pytest.mark.parametrize("lint", ["off", "standard"])
def test_what_is_known_is_matched_as_elsewhere(opened: SyncRuntime, folders: Folders, lint: str) -> None:
    source = """
a = call_tool('create', name='a')
match ['x', {'to': a}, 'y']:
    case {'to': _} | []:
        call_tool('create', name='wrong')
    case ['x', {'to': folder, **rest}, *others] if not rest:
        call_tool('create', name=others[0], parent=folder)
"""
    draft = opened.execute_code(source, tools=folders.registry, dry_run=True, lint=lint)

    assert draft.ok and [effect.args["name"] for effect in draft.effects] == ["a", "y"]


@pytest.mark.parametrize("looks", ["', '.join([a])", "'x'.replace('x', a)"])
def test_an_error_about_a_placeholder_says_what_that_is(opened: SyncRuntime, folders: Folders, looks: str) -> None:
    draft = dry(opened, folders, f"a = call_tool('create', name='a')\n{looks}")

    assert draft.error is not None and draft.error.line == 2
    assert "a Placeholder stands for the result of a call that a dry run collected" in draft.error.message
    own = opened.execute_code("class Placeholder: pass\nPlaceholder() + 1", tools=folders.registry)
    assert own.error is not None and own.error.message.endswith("'Placeholder' and 'int'")


def test_what_is_known_of_the_arguments_is_checked_at_once_and_the_rest_at_the_commit(
    opened: SyncRuntime, folders: Folders
) -> None:
    wrong = "a = call_tool('create', name='a')\ncall_tool('move', ids='no list', to=a)"
    draft = dry(opened, folders, wrong)
    assert draft.error is not None and "ids" in draft.error.message and len(draft.effects) == 1

    draft = dry(opened, folders, "m = call_tool('move', ids=[], to=1)\ncall_tool('create', name='x', parent=m)")
    done = opened.commit(draft)
    assert not done.ok and done.failed is not None and done.failed.status == "refused"
    assert "parent" in done.failed.error
    assert folders.ledger == [["move", [], 1, ""]]


def test_a_commit_stops_at_the_first_failure_and_reports_each_effect(opened: SyncRuntime, folders: Folders) -> None:
    source = "a = call_tool('create', name='a')\ncall_tool('refuse', folder=a)\ncall_tool('create', name='b')\n[a]"
    done = opened.commit(dry(opened, folders, source))

    assert [each.status for each in done.effects] == ["made", "failed", "not made"]
    assert done.effects[1].args == {"folder": 101} and "disk is full" in done.effects[1].error
    assert folders.ledger == [["create", "a", None], ["refuse", 101]]
    assert done.value == [101] and not done.ok


def test_only_what_was_approved_is_made(opened: SyncRuntime, folders: Folders) -> None:
    source = (
        "a = call_tool('create', name='a')\nb = call_tool('create', name='b')\ncall_tool('create', name='c', parent=a)"
    )
    draft = dry(opened, folders, source)
    for approve, said in (
        (["effect-3"], "effect-3 needs the result of effect-1, which is not approved"),
        (["effect-1", "effect-9"], "this draft has no effect-9; it has: effect-1, effect-2, effect-3"),
        ("effect-1", 'approve must be "all", a draft'),
        (7, 'approve must be "all", a draft'),
        (draft.effects, r"ids of effects, such as \[effect.id for"),
    ):
        with pytest.raises(UsageError, match=said):
            opened.commit(draft, approve)
    assert not folders.ledger
    done = opened.commit(draft, ["effect-1", "effect-3"])

    assert done.ok and [each.status for each in done.effects] == ["made", "not approved", "made"]
    assert folders.ledger == [["create", "a", None], ["create", "c", 101]]


def test_a_draft_is_committed_once_here_and_in_time(opened: SyncRuntime, folders: Folders) -> None:
    draft = dry(opened, folders, "call_tool('create', name='a')")
    opened.commit(draft)
    now = [0.0]
    late = Draft(keep_s=10, clock=lambda: now[0])
    now[0] = 11
    plain = opened.execute_code("1")
    foreign = SyncRuntime()
    with pytest.raises(UsageError, match="was committed already"):
        opened.commit(draft)
    with pytest.raises(UsageError, match="expired at 1970-01-01 00:00:10 UTC"):
        opened.commit(late)
    with pytest.raises(UsageError, match="was not a dry run"):
        opened.commit(plain)
    with pytest.raises(UsageError, match="a Draft, not 7"):
        opened.commit(7)
    with pytest.raises(UsageError, match="no draft of run"):
        foreign.runtime.dry_runs.drafts.find(draft)
    with pytest.raises(UsageError, match="cannot be suspended"):
        dry(opened, folders, "1", on_approval="suspend")
    with pytest.raises(UsageError, match="takes True or a Draft"):
        opened.execute_code("1", dry_run=3)
    assert len(folders.ledger) == 1


@pytest.mark.anyio
async def test_a_draft_that_was_used_says_that_trying_again_does_not_help(folders: Folders) -> None:
    draft = Draft()
    draft.state = COMMITTED
    refusal = await folders.registry.dispatch("create", {"name": "a"}, context=RunContext().having(draft))

    assert refusal.error is not None and not refusal.error.retryable
    assert "was committed already; make another dry run" in refusal.message
    assert folders.ledger == []


@pytest.mark.anyio
@each_row("items", [[[]] * 10_000, json.dumps([[]] * 10_000), [[each] for each in map(str, range(10_000))]])
async def test_a_draft_counts_arguments_as_they_were_sent_and_as_they_were_checked(items: Any) -> None:
    registry, draft = ToolRegistry(), Draft()

    @registry.tool
    def put(items: list[list[int]]) -> None:
        """Put all of the items."""

    taken = await registry.dispatch("put", {"items": items}, context=RunContext().having(draft))
    [collected] = draft.collected
    assert not taken.is_error
    assert draft.size >= about_bytes(collected.call.args) + about_bytes(items)


def test_recheck_makes_nothing_when_a_read_has_changed(opened: SyncRuntime, folders: Folders) -> None:
    draft = dry(opened, folders, "call_tool('create', name=str(call_tool('count')))")
    folders.ledger.append("somebody else")
    with pytest.raises(UsageError, match="count has another result now"):
        opened.commit(draft, recheck=True)
    assert folders.ledger == ["somebody else"]
    folders.ledger.clear()

    assert opened.commit(draft, recheck=True).ok
    assert folders.ledger == [["create", "0", None]]


def test_recheck_makes_no_write_that_a_tool_which_reads_makes_below_it(opened: SyncRuntime, folders: Folders) -> None:
    @folders.registry.tool(read_only=True)
    async def look_and_write() -> str:
        """Describe a folder, and make one."""
        return (await current_context().call_tool("create", {"name": "below"})).status

    draft = dry(opened, folders, "call_tool('look_and_write')")

    assert opened.commit(draft, recheck=True).ok and folders.ledger == [["create", "below", None]]


def test_hooks_rules_and_arguments_hold_at_the_commit_as_in_every_call(opened: SyncRuntime, folders: Folders) -> None:
    registry = folders.registry
    names = {"a": "A"}
    registry.add_hook(before=lambda call: Rewrite({**call.args, "name": names.get(call.args["name"], "x")}))
    draft = dry(opened, folders, "call_tool('create', name='a')")
    assert draft.effects[0].args["name"] == "A"
    assert opened.commit(draft).ok and folders.ledger == [["create", "A", None]]

    draft = dry(opened, folders, "call_tool('create', name='a')")
    names["a"] = "B"  # the hook has changed its mind
    done = opened.commit(draft)
    assert done.failed is not None and "would not be those of the draft" in done.failed.error

    draft = dry(opened, folders, "call_tool('create', name='a')")
    registry.blacklist("create")
    done = opened.commit(draft)
    assert done.failed is not None and "not permitted" in done.failed.error
    assert len(folders.ledger) == 1


def test_a_write_that_a_hook_blocks_is_no_effect(opened: SyncRuntime, folders: Folders) -> None:
    folders.registry.add_hook(before=lambda call: Block("not today"))
    draft = dry(opened, folders, "call_tool('create', name='a')")

    assert draft.error is not None and "not today" in draft.error.message and not draft.effects


def test_a_hook_that_adds_an_argument_at_the_commit_makes_nothing(opened: SyncRuntime, folders: Folders) -> None:
    adds = False
    folders.registry.add_hook(before=lambda call: Rewrite({**call.args, "note": "x"}) if adds else None)
    registry = folders.registry.merged()

    @registry.tool(extras="allow")
    async def anything(name: str) -> str:
        """Take whatever comes along."""
        folders.ledger.append(name)
        return name

    draft = opened.execute_code("call_tool('anything', name='a')", tools=registry, dry_run=True)
    adds = True
    done = opened.commit(draft)
    assert done.failed is not None and done.failed.status == "refused" and not folders.ledger


def test_plans_and_batches_are_drafted_with_a_draft_of_their_own(opened: SyncRuntime, folders: Folders) -> None:
    draft = Draft()
    rows = opened.execute_plan(
        [
            {"tool": "create", "args": {"name": "a"}, "id": "a"},
            {"tool": "create", "args": {"name": "b", "parent": {"$ref": "a"}}, "id": "b"},
            {"tool": "count", "args": {}},
            {"tool": "create", "args": {"name": "c", "parent": {"$ref": "a.id"}}, "depends_on": ["b"]},
        ],
        tools=folders.registry,
        dry_run=draft,
    )
    assert [row["status"] for row in rows] == ["collected", "collected", "ok", "collected"]
    assert "parent=<id of the result of effect-1>)" in str(draft)

    async def batch() -> None:
        run = RunContext().having(draft)
        await folders.registry.execute_batch([("create", {"name": "d"}), ("count", {})], context=run)

    anyio.run(batch)
    assert not folders.ledger
    done = opened.commit(draft)
    assert [each.status for each in done.effects] == ["made", "made", "refused", "not made"]
    assert "the result of effect-1 does not have what create was to be given" in done.effects[2].error
    assert folders.ledger == [["create", "a", None], ["create", "b", 101]]


def test_calls_below_a_tool_that_reads_are_collected_and_those_below_a_write_belong_to_it(
    opened: SyncRuntime, folders: Folders
) -> None:
    registry = folders.registry

    @registry.tool(read_only=True)
    async def sneaky() -> Any:
        """Say that it reads, and write."""
        return (await registry.dispatch("create", {"name": "below"})).value

    @registry.tool
    async def both() -> Any:
        """Write through another tool."""
        return (await registry.dispatch("create", {"name": "inner"})).value

    draft = dry(opened, folders, "a = call_tool('sneaky')\ncall_tool('move', ids=[a], to=call_tool('both'))")
    assert [effect.tool for effect in draft.effects] == ["create", "both", "move"] and not folders.ledger
    assert opened.commit(draft).ok
    assert folders.ledger == [["create", "below", None], ["create", "inner", None], ["move", [101], 102, ""]]


@pytest.mark.slow
def test_a_record_and_repairs_know_no_writes_of_a_dry_run(tmp_path: Path, folders: Folders) -> None:
    async def main() -> CommitResult:
        async with Runtime(folders.registry, record=tmp_path / "runs") as runtime:
            draft = await runtime.execute_code("call_tool('create', name='a')\n1/0", dry_run=True)
            assert journals.names(tmp_path / "runs") == [] and runtime.interrupted_runs() == []
            with pytest.raises(UsageError, match="no journal of that run"):
                await runtime.execute_code("1", repairs=draft)
            async with runtime.session() as session:
                await session.execute_code("call_tool('create', name='b')", context=RunContext().having(Draft()))
            assert journals.names(tmp_path / "runs") == [] and runtime.interrupted_runs() == []
            return await runtime.commit(draft)

    done = anyio.run(main)
    from toolcell.audit.filters import Filter
    from toolcell.audit.query import Index

    with Index(tmp_path / "runs") as index:
        runs = [index.load(line) for line in index.runs(Filter(limit=None))]
    drafted = next(run for run in runs if run.kind == "code" and run.calls)
    committed = next(run for run in runs if run.id == done.run_id)

    assert drafted.calls[0].start_extra["verdict"] == "substituted" and drafted.who["dry_run"]
    assert [call.tool for call in committed.calls] == ["create"] and folders.ledger == [["create", "a", None]]


class Model:
    """Makes one call per turn: of a sub-agent, of a script, then of a tool with the placeholder it was given."""

    model = "scripted"

    def __init__(self, *turns: Any) -> None:
        self.turns, self.seen = list(turns), list[str]()

    async def chat(self, messages: Any, tools: Any, model: str, options: Any) -> ModelResponse:
        self.seen.append(str(messages[-1].get("content")))
        turn = self.turns.pop(0)
        if callable(turn):
            turn = turn(self.seen[-1])
        return ModelResponse(turn) if isinstance(turn, str) else ModelResponse("", (ToolCall("c1", *turn),))


def test_an_agent_its_sub_agent_and_their_scripts_collect_into_one_draft(folders: Folders) -> None:
    def with_placeholder(text: str) -> Any:
        reference = json.loads(text[text.index("{") : text.index("}") + 1])
        return "create", {"name": "by model", "parent": reference}

    below = Model(("create", {"name": "below"}), "done")
    above = Model(
        ("agent_below", {"task": "go"}),
        ("execute_code", {"code": "call_tool('create', name='script')"}),
        ("create", {"name": "first"}),
        with_placeholder,
        "all done",
    )
    draft = Draft()

    async def main() -> CommitResult:
        async with Runtime(folders.registry, pool=PoolConfig(warm=1)) as runtime:
            agent = Agent(above, tools=folders.registry, code_execution=runtime, repair=True)
            inner = Agent(below, tools=folders.registry)
            agent.add_subagent("agent_below", "Does a part of the work.", inner)
            result = await agent.run("Tidy up", context=RunContext().having(draft))
            assert result.content == "all done", result
            assert not folders.ledger
            return await runtime.commit(draft)

    done = anyio.run(main)
    assert done.ok, done
    assert "dry run: this call was collected, and it was not made" in above.seen[2]
    names = [("below", None), ("script", None), ("first", None), ("by model", 103)]
    assert folders.ledger == [["create", name, parent] for name, parent in names]


@pytest.mark.parametrize("action", ["deny", "ask"])
def test_what_a_run_had_read_decides_at_the_commit_what_is_sent(action: Any, opened: SyncRuntime) -> None:
    registry, sent = ToolRegistry(), list[str]()
    registry.policy.add_flow(Flow("private", "public", action))

    @registry.tool(reads="private")
    async def take_mail() -> str:
        """Take a mail out of the box: a write that reads."""
        return "secret"

    @registry.tool(sends="public")
    async def publish(text: str) -> str:
        """Publish a text for everybody."""
        sent.append(text)
        return text

    first = "call_tool('publish', text='before')\n"
    draft = opened.execute_code(
        first + "call_tool('publish', text=call_tool('take_mail'))", tools=registry, dry_run=True
    )
    if action == "deny":
        assert draft.error is not None and "has read" in draft.error.message
    assert opened.commit(draft).ok
    assert sent == (["before"] if action == "deny" else ["before", "secret"])


def test_a_preview_stands_in_for_the_result_and_may_be_looked_into(opened: SyncRuntime) -> None:
    registry, made = ToolRegistry(), list[str]()

    def preview(name: str, size: int = 1) -> dict[str, Any]:
        if name == "taken":
            raise ToolError("there is such a file already")
        return {"name": name.lower(), "size": size}

    @registry.tool(preview=preview)
    async def save(name: str, size: int = 1) -> dict[str, Any]:
        """Save a file and describe it."""
        made.append(name)
        return {"name": name.lower(), "size": size}

    source = (
        "a = call_tool('save', name='A')\n"
        "try:\n    call_tool('save', name='taken')\nexcept ToolError as error:\n    print(error)\n"
        "call_tool('save', name=a['name'] + 'b', size=a['size'])"
    )
    draft = opened.execute_code(source, tools=registry, dry_run=True)

    assert draft.ok and draft.value == {"name": "ab", "size": 1} and "such a file already" in draft.logs.text
    assert [(effect.id, effect.args["name"]) for effect in draft.effects] == [("effect-1", "A"), ("effect-3", "ab")]
    assert [call.status for call in draft.calls] == ["collected", "error", "collected"] and not made
    assert opened.commit(draft).ok and made == ["A", "ab"]


def test_a_preview_and_a_revert_that_are_no_functions_are_refused() -> None:
    for option in ("preview", "revert"):
        with pytest.raises(UsageError, match=f"{option} must be a function, not 'x'"):
            ToolRegistry().tool(**{option: "x"})(lambda: None)


@pytest.mark.slow
def test_a_dry_run_on_the_record_replays_with_its_placeholders(tmp_path: Path, folders: Folders) -> None:
    from toolcell.audit.filters import Filter
    from toolcell.audit.query import Index
    from toolcell.control.replays import Replay, replay

    sources = ["a = call_tool('create', name='a')\n[a]", "a = call_tool('create', name='a')\nprint(a)"]

    async def main() -> list[Replay]:
        async with Runtime(folders.registry, pool=PoolConfig(warm=1), record=tmp_path / "runs.db") as runtime:
            for source in sources:
                await runtime.execute_code(source, dry_run=True)
        with Index(tmp_path / "runs.db") as index:
            runs = [index.load(line) for line in index.runs(Filter(limit=None))]
        async with Runtime(pool=PoolConfig(warm=1), **runs[0].runtime_options()) as runtime:
            return [await replay(runtime, run) for run in runs]

    replays = anyio.run(main)
    assert len(replays) == 2 and all(each.ok for each in replays), replays
    assert not folders.ledger


@pytest.mark.slow
def test_an_agent_that_may_be_suspended_makes_no_dry_run(folders: Folders) -> None:
    agent = Agent(Model(), tools=folders.registry, on_approval="suspend")

    async def main() -> None:
        await agent.run("Tidy up", context=RunContext().having(Draft()))

    with pytest.raises(UsageError, match="a dry run cannot be suspended"):
        anyio.run(main)
