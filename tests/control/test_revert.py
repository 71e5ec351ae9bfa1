"""`Runtime.revert` undoes what a run or a commit has made: in reverse order, each call once, on the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from toolcell import Agent, Outcome, PoolConfig, RunContext, Runtime, SyncRuntime, ToolError, ToolRegistry, UsageError
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.audit.filters import Filter
from toolcell.audit.query import Index
from toolcell.compat import register_or_replace
from toolcell.control import Draft
from toolcell.tools import Approve, spec

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


class Files:
    """Files by name; each write can be undone, but for those of `shout`."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.undone: list[Any] = []
        self.locked: set[str] = set()
        self.registry = registry = ToolRegistry()

        def unsave(args: dict[str, Any], before: str | None) -> None:
            if args["name"] in self.locked:
                raise ToolError(f"{args['name']} is locked")
            self.undone.append(args["name"])
            if before is None:
                del self.files[args["name"]]
            else:
                self.files[args["name"]] = before

        @registry.tool(revert=unsave)
        async def save(name: str, text: str = "empty") -> str | None:
            """Save a file and return what it held before."""
            if text == "bad":
                raise ToolError("no")
            before = self.files.get(name)
            self.files[name] = text
            return before

        @registry.tool
        async def shout(text: str) -> str:
            """Say something that nobody can take back."""
            return text.upper()

        @registry.tool(read_only=True)
        async def look(name: str) -> str | None:
            """Read what a file holds."""
            return self.files.get(name)


@pytest.fixture
def files() -> Files:
    return Files()


WRITES = "for text in 'xyz':\n    call_tool('save', name='a', text=text)\ncall_tool('save', name='b')\ncall_tool('look', name='a')"


def statuses(result: Any) -> list[tuple[str, str]]:
    return [(each.status, each.args.get("text", "")) for each in result.calls]


def test_what_a_run_and_what_a_commit_made_is_undone_in_reverse_order(opened: SyncRuntime, files: Files) -> None:
    direct = opened.execute_code(WRITES, tools=files.registry)
    committed = opened.commit(opened.execute_code(WRITES, tools=files.registry, dry_run=True))
    assert files.files == {"a": "z", "b": "empty"}

    undone = opened.revert(committed)
    assert undone.ok and statuses(undone) == [("reverted", "empty"), *(("reverted", text) for text in "zyx")]
    assert files.files == {"a": "z", "b": "empty"}
    assert opened.revert(direct).ok and files.files == {}
    assert files.undone == ["b", "a", "a", "a"] * 2


@pytest.mark.anyio
async def test_what_a_dry_run_collected_is_not_undone_before_its_commit(files: Files) -> None:
    """On every route that can be reverted, also where a preview of the tool ran."""

    registry = ToolRegistry()

    def unsave(args: dict[str, str], _before: Any) -> None:
        files.undone.append(args["name"])
        del files.files[args["name"]]

    @registry.tool(preview=lambda name: "saved", revert=unsave)
    async def save(name: str) -> str:
        """Save an empty file of that name."""
        files.files[name] = ""
        return "saved"

    calls_of_it = calls(("save", {"name": "agent"}))
    async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
        drafts = [Draft() for _ in range(3)]
        contexts = [RunContext().having(draft) for draft in drafts]
        plan = await runtime.execute_plan([{"tool": "save", "args": {"name": "plan"}}], context=contexts[0])
        script = await runtime.execute_code("call_tool('save', name='script')", context=contexts[1])
        agent = Agent(ScriptedModel([calls_of_it, "end"]), tools=registry)
        run = await agent.run("go", context=contexts[2])
        for undo in (runtime.revert(plan), runtime.revert(script), agent.revert(run)):
            with pytest.raises(UsageError):
                await undo
        assert [len(draft.effects) for draft in drafts] == [1, 1, 1] and files.files == {} and files.undone == []

        for draft in drafts:
            assert (await runtime.revert(await runtime.commit(draft))).ok
    assert files.files == {} and files.undone == ["plan", "script", "agent"]


def test_a_run_is_undone_once_and_what_cannot_be_undone_is_named(opened: SyncRuntime, files: Files) -> None:
    source = "call_tool('save', name='a')\ncall_tool('shout', text='hi')\ntry:\n    call_tool('save', name='b', text='bad')\nexcept ToolError: 1"
    result = opened.execute_code(source, tools=files.registry)
    undone = opened.revert(result)

    assert [(each.tool, each.status) for each in undone.calls] == [
        ("save", "cannot be reverted"),  # it failed
        ("shout", "cannot be reverted"),
        ("save", "reverted"),
    ]
    assert not undone.ok and "cannot be reverted  shout: its tool has no revert=" in str(undone)
    assert '\nreverted  save(name="a", ' in str(undone)
    assert "it had failed" in undone.calls[0].error
    again = opened.revert(result)
    assert [each.status for each in again.calls] == ["cannot be reverted"] * 2 and files.undone == ["a"]


