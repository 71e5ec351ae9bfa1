"""Check a backend against the contract, from a script or from pytest.

    report = await check_backend(MyBackend)              # from a script: print(report); report.ok

    @pytest.mark.parametrize("case", contract_cases(MyBackend), ids=str)
    async def test_my_backend(case): await case(MyBackend)

A backend may declare what it cannot do, by the name of a case or a group: in `skip`, or in its attribute `lacks`, each
with a reason. Skipped cases stay in the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal, TypeAlias

from toolcell.errors import UsageError
from toolcell.sandbox import Backend
from toolcell.testing.contract import calls, hostile, isolation, life, limits, results, termination
from toolcell.testing.contract.case import Case
from toolcell.testing.harness import BackendHarness, ContractViolation, MakeBackend

ALL_CASES: tuple[Case, ...] = tuple(
    case
    for group in (
        results.values_cases,
        calls.calls_cases,
        results.output_cases,
        results.files_cases,
        limits.limits_cases,
        limits.usage_cases,
        termination.cancelling_cases,
        isolation.single_use_cases,
        hostile.hostile_cases,
        termination.deaths_cases,
        isolation.isolation_cases,
        life.life_cases,
    )
    for case in group.cases
)
"""Every case, in the order of a check: first the behaviour that all other cases rely on."""

Skip: TypeAlias = Iterable[str] | Mapping[str, str]
"""Names of cases or groups; as a mapping, with the reason for each."""

PROBLEM_CHARS = 600
"""Most characters kept of one problem."""

NO_REASON = "skipped by the caller"
NOT_ISOLATING = "the backend declares that it isolates nothing"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case."""

    name: str
    description: str
    status: Literal["passed", "failed", "skipped"]
    problem: str = ""
    """The violation, or the reason for the skip."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True when the case was run and met."""
        return self.status == "passed"

    def __str__(self) -> str:
        problem = f"  {self.problem}" if self.problem else ""
        return f"{self.status:8} {self.seconds:6.2f} s  {self.name:38}{problem}".rstrip()


@dataclass(frozen=True, slots=True)
class ContractReport:
    """One line for each case."""

    backend: str
    lines: tuple[CaseResult, ...]

    @property
    def ok(self) -> bool:
        """True when no case failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        """Cases that failed."""
        return tuple(line for line in self.lines if line.status == "failed")

    @property
    def skipped(self) -> tuple[CaseResult, ...]:
        """Cases that were not run, each with its reason."""
        return tuple(line for line in self.lines if line.status == "skipped")

    @property
    def summary(self) -> str:
        """The totals, in one line."""
        passed = sum(line.passed for line in self.lines)
        seconds = sum(line.seconds for line in self.lines)
        return (
            f"{self.backend}: {passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped, {seconds:.1f} s"
        )

    def __str__(self) -> str:
        return "\n".join([*map(str, self.lines), self.summary])


def contract_lacks(backend: Backend | type[Backend] | None = None, skip: Skip = ()) -> dict[str, str]:
    """Return the names of the cases that are skipped for `backend`, with the reasons.

    Raises:
        UsageError: a name is neither a case nor a group.
    """
    wanted = dict(skip) if isinstance(skip, Mapping) else dict.fromkeys(skip, NO_REASON)
    declared = {} if backend is None else backend.lacks
    if not isinstance(declared, Mapping):  # the property of a class, whose instances know
        declared = {}
    implied = {"isolation": NOT_ISOLATING} if backend is not None and not backend.isolates else {}
    lacks: dict[str, str] = {}
    for name, reason in {**implied, **declared, **wanted}.items():
        lacks.update(dict.fromkeys((case.name for case in _cases_named(name)), reason))
    return lacks


def contract_cases(
    backend: Backend | type[Backend] | None = None, *, only: Iterable[str] = (), skip: Skip = ()
) -> tuple[Case, ...]:
    """Return every case that applies to `backend`. `only`: these cases or groups.

    Raises:
        UsageError: a given or declared name is neither a case nor a group.
    """
    lacks = contract_lacks(backend, skip)
    return tuple(case for case in _select(only) if case.name not in lacks)


async def check_backend(
    make_backend: MakeBackend,
    *,
    only: Iterable[str] = (),
    skip: Skip = (),
    on_result: Callable[[CaseResult], object] | None = None,
) -> ContractReport:
    """Run every case on backends made by `make_backend`, and return a report.

    Args:
        make_backend: a class or a function without arguments.
        only: run only these cases or groups.
        skip: do not run these cases or groups.
        on_result: called with each result as soon as it is known.

    Raises:
        UsageError: a given or declared name is neither a case nor a group.
        SandboxUnavailable: the backend cannot be opened.

    Cancellation: everything that was started is ended.
    """
    probe = make_backend()
    lacks = contract_lacks(probe, skip)
    lines: list[CaseResult] = []
    async with AsyncExitStack() as stack:
        harnesses = [await stack.enter_async_context(BackendHarness(make_backend))]
        for case in _select(only):
            if case.name in lacks:
                line = CaseResult(case.name, case.description, "skipped", lacks[case.name])
            else:
                line = await _run_case(case, make_backend, stack, harnesses)
            lines.append(line)
            if on_result is not None:
                on_result(line)
    return ContractReport(probe.name, tuple(lines))


async def _run_case(
    case: Case, make_backend: MakeBackend, stack: AsyncExitStack, harnesses: list[BackendHarness]
) -> CaseResult:
    """Run a case on the harness that all have, which `stack` closes. After a failure, the next case gets a new one."""
    began = time.perf_counter()
    problem = ""
    try:
        if not harnesses:
            harnesses.append(await stack.enter_async_context(BackendHarness(make_backend)))
        await case.run(harnesses[0])
    except Exception as exc:
        problem = _one_line(exc)
    seconds = time.perf_counter() - began
    if problem:
        harnesses.clear()
        try:
            await stack.aclose()
        except Exception as exc:
            problem += f"; then closing it failed: {_one_line(exc)}"
    return CaseResult(case.name, case.description, "failed" if problem else "passed", problem, seconds)


def _one_line(problem: BaseException) -> str:
    """Return the problem in one line; for an exception group, the problems in it."""
    if isinstance(problem, BaseExceptionGroup):
        return "; ".join(map(_one_line, problem.exceptions))
    text = str(problem) if isinstance(problem, ContractViolation) else f"{type(problem).__name__}: {problem}"
    return " ".join(text[: 2 * PROBLEM_CHARS].split())[:PROBLEM_CHARS]


def _cases_named(name: str) -> list[Case]:
    found = [case for case in ALL_CASES if case.name == name or case.name.startswith(f"{name}.")]
    if not found:
        raise UsageError(f"{name!r} is neither a case nor a group; there are {_all_names()}")
    return found


def _select(only: Iterable[str]) -> tuple[Case, ...]:
    names = list(only)
    return tuple(case for case in ALL_CASES if not names or any(case in _cases_named(name) for name in names))


def _all_names() -> str:
    groups: dict[str, list[str]] = {}
    for case in ALL_CASES:
        group, _, name = case.name.partition(".")
        groups.setdefault(group, []).append(name)
    return "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
