"""`check_backend` reports every case, and names the case that a faulty backend does not meet."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any, ClassVar

import psutil
import pytest

from rows import each_row
from toolcell import Limits, Outcome, PoolConfig, Runtime, SandboxUnavailable, UsageError
from toolcell.sandbox.backend import Sample, Sandbox
from toolcell.sandbox.stream import read_available
from toolcell.testing import FakeBackend, check_backend, contract_cases, contract_lacks
from toolcell.testing import fake as fakes
from toolcell.testing import harness as harnesses
from toolcell.testing.contract import case as cases
from toolcell.testing.contract.case import CaseGroup
from toolcell.testing.contract.check import CaseResult
from toolcell.testing.fake import FakeSandbox
from toolcell.testing.harness import ContractViolation

pytestmark = [pytest.mark.anyio, pytest.mark.isolation]


def test_descriptors_are_counted_where_the_system_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert harnesses.descriptors() > 0
    monkeypatch.setattr(psutil, "POSIX", False)
    monkeypatch.delattr(psutil.Process, "num_fds")
    assert harnesses.descriptors() == 0


made: list[FakeSandbox] = []


async def remove_leftovers() -> None:
    """Destroy the sandboxes that a faulty backend left behind, with the faults taken out."""
    while made:
        sandbox = made.pop()
        for name in [name for name in vars(sandbox) if callable(getattr(FakeSandbox, name, None))]:
            delattr(sandbox, name)
        await sandbox.destroy()


class Faulty(FakeBackend):
    """A fake with one fault: a member of each sandbox is replaced."""

    fault: ClassVar[Mapping[str, Any]] = {}

    async def start(self, limits: Limits) -> Sandbox:
        sandbox = await super().start(limits)
        for name, value in self.fault.items():
            setattr(sandbox, name, value.__get__(sandbox) if callable(value) else value)
        assert isinstance(sandbox, FakeSandbox)
        made.append(sandbox)
        return sandbox


def faulty(**fault: Any) -> type[Faulty]:
    return type("Faulty", (Faulty,), {"fault": fault})


def _no_output(self: FakeSandbox) -> tuple[bytes, bytes]:
    return b"", b""


def _no_sample(self: FakeSandbox, **options: bool) -> Sample:
    return Sample()


def _less_than_none(self: FakeSandbox, **options: bool) -> Sample:
    return Sample(cpu_s=-1.0)


def _kills_gently(self: FakeSandbox) -> None:
    if self.process.returncode is None:
        os.kill(self.process.pid, signal.SIGWINCH)


def _always_alive(self: FakeSandbox) -> bool:
    return True


def _never_accepts(self: FakeSandbox, layers: Mapping[str, str]) -> None:
    self.layers = {"moat": 7}  # type: ignore[dict-item]


async def _forgets_descriptors(self: FakeSandbox) -> None:
    FakeSandbox.kill(self)
    self.stream.close()
    await self.ended()


async def _pauses_nothing(self: FakeSandbox) -> bool:
    return True


def _reads_on(self: FakeSandbox) -> tuple[bytes, bytes]:
    return read_available(self._output[0]), read_available(self._output[1])


async def _raises_when_destroyed_twice(self: FakeSandbox) -> None:
    if self.process.returncode is not None:
        raise RuntimeError("destroyed twice")
    await FakeSandbox.destroy(self)


class Leaky(FakeBackend):
    isolates: ClassVar[bool] = True
    lacks: ClassVar[Mapping[str, str]] = {}

    def __init__(self) -> None:
        super().__init__(environment=dict(os.environ))


FAULTS: list[tuple[str, Any, str]] = [
    ("raw output is lost", faulty(read_output=_no_output), "output.raw_writes"),
    ("nothing is measured", faulty(sample=_no_sample), "usage.measured"),
    ("a measurement is less than none", faulty(sample=_less_than_none), "usage.measuring_never_fails"),
    ("the watch sees nothing", faulty(sample=_no_sample), "limits.processes"),
    ("kill does not kill", faulty(kill=_kills_gently), "deaths.while_running"),
    ("the dead count as alive", faulty(is_alive=_always_alive), "deaths.while_idle"),
    ("layers are made up", faulty(accept=_never_accepts), "usage.layers_are_known_first"),
    ("descriptors are forgotten", faulty(destroy=_forgets_descriptors), "life.sandboxes_leak_nothing"),
    ("what was paused goes on", faulty(pause=_pauses_nothing), "deaths.paused"),
    ("the dead read on", faulty(read_output=_reads_on), "deaths.touches_nobody_else"),
    ("a second destroy raises", faulty(destroy=_raises_when_destroyed_twice), "deaths.destroyed_twice"),
    ("ids are shared", faulty(id="x"), "usage.sandboxes_have_ids"),
    ("it claims to isolate", type("Boaster", (FakeBackend,), {"isolates": True, "lacks": {}}), "isolation.no_files"),
    ("the environment comes in", Leaky, "isolation.no_environment"),
]


@each_row(("backend", "name"), [pytest.param(backend, name, id=fault) for fault, backend, name in FAULTS])
async def test_a_fault_is_found(backend: type[FakeBackend], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASE_TIMEOUT_S", 3.0)
    monkeypatch.setattr(harnesses, "SOON_S", 1.0)
    monkeypatch.setattr(fakes, "END_S", 0.3)
    try:
        report = await check_backend(backend, only=[name])
    finally:
        await remove_leftovers()

    assert [line.name for line in report.failed] == [name], str(report)
    assert report.failed[0].problem
    assert not report.ok


async def test_a_script_that_ends_in_another_way_than_its_case_says_is_a_violation() -> None:
    group, flood = CaseGroup("own"), ["while True: print('x' * 1000)"]
    group.ends("by_itself", "It dies.", ["1"], Outcome.KILLED)
    group.ends("by_another", "It has a limit.", flood, Outcome.OUTPUT_LIMIT, limit="cpu_s", output_flood_bytes=9999)
    group.ends(
        "by_a_limit", "It has.", flood, Outcome.OUTPUT_LIMIT, limit="output_flood_bytes", output_flood_bytes=9999
    )
    by_itself, by_another, by_a_limit = group.cases

    with pytest.raises(ContractViolation, match="outcome"):
        await by_itself(FakeBackend)
    with pytest.raises(ContractViolation, match="cpu_s"):
        await by_another(FakeBackend)
    await by_a_limit(FakeBackend)


async def test_the_report_has_a_line_for_every_case_and_a_reason_for_every_skip() -> None:
    reported: list[CaseResult] = []
    report = await check_backend(
        FakeBackend,
        only=["values.plain_inputs", "isolation", "life.named"],
        skip={"life.named": "known"},
        on_result=reported.append,
    )

    assert report.ok
    assert list(report.lines) == reported
    assert [line.name for line in report.lines if line.passed] == ["values.plain_inputs"]
    assert {line.problem for line in report.skipped} == {"it isolates nothing", "known"}
    assert all(line.description for line in report.lines)
    assert "life.named" in str(report)
    assert str(report).splitlines()[-1].startswith(f"fake: 1 passed, 0 failed, {len(report.skipped)} skipped")


async def test_a_case_that_fails_does_not_disturb_the_others() -> None:
    report = await check_backend(faulty(read_output=_no_output), only=["output.raw_writes", "output.prints"])

    assert {line.name: line.status for line in report.lines} == {
        "output.prints": "passed",
        "output.raw_writes": "failed",
    }


async def test_a_name_that_is_no_case_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'limits\.everything' is neither a case"):
        await check_backend(FakeBackend, skip=["limits.everything"])
    with pytest.raises(UsageError, match="'no group'"):
        contract_lacks(FakeBackend, {"no group": "x"})
    with pytest.raises(UsageError, match="'nothing'"):
        contract_cases(only=["nothing"])


async def test_a_backend_that_cannot_be_opened_says_so() -> None:
    class Shut(FakeBackend):
        async def open(self) -> None:
            raise SandboxUnavailable("no machine")

    with pytest.raises(SandboxUnavailable, match="no machine"):
        await check_backend(Shut)


async def test_a_case_can_be_awaited_by_itself() -> None:
    (case,) = contract_cases(FakeBackend, only=["calls.single"])
    await case(FakeBackend)

    assert str(case) == "calls.single"
    assert case.description.startswith("A call reaches the tool")
    (case,) = contract_cases(only=["usage.measured"])
    with pytest.raises(ContractViolation, match="cpu_s is 0"):
        await case(faulty(sample=_no_sample))


async def test_every_case_has_a_name_of_its_own_and_a_sentence() -> None:
    cases = contract_cases()

    assert len({case.name for case in cases}) == len(cases) > 90
    assert all(case.description.endswith(".") for case in cases)


async def test_a_limit_that_a_backend_cannot_lower_gets_the_run_a_fresh_sandbox() -> None:
    asked: list[int] = []

    class Rigid(FakeBackend):
        fixed: ClassVar[frozenset[str]] = frozenset({"open_files"})

        async def start(self, limits: Limits) -> Sandbox:
            asked.append(limits.open_files)
            return await super().start(limits)

    async with Runtime(backend=Rigid([]), pool=PoolConfig(warm=0), allow_unisolated=True) as runtime:
        await runtime.execute_code("1", limits=Limits(open_files=40))
        await runtime.execute_code("1", limits=Limits(memory_bytes=64 << 20))

    assert asked == [40, Limits().open_files]