def test_undoing_stops_at_the_first_failure_and_a_second_call_goes_on(opened: SyncRuntime, files: Files) -> None:
    result = opened.execute_code("for n in 'abc':\n    call_tool('save', name=n)", tools=files.registry)
    files.locked.add("b")
    undone = opened.revert(result)

    assert [each.status for each in undone.calls] == ["reverted", "failed", "not reverted"]
    assert "b is locked" in undone.calls[1].error and files.undone == ["c"]
    assert [each.status for each in opened.revert(result).calls] == ["reverted"] and files.undone == ["c", "a"]


def test_arguments_are_those_that_the_tool_received(opened: SyncRuntime, files: Files) -> None:
    from toolcell.calls.call import Rewrite

    registry = files.registry.merged()
    registry.add_hook(before=lambda call: Rewrite({**call.args, "name": f"safe-{call.args['name']}"}))
    result = opened.execute_code("call_tool('save', name='a')", tools=registry)
    assert [*files.files] == ["safe-a"] and opened.revert(result).ok and files.files == {}


def test_a_run_that_was_carried_on_is_undone_whole(opened: SyncRuntime, files: Files) -> None:
    registry = files.registry.merged()
    register_or_replace(
        registry,
        registry.get("save")[0],
        requires_approval=True,
        revert=lambda args, _: files.undone.append(args["name"]),
    )
    first = opened.execute_code(
        "call_tool('save', name='a')\ncall_tool('save', name='b')", tools=registry, on_approval="suspend"
    )
    for _ in range(2):
        assert first.suspension is not None
        first = opened.resume(first.suspension, {each.id: Approve() for each in first.suspension.calls}, tools=registry)

    assert first.outcome is Outcome.OK and opened.revert(first).ok and files.undone == ["b", "a"]


def test_what_is_no_result_or_made_nothing_is_refused(opened: SyncRuntime, files: Files) -> None:
    plain = opened.execute_code("1")
    draft = opened.execute_code("call_tool('save', name='a')", tools=files.registry, dry_run=True)
    for given, said in (
        (plain, "nothing of run"),
        (draft, "was a dry run"),
        (7, "the result of a run, a plan or a commit, not 7"),
    ):
        with pytest.raises(UsageError, match=said):
            opened.revert(given)  # type: ignore[arg-type, unused-ignore]


def test_an_async_revert_takes_no_thread(opened: SyncRuntime, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, undone, run_in_thread = list[Any](), list[Any](), spec.run_in_thread

    async def undo(args: dict[str, Any], value: str) -> None:
        undone.append((args, value))

    def counted(function: Any, *rest: Any) -> Any:
        threads.append(function)
        return run_in_thread(function, *rest)

    @files.registry.tool(revert=undo)
    async def note(text: str) -> str:
        """Note a text for somebody."""
        return text.upper()

    monkeypatch.setattr(spec, "run_in_thread", counted)
    made = opened.execute_code("call_tool('note', text='a'); call_tool('save', name='b')", tools=files.registry)

    assert opened.revert(made).ok and undone == [({"text": "a"}, "A")] and len(threads) == 1  # of save


def test_a_runtime_that_is_closed_commits_and_reverts_nothing(files: Files) -> None:
    async def main() -> None:
        async with Runtime(files.registry, pool=PoolConfig(warm=1)) as runtime:
            draft = await runtime.execute_code("call_tool('save', name='b')", dry_run=True)
            made = await runtime.execute_code("call_tool('save', name='a')")
        for late in (runtime.commit(draft), runtime.revert(made)):
            with pytest.raises(UsageError, match="not open"):
                await late

    anyio.run(main)
    assert [*files.files] == ["a"]


def test_a_revert_is_on_the_record_before_it_runs(tmp_path: Path, files: Files) -> None:
    async def main() -> str:
        async with Runtime(files.registry, record=tmp_path / "runs.db", pool=PoolConfig(warm=1)) as runtime:
            undone = await runtime.revert(await runtime.execute_code("call_tool('save', name='a')"))
            assert undone.ok
            return undone.run_id

    run_id = anyio.run(main)
    with Index(tmp_path / "runs.db") as index:
        (run,) = [index.load(line) for line in index.runs(Filter(limit=None)) if line.id == run_id]
    assert [(call.tool, call.args) for call in run.calls] == [("revert_save", {"args": {"name": "a", "text": "empty"}})]
