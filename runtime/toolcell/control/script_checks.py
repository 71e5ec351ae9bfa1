"""`ScriptChecks`: look at a script before it runs: its calls and its types."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.placeholders import DryRun
from toolcell.config import Limits, check_types_of
from toolcell.results import ExecutionResult
from toolcell.run.options import RunOptions
from toolcell.run.run import Script
from toolcell.run.runs import Runs, count_cpu
from toolcell.support.copies import changed

if TYPE_CHECKING:
    from toolcell.control.type_check import Earlier, TypeChecker
    from toolcell.control.type_checkers import CheckerHost
    from toolcell.results.effects import Preflight


class ScriptChecks:
    """What is found in a script without running it."""

    def __init__(self, runs: Runs, make_runtime: Callable[..., CheckerHost]) -> None:
        """`make_runtime` makes the Runtime of the type checkers' sandboxes."""
        self._runs, self._make_runtime = runs, make_runtime
        self._type_checker: TypeChecker | None = None

    @property
    def type_checker(self) -> TypeChecker:
        """Checks types. It is loaded when a script is checked first."""
        if self._type_checker is None:
            from toolcell.control.type_check import TypeChecker

            self._type_checker = TypeChecker(self._make_runtime, self._runs.task_group)
        return self._type_checker

    async def close(self) -> None:
        """End the checkers of types."""
        if self._type_checker is not None:
            await self._type_checker.close()

    async def preflight(
        self, source: str, tools: CallableTools, limits: Limits | None = None, context: RunContext | None = None
    ) -> Preflight:
        """Return the calls that are written out in a script. It is parsed in a sandbox and does not run.

        It counts as a run for the quotas of `context`.

        Raises:
            UsageError: `source` is not text, or too large.
            QuotaExceeded: whoever it is for has used up the quota.
            SandboxUnavailable: no sandbox could be started.
        """
        run = self._runs.begin(context or RunContext())
        found, cpu_s = await self._read(source, tools, limits)
        count_cpu(run, cpu_s)
        return found

    async def _read(self, source: str, tools: CallableTools, limits: Limits | None) -> tuple[Preflight, float]:
        """Return what a script can call, and the CPU time that it took to find out."""
        from toolcell.control.preflight import preflight_run, read_preflight

        runs = self._runs
        result = await runs.sandboxes.run(preflight_run(runs.next_number(), source, limits or runs.limits, tools))
        return read_preflight(result, tools), result.usage.cpu_s

    async def check(
        self,
        script: Script,
        options: RunOptions,
        tools: CallableTools,
        context: RunContext | None,
        earlier: Callable[[], Earlier] | None = None,
    ) -> Script | ExecutionResult:
        """Return a script with what was found in it, or the result of one that must not run because of that.

        `earlier` returns what scripts before this one have left.
        """
        isolates = self._runs.environment.isolates
        by_default = check_types_of(context.check_types) if context is not None and isolates else None
        degree = check_types_of(options.check_types) or self._runs.policy.check_types
        if (degree or by_default or "off") != "off":
            from toolcell.control.type_check import NOTHING_EARLIER

            left = NOTHING_EARLIER if earlier is None else earlier()
            types = await self.type_checker.check(degree, by_default, script.source, tools, script.inputs, left)
            if types.refuses:
                return types.refusal(context)
            script = changed(script, found={"type_findings": types.findings})
        return await self._with_preflight(script, tools, context) if options.preflight else script

    async def _with_preflight(
        self, script: Script, tools: CallableTools, context: RunContext | None
    ) -> Script | ExecutionResult:
        planned, _ = await self._read(script.source, tools, script.limits)
        if planned.problems:
            from toolcell.control.preflight import refused_result

            return refused_result(context.run_id if context is not None else os.urandom(16).hex(), planned)
        if context is not None and (dry_run := context.feature(DryRun)) is not None:
            dry_run.preflight = planned
        return changed(script, found={**script.found, "preflight": planned})
