"""`ScriptRuns`: scripts that run by themselves, from the options of `Runtime.execute_code` to the result, and again.

`ScriptChecks` looks at a script before it runs: its calls and its types.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.placeholders import DryRun
from toolcell.calls.run_state import RunLink
from toolcell.config import Limits, check_types_of
from toolcell.results import ExecutionResult
from toolcell.run.calls import FinishedRuns, ListedCalls
from toolcell.run.options import RunOptions
from toolcell.run.run import Run, Script, script_from
from toolcell.run.runs import Runs, count_cpu
from toolcell_bridge.wire.frozen import replaced

if TYPE_CHECKING:
    from toolcell.control.dry_runs import DryRuns
    from toolcell.control.type_check import Earlier, TypeChecker
    from toolcell.journal.ledger import Journal
    from toolcell.journal.store import JournalStore
    from toolcell.results import Preflight


class ScriptChecks:
    """What is found in a script without running it."""

    def __init__(self, runs: Runs, make_runtime: Callable[..., Any]) -> None:
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
        result = await runs.sandboxes.run(preflight_run(next(runs.numbers), source, limits or runs.limits, tools))
        return read_preflight(result, tools), result.usage.cpu_s

    async def check(
        self,
        script: Script,
        options: RunOptions,
        tools: CallableTools,
        context: RunContext | None,
        link: RunLink | None = None,
        earlier: Callable[[], Earlier] | None = None,
    ) -> Script | ExecutionResult:
        """Return a script with what was found in it, or the result of one that must not run because of that.

        `link`: names the run that it goes on from. `earlier` returns what scripts before this one have left.
        """
        by_default, degree = None, self._runs.policy.check_types
        if context is not None and self._runs.environment.isolates:
            by_default = check_types_of(context.check_types)
        if options.check_types is not None:
            degree = check_types_of(options.check_types)
        if (degree or by_default or "off") != "off":
            from toolcell.control.type_check import NOTHING_EARLIER

            left = NOTHING_EARLIER if earlier is None else earlier()
            types = await self.type_checker.check(degree, by_default, script.source, tools, script.inputs, left)
            if types.refuses:
                return await self._runs.refuse(script, tools, context, types.refusal(), link)
            script = replaced(script, found={"type_findings": types.findings})
        return await self._with_preflight(script, tools, context, link) if options.preflight else script

    async def _with_preflight(
        self, script: Script, tools: CallableTools, context: RunContext | None, link: RunLink | None
    ) -> Script | ExecutionResult:
        planned, _ = await self._read(script.source, tools, script.limits)
        if planned.problems:
            from toolcell.control.preflight import refused_result

            return await self._runs.refuse(script, tools, context, refused_result(planned), link)
        if context is not None and (dry_run := context.feature(DryRun)) is not None:
            dry_run.preflight = planned
        return replaced(script, found={**script.found, "preflight": planned})


class ScriptRuns:
    """Runs each script in a sandbox of its own."""

    def __init__(
        self,
        *,
        runs: Runs,
        checks: ScriptChecks,
        finished: FinishedRuns,
        journals: Callable[[], JournalStore],
        is_durable: bool,
        dry_runs: Callable[[], DryRuns],
    ) -> None:
        """`journals` and `dry_runs` are loaded when a run needs them. `is_durable`: every run needs a journal."""
        self._runs, self._checks, self._finished = runs, checks, finished
        self._journals, self._is_durable, self._dry_runs = journals, is_durable, dry_runs

    async def execute(self, source: str, options: RunOptions) -> ExecutionResult:
        """Run a script; see `Runtime.execute_code`."""
        runs = self._runs
        tools = runs.tools(options.tools)
        context = options.context
        is_dry = options.dry_run is not False or (context is not None and context.feature(DryRun) is not None)
        if is_dry:
            context = await self._dry_runs().begin(options.dry_run, context, options.on_approval, source)
        if options.limits is not None:
            runs.environment.check_supported(options.limits)
        is_repeatable = self._is_durable or options.on_approval == "suspend"
        seed, clock = runs.seed_and_clock(options.seed, options.clock, is_repeatable)
        script = script_from(source, options, runs.limits, runs.policy.lint)
        if (seed, clock) != (script.seed, script.clock):
            script = replaced(script, seed=seed, clock=clock)
        repaired = self._journals().repaired(options.repairs) if options.repairs is not None else None
        link = RunLink(relation="repairs", after=repaired.run) if repaired is not None else None
        checked = await self._checks.check(script, options, tools, context, link)
        if isinstance(checked, ExecutionResult):
            return checked
        run = await runs.prepare(checked, tools, context, link, options)
        await self._begin(run, options, repaired)
        result = await runs.execute(run)
        if is_dry and context is not None:
            await self._dry_runs().keep(context, result)
        return result

    async def _begin(self, run: Run, options: RunOptions, repaired: Journal | None) -> None:
        """Begin the first run of a script: its journal, or the list of its calls where that is enough."""
        context, script = run.context, run.script
        is_dry = context.feature(DryRun) is not None
        is_durable = self._is_durable and not is_dry
        is_repeatable = is_durable or options.on_approval == "suspend"
        is_decided = options.on_approval != "ask" or bool(context.features.decide)
        if repaired is None and not is_dry and not (is_repeatable or is_decided):
            run.join(ListedCalls(run, self._finished))
            return
        from toolcell.control.journaled_calls import JournaledCalls
        from toolcell.control.script_header import header_of
        from toolcell.journal.ledger import Journal

        store = self._journals()
        journal = store.make(context.run_id) if is_repeatable else Journal(os.urandom(16).hex())
        if repaired is not None:
            journal.past, journal.labels = repaired.repairable(), repaired.labels
        journal.share_labels(context.state.labels)
        if is_repeatable:
            journal.header = header_of(
                source=run.message.source,
                inputs=run.message.inputs,
                script=script,
                tools=run.tools,
                on_approval=options.on_approval,
                refresh=options.refresh,
                repaired=repaired,
                context=context,
            )
        if is_durable:
            is_unknown = options.context is None  # its id is a new one
            await store.begin(journal, is_large=run.is_large, is_unknown=is_unknown)
        run.join(
            JournaledCalls(
                run,
                store=store,
                journal=journal,
                on_approval=options.on_approval,
                refresh=options.refresh,
                repaired=repaired.id if repaired is not None else "",
            )
        )

    async def carry_on(
        self, journal: Journal, tools: CallableTools, context: RunContext | None, options: RunOptions
    ) -> ExecutionResult:
        """Run the script of a journal that was taken."""
        from toolcell.control.journaled_calls import JournaledCalls
        from toolcell.control.script_header import continued_context, script_of

        header, is_joined = journal.header, False
        journal.begin_again()
        try:
            context = continued_context(journal, context)
            run = await self._runs.prepare(script_of(header), tools, context, journal.link, options)
            journal.share_labels(run.context.state.labels)
            run.join(
                JournaledCalls(
                    run,
                    store=self._journals(),
                    journal=journal,
                    on_approval=header["on_approval"],
                    refresh=header["refresh"],
                    repaired=header["repairs"],
                )
            )
            is_joined = True
            return await self._runs.execute(run)
        finally:
            if not is_joined:
                self._journals().put_down(journal)
