"""The contract of a backend: every promise, tried on one, from a script or from pytest.

    report = await check_backend(MyBackend)              # from a script: print(report); report.ok

    @pytest.mark.parametrize("case", contract_cases(MyBackend), ids=str)
    async def test_my_backend(case): await case(MyBackend)

What a backend cannot do it may declare, by the promise's name or its group's: in `skip`, or in an attribute `lacks`,
each with a reason. Skipped promises stay in the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal, TypeAlias

from toolcell.errors import UsageError
from toolcell.sandbox.backend import Backend
from toolcell.testing.contract.all_cases import ALL
from toolcell.testing.contract.case import Case
from toolcell.testing.harness import BackendHarness, Broken, MakeBackend

Skip: TypeAlias = Iterable[str] | Mapping[str, str]
"""Names of promises or groups; as a mapping, with the reason for each."""

PROBLEM_CHARS = 600
"""Kept of what one promise broke on."""

NO_REASON = "skipped by the caller"
NO_WALLS = "the backend says that it isolates nothing"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How one promise fared."""

    name: str
    promise: str
    status: Literal["passed", "failed", "skipped"]
    problem: str = ""
    """What was broken, or why it was skipped."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True when it was tried and kept."""
        return self.status == "passed"

    def __str__(self) -> str:
        problem = f"  {self.problem}" if self.problem else ""
        return f"{self.status:8} {self.seconds:6.2f} s  {self.name:38}{problem}".rstrip()


@dataclass(frozen=True, slots=True)
class ContractReport:
    """One line for each promise."""

    backend: str
    lines: tuple[CaseResult, ...]

    @property
    def ok(self) -> bool:
        """True when no promise was broken."""
        return not self.failed

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        """Promises that were broken."""
        return tuple(line for line in self.lines if line.status == "failed")

    @property
    def skipped(self) -> tuple[CaseResult, ...]:
        """Promises the backend does not make, each with its reason."""
        return tuple(line for line in self.lines if line.status == "skipped")

    @property
    def summary(self) -> str:
        """The tally, in one line."""
        passed = sum(line.passed for line in self.lines)
        seconds = sum(line.seconds for line in self.lines)
        return f"{self.backend}: {passed} kept, {len(self.failed)} broken, {len(self.skipped)} skipped, {seconds:.1f} s"

    def __str__(self) -> str:
        return "\n".join([*map(str, self.lines), self.summary])


def contract_lacks(backend: Backend | type[Backend] | None = None, skip: Skip = ()) -> dict[str, str]:
    """Names of the promises that will not be tried on `backend`, with the reasons.

    Raises:
        UsageError: a name is neither a promise nor a group of them.
    """
    wanted = dict(skip) if isinstance(skip, Mapping) else dict.fromkeys(skip, NO_REASON)
    declared: Mapping[str, str] = getattr(backend, "lacks", {})
    implied = {"walls": NO_WALLS} if backend is not None and not backend.isolates else {}
    lacks: dict[str, str] = {}
    for name, reason in {**implied, **declared, **wanted}.items():
        lacks.update(dict.fromkeys((case.name for case in _named(name)), reason))
    return lacks


def contract_cases(
    backend: Backend | type[Backend] | None = None, *, only: Iterable[str] = (), skip: Skip = ()
) -> tuple[Case, ...]:
    """Every promise that `backend` makes, each to be awaited with a way to make one. `only`: of these names or groups.

    Raises:
        UsageError: a name that is given, or that the backend declares, is none of a promise.
    """
    lacks = contract_lacks(backend, skip)
    return tuple(case for case in _chosen(only) if case.name not in lacks)


async def check_backend(
    make_backend: MakeBackend,
    *,
    only: Iterable[str] = (),
    skip: Skip = (),
    on_result: Callable[[CaseResult], object] | None = None,
) -> ContractReport:
    """Try every promise on backends made by `make_backend`, and report.

    `only`: no more than these promises or groups; `on_result` is told each line as it is known.

    Raises:
        UsageError: a name that is given, or that the backend declares, is none of a promise.
        SandboxUnavailable: the backend cannot be opened at all.

    Cancellation: whatever was started is ended.
    """
    probe = make_backend()
    lacks = contract_lacks(probe, skip)
    lines: list[CaseResult] = []
    async with _Stands(make_backend) as stands:
        for case in _chosen(only):
            if case.name in lacks:
                line = CaseResult(case.name, case.promise, "skipped", lacks[case.name])
            else:
                line = await _tried(case, stands)
            lines.append(line)
            if on_result is not None:
                on_result(line)
    return ContractReport(probe.name, tuple(lines))


class _Stands:
    """One stand for all promises; a new one after each that was broken, so that one fault is reported once."""

    def __init__(self, make_backend: MakeBackend) -> None:
        self._make_backend = make_backend
        self._stack = AsyncExitStack()
        self._stand: BackendHarness | None = None

    async def __aenter__(self) -> _Stands:
        await self.get()
        return self

    async def get(self) -> BackendHarness:
        if self._stand is None:
            self._stand = await self._stack.enter_async_context(BackendHarness(self._make_backend))
        return self._stand

    async def discard(self) -> None:
        self._stand = None
        await self._stack.aclose()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.discard()


async def _tried(case: Case, stands: _Stands) -> CaseResult:
    began = time.perf_counter()
    problem = ""
    try:
        await case.on(await stands.get())
    except Exception as exc:
        problem = _told(exc)
    seconds = time.perf_counter() - began
    if problem:
        try:
            await stands.discard()
        except Exception as exc:
            problem += f"; then closing it failed: {_told(exc)}"
    return CaseResult(case.name, case.promise, "failed" if problem else "passed", problem, seconds)


def _told(problem: BaseException) -> str:
    """The problem in one line; of a group, those that are in it."""
    if isinstance(problem, BaseExceptionGroup):
        return "; ".join(map(_told, problem.exceptions))
    text = str(problem) if isinstance(problem, Broken) else f"{type(problem).__name__}: {problem}"
    return " ".join(text[: 2 * PROBLEM_CHARS].split())[:PROBLEM_CHARS]


def _named(name: str) -> list[Case]:
    found = [case for case in ALL if case.name == name or case.name.startswith(f"{name}.")]
    if not found:
        raise UsageError(f"{name!r} is no promise and no group of promises; there are {_names()}")
    return found


def _chosen(only: Iterable[str]) -> tuple[Case, ...]:
    names = list(only)
    return tuple(case for case in ALL if not names or any(case in _named(name) for name in names))


def _names() -> str:
    groups: dict[str, list[str]] = {}
    for case in ALL:
        group, _, name = case.name.partition(".")
        groups.setdefault(group, []).append(name)
    return "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
