"""`toolcell schedule`, `toolcell tools builtin` and `--builtin`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import Result
from typer.testing import CliRunner

import toolcell.runtime
import toolcell.sync  # copies methods of the real Runtime when it is imported
from rows import each_row
from toolcell import ToolRegistry
from toolcell.builtin import ScheduledAction, ScheduledRun, SqliteStore
from toolcell.builtin.catalogue import all_packages
from toolcell.cli import build, exits
from toolcell.cli.builtin import BuiltinFlags, opened_dependencies
from toolcell.errors import UsageError
from toolcell.results import ExecutionResult, Outcome
from toolcell.tools import RunContext

TOOLS = '''
def send(to: str) -> str:
    """Send a greeting to a person."""
    print("a tool prints")
    if to == "nobody":
        raise ValueError("there is nobody")
    return f"sent to {to}"
'''


class FakeRuntime:
    """Makes plans, and runs no script: what `toolcell` asks of a runtime."""

    def __init__(self, registry: ToolRegistry, **options: Any) -> None:
        self.registry = registry

    async def __aenter__(self) -> FakeRuntime:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    def check_open(self) -> None:
        return None

    async def execute_plan(self, steps: Sequence[Any], *, context: RunContext) -> list[dict[str, Any]]:
        result = await self.registry.run_plan({"steps": list(steps)}, context)
        return list(result.value)

    async def execute_code(self, source: str, **options: Any) -> ExecutionResult:
        return ExecutionResult("r1", Outcome.OK, value=sorted(self.registry), has_value=True)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toolcell.runtime, "Runtime", FakeRuntime)
    for name in ("TOOLCELL_STORE", "TOOLCELL_WORKSPACE", "BRAVE_API_KEY", "SEARXNG_URL"):
        monkeypatch.delenv(name, raising=False)
    Path("tools.py").write_text(TOOLS)


def toolcell_(*arguments: str) -> Result:
    return CliRunner().invoke(build(arguments), arguments)


def fill(*actions: ScheduledAction, runs: Sequence[ScheduledRun] = (), place: str = "toolcell.db") -> None:
    async def work() -> None:
        store = SqliteStore(place)
        for action in actions:
            await store.create_scheduled_action(action)
        for run in runs:
            await store.begin_run(run)
        await store.close()

    anyio.run(work)


def action(to: str = "ada", **fields: Any) -> ScheduledAction:
    calls = json.dumps([{"tool": "send", "params": {"to": to}}])
    given = {"description": f"Greet {to}", "schedule": "08:00 daily", "tool_calls": calls, "next_run": 1_700_000_000}
    return ScheduledAction(**given | fields)


def test_actions_are_listed_the_next_one_first() -> None:
    fill(
        action("bob", next_run=1_800_000_000, schedule="08:00 daily Asia/Jakarta"),
        action(),
        action("eve", enabled=False),
    )

    lines = toolcell_("schedule", "list").stdout.splitlines()

    assert [line.split() for line in lines] == [
        ["next", "state", "schedule", "description"],
        ["2023-11-14", "22:13", "active", "08:00", "daily", "Greet", "ada"],
        ["2027-01-15", "15:00", "active", "08:00", "daily", "Asia/Jakarta", "Greet", "bob"],
        ["2023-11-14", "22:13", "paused", "08:00", "daily", "Greet", "eve"],
    ]
    assert len(json.loads(toolcell_("schedule", "list", "--json").stdout)) == 3


def test_what_is_due_is_made_once_and_kept_in_the_history() -> None:
    fill(action(), action("nobody"), action("later", next_run=4_000_000_000))

    first = toolcell_("schedule", "run", "--once", "--tools", "tools.py", "--json")
    again = toolcell_("schedule", "run", "--once", "--tools", "tools.py", "--json")

    assert first.exit_code == exits.FAILED
    made = {row["description"]: row for row in map(json.loads, first.stdout.splitlines())}
    assert {name: row["status"] for name, row in made.items()} == {"Greet ada": "done", "Greet nobody": "failed"}
    assert "a tool prints" in first.stderr
    assert (again.exit_code, again.stdout) == (0, "")
    history = toolcell_("schedule", "history")
    assert "send: sent to ada" in " ".join(history.stdout.split())
    failed = json.loads(toolcell_("schedule", "history", "--status", "failed", "--json").stdout)
    assert [row["id"] for row in failed] == [made["Greet nobody"]["id"]]


def test_a_run_of_a_dead_process_is_told_as_in_doubt() -> None:
    run = ScheduledRun(action_id="gone", due_at=1, owner="dead", lease_until=2)
    fill(runs=[run])

    told = toolcell_("schedule", "run", "--once", "--tools", "tools.py")

    assert told.exit_code == exits.FAILED
    assert "in_doubt action gone" in told.stdout


@each_row(
    ("arguments", "said"),
    [
        (["schedule", "list"], "there is no store at toolcell.db"),
        (["schedule", "history", "--store", ""], "the path is empty"),
        (["schedule", "history", "--status", "odd"], "odd"),
        (["schedule", "run", "--once"], "no tools to call"),
        (["schedule", "run", "--once", "--tools", "tools.py", "--missed", "maybe"], "maybe"),
        (["schedule", "run", "--once", "--tools", "tools.py", "--lease-s", "0"], "lease_s"),
        (["run", "-c", "1", "--builtin", "fil"], "did you mean file?"),
        (["run", "-c", "1", "--builtin", "search"], "BRAVE_API_KEY"),
        (["run", "-c", "1", "--builtin", "file", "--workspace", " "], "the path is empty"),
        (["run", "-c", "1", "--builtin", "schedule", "--timezone", "Mars"], "Mars"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(arguments: list[str], said: str) -> None:
    refused = toolcell_(*arguments)

    assert refused.exit_code == exits.USAGE
    assert said in " ".join((refused.stdout + refused.stderr).split())
    assert not Path("toolcell.db").exists()


@pytest.mark.conforms("EX-12")
def test_built_in_tools_are_given_beside_those_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCELL_STORE", "elsewhere.db")
    monkeypatch.setenv("TOOLCELL_WORKSPACE", "here")

    done = toolcell_("run", "-c", "1", "--builtin", "file, schedule", "--builtin", "file", "--tools", "tools.py")

    names = {tool for info in all_packages() if info.name in ("file", "schedule") for tool in info.tools}
    assert set(json.loads(done.stdout)) == names | {"send"}
    assert Path("here").is_dir()


def test_a_command_without_built_in_tools_makes_none() -> None:
    given = ToolRegistry()

    assert BuiltinFlags().with_tools(given) is given
    assert BuiltinFlags().with_tools(None) is None


@pytest.mark.anyio
async def test_stores_are_closed_and_one_place_is_one_store() -> None:
    async with opened_dependencies():
        made = BuiltinFlags(builtin=["schedule"], store="s.db").with_tools(None)
        assert made is not None
        result = await made.dispatch("schedule_list", {})
        assert result.text == "No scheduled actions."
        assert Path("s.db-wal").exists()
    assert not Path("s.db-wal").exists()


def test_an_address_of_postgres_is_no_file() -> None:
    async def work() -> None:
        async with opened_dependencies():
            with pytest.raises(UsageError):
                BuiltinFlags(builtin=["schedule", "unknown"], store="postgresql://nowhere/db").with_tools(None)
            BuiltinFlags(builtin=["schedule"], store="postgresql://nowhere/db").with_tools(None)

    anyio.run(work)
    assert list(Path().iterdir()) == [Path("tools.py")]


@pytest.mark.conforms("S1", "EX-12")
def test_the_packages_are_listed_with_what_each_needs() -> None:
    listed = json.loads(toolcell_("tools", "builtin", "--json").stdout)
    table = " ".join(toolcell_("tools", "builtin").stdout.split())

    packages = {each["name"]: each for each in listed}
    assert packages["file"]["tools"] == ["file_read", "file_write", "file_list", "file_delete", "file_stat"]
    assert packages["schedule"]["needs"] == ["Store"]
    assert packages["http"]["extra"] == "builtin"
    assert all(each["about"] and not each["missing"] for each in listed)
    assert "file_read" in table and " Store " in table
    assert "toolcell[builtin]" in table


def test_a_package_whose_extra_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    table = " ".join(toolcell_("tools", "builtin").stdout.split())

    assert "missing: dateutil" in table


@pytest.mark.parametrize("given", ["", ","])
def test_builtin_without_a_package_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match=f"--builtin '{given}' names no package"):
        BuiltinFlags(builtin=[given]).with_tools(None)
