"""What adapters have in common, without any framework."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell import Limits, Outcome, Runtime, SyncRuntime, ToolRegistry
from toolcell.compat import all_definitions
from toolcell.errors import MissingPackage, RegistrationError, UsageError
from toolcell.integrations import base
from toolcell.integrations.base import (
    RuntimeOwner,
    SyncRuntimeOwner,
    framework_tool,
    program_output,
    text_for_model,
    tools_with,
)
from toolcell.results import LIMIT_OUTCOMES, ExecutionResult, Logs
from toolcell.testing import FakeBackend

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent.parent
EXTRAS = {
    path: found[1]
    for path in sorted(Path(base.__file__).parent.glob("*.py"))
    if path.stem != "base"
    and (found := re.search(r'missing_package\(exc, "([\w-]+)"\)', path.read_text(encoding="utf-8")))
}
"""The extra that each module for a framework needs."""
WITHOUT = {"__init__", "base", "inspect_program"}
"""Modules that import no framework."""
NUMBER = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
IN_DEV = {"ipython"}
"""Adapters whose package is a development dependency, so that their tests run with all others."""
FAKE: dict[str, Any] = {"backend": FakeBackend(), "allow_unisolated": True}


class ForTheModel(Exception):
    """A framework's exception with a text for the model."""


def double(args: dict[str, Any]) -> int:
    return 2 * args["n"]


async def half(args: dict[str, Any]) -> float:
    if args["n"] % 2:
        raise ForTheModel(f"{args['n']} is odd")
    return args["n"] / 2


def test_every_adapter_has_an_extra_of_its_name_tests_an_example_a_page_and_a_group_of_frameworks() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    groups = [path.read_text().partition("\n")[0] for path in Path(__file__).parent.glob("constraints-*.txt")]
    grouped = [extra for line in groups for extra in line.removeprefix("# extras: ").split()]
    stems = {path.stem for path in Path(base.__file__).parent.glob("*.py")}
    assert stems == {path.stem for path in EXTRAS} | WITHOUT
    for extra in sorted(set(EXTRAS.values())):
        stem = extra.replace("-", "_")
        assert stem in stems and extra in extras, extra
        assert grouped.count(extra) == (extra not in IN_DEV), extra
        assert [*Path(__file__).parent.glob(f"test_{stem}*.py")], extra
        assert [*(ROOT / "examples" / "integrations").glob(f"with_{stem}*.py")], extra
        assert (ROOT / "docs" / "integrations" / f"{extra}.md").exists(), extra


@pytest.mark.parametrize("path", EXTRAS, ids=lambda path: path.stem)
def test_an_adapter_whose_framework_is_missing_names_the_command_that_installs_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = path.read_text(encoding="utf-8")
    name = f"toolcell.integrations.{path.stem}"
    for package in re.findall(r"^    (?:from|import) (\w+)", text.partition("except ModuleNotFoundError")[0], re.M):
        for module in [each for each in sys.modules if each.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, name, raising=False)

    with pytest.raises(ImportError, match=re.escape(f"pip install 'toolcell[{EXTRAS[path]}]'")) as caught:
        __import__(name)
    assert isinstance(caught.value, MissingPackage)


@pytest.mark.anyio
async def test_a_frameworks_tools_are_checked_hooked_and_described() -> None:
    own, seen = ToolRegistry(), list[str]()
    own.before_call(lambda call: seen.append(call.name))
    registry = tools_with(
        own,
        [
            framework_tool("double", "Double a whole number.", NUMBER, double),
            framework_tool("half", None, NUMBER, half, shows=(ForTheModel,), read_only=True),
        ],
    )

    assert (await registry.execute("double", {"n": "4"})).value == 8
    assert (await registry.execute("half", {"n": 4})).value == 2
    refused = await registry.execute("double", {})
    assert refused.is_error and "n" in refused.text
    failed = await registry.execute("half", {"n": 3})
    assert failed.error is not None and failed.error.message == "3 is odd"
    assert seen == ["double", "half", "half"]
    assert all_definitions(registry)[1].description == "Call it as half(...)."
    assert registry.get("double")[0] is double and registry.registered("half").options.read_only
    assert not len(own)


