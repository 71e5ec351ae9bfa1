"""Look at a script before it runs: its calls and its types. `PreflightRuntime` is a base of `Runtime`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from toolcell.config import CheckTypes, Limits, check_types_of
from toolcell.control.controlled import ControlledRuntime
from toolcell.control.draft import Draft
from toolcell.control.scripts import Script
from toolcell.control.type_check import NOTHING_EARLIER, Earlier, TypeChecker, TypeFindings
from toolcell.results import ExecutionResult
from toolcell.run.feed import ScriptFeed
from toolcell.run.observer import NULL_OBSERVER
from toolcell.run.tool_bridge import ToolBridge
from toolcell.tools.call import CallableTools, RunContext
from toolcell.tools.threads import AbandonedThreads

if TYPE_CHECKING:
    from toolcell.effects import Preflight


class PreflightRuntime(ControlledRuntime):
    """The part of a runtime that reads scripts without running them."""

    _numbers: Iterator[int]
    _abandoned: AbandonedThreads
    _type_checker: TypeChecker

    async def preflight(
        self, source: str, *, tools: CallableTools | Iterable[Any] | None = None, limits: Limits | None = None
    ) -> Preflight:
        """Return the calls that a script can make, as far as they are written out. It is read in a sandbox; none runs.

        Raises:
            UsageError: `source` is no text, or too large.
            SandboxUnavailable: no sandbox could be started.
        """
        from toolcell.control.preflight import preflight_request, read_preflight

        registry = self._tools(tools)
        request = preflight_request(next(self._numbers), source, limits or self.limits)
        bridge = ToolBridge(registry, RunContext(), NULL_OBSERVER)  # this script makes no call
        abandoned = AbandonedThreads(self._abandoned)
        return read_preflight(await self._run(request, bridge, NULL_OBSERVER, abandoned, None), registry)

    async def _checked_types(
        self,
        wanted: bool | CheckTypes | None,
        source: str | ScriptFeed,
        tools: CallableTools,
        inputs: Mapping[str, Any] | None,
        context: RunContext | None,
        earlier: Earlier = NOTHING_EARLIER,
    ) -> TypeFindings:
        """Return what is wrong with the types of a script, if they are to be checked."""
        if isinstance(source, ScriptFeed):  # whoever wants types checked has been refused already
            return TypeFindings()
        isolates = self._backend is not None and self._backend.isolates
        said = check_types_of(context.check_types) if context is not None and isolates else None
        degree = check_types_of(wanted) or self.policy.check_types
        return await self._type_checker.check(degree, said, source, tools, inputs, earlier)

    async def _planned(
        self, script: Script, tools: CallableTools, context: RunContext | None
    ) -> Script | ExecutionResult:
        """Return a script with its preflight; or the result of one whose calls cannot succeed, which must not run."""
        planned = await self.preflight(script.source, tools=tools, limits=script.limits)
        if planned.problems:
            from toolcell.control.preflight import refused

            return refused(context.run_id if context is not None else os.urandom(16).hex(), planned)
        if context is not None and isinstance(context.dry_run, Draft):
            context.dry_run.preflight = planned
        return dataclasses.replace(script, preflight=planned)