@each_row("shows", [(), (KeyError,)])
@pytest.mark.anyio
async def test_an_exception_that_is_not_meant_for_the_model_is_the_tools_panic(
    shows: tuple[type[Exception], ...],
) -> None:
    registry = ToolRegistry([framework_tool("half", "Halve a whole number.", NUMBER, half, shows=shows)])
    result = await registry.execute("half", {"n": 3})
    assert result.error is not None and result.error.code == "exception"


def test_a_name_that_is_taken_or_wrong_is_refused() -> None:
    registry = ToolRegistry([framework_tool("double", "Double a whole number.", NUMBER, double)])
    with pytest.raises(RegistrationError, match="double"):
        tools_with(registry, [framework_tool("double", "Another tool of that name.", None, double)])
    with pytest.raises(RegistrationError, match="get weather"):
        tools_with(registry, [framework_tool("get weather", "Its name has a space.", None, double)])
    with pytest.raises(RegistrationError, match="tiemout_s"):
        framework_tool("double", "Double a whole number.", NUMBER, double, tiemout_s=1)


@pytest.mark.anyio
async def test_a_runtime_of_its_own_is_open_while_anybody_uses_it() -> None:
    owner = RuntimeOwner(None, FAKE | {"limits": Limits(wall_s=60)})
    async with owner:
        await owner.open()
        await owner.close()
        result = await owner.runtime.execute_code("set_result(6 * 7)")
        assert text_for_model(result) == "42"
    with pytest.raises(UsageError, match="open"):
        await owner.runtime.execute_code("1")
    async with owner:
        failed = await owner.runtime.execute_code("print('so far')\n1 / 0")
    assert failed.outcome is Outcome.ERROR
    assert "ZeroDivisionError" in text_for_model(failed) and "so far" in text_for_model(failed)
    assert "so far" not in text_for_model(failed, with_logs=False)


@pytest.mark.anyio
async def test_a_runtime_of_the_program_stays_open() -> None:
    async with Runtime(**FAKE) as runtime:
        async with RuntimeOwner(runtime, {}):
            pass
        assert (await runtime.execute_code("set_result(1)")).value == 1
    with pytest.raises(UsageError, match="open"):
        await RuntimeOwner(runtime, {}).open()


def test_a_blocking_runtime_of_its_own_opens_when_asked_and_closes_once() -> None:
    owner = SyncRuntimeOwner(None, FAKE)
    assert owner.open() is owner.open()
    assert owner.runtime.execute_code("set_result(1)").value == 1
    owner.close()
    owner.close()
    with pytest.raises(UsageError, match="not open"):
        owner.runtime.execute_code("1")
    with SyncRuntime(**FAKE) as runtime:
        used = SyncRuntimeOwner(runtime, {})
        assert used.open() is runtime
        used.close()
        assert runtime.execute_code("set_result(2)").value == 2


@each_row(("owner", "kind"), [(RuntimeOwner, Runtime), (SyncRuntimeOwner, SyncRuntime)])
def test_a_runtime_of_the_wrong_kind_or_with_further_settings_is_refused(owner: Any, kind: Any) -> None:
    with pytest.raises(UsageError, match=f"takes a {kind.__name__}, not str"):
        owner("process", {})
    with pytest.raises(UsageError, match="give limits to that"):
        owner(kind(**FAKE), {"limits": Limits()})


@each_row("outcome", Outcome)
def test_the_exit_code_of_a_run_that_a_limit_ended_is_never_that_of_a_script_that_failed(outcome: Outcome) -> None:
    code = program_output(ExecutionResult("r1", outcome, None, False, Logs(()))).exit_code
    if outcome in LIMIT_OUTCOMES:
        assert code == (124 if outcome is Outcome.TIMEOUT else 137)
    else:
        assert (code == 0) is (outcome is Outcome.OK)
