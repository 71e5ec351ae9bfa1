"""`RunObserver`: what the audit log, or nobody, is told about the steps of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.run_state import RunLink
from toolcell.config import Policy
from toolcell.errors import AuditError
from toolcell.results import ExecutionResult
from toolcell.run.request import RunRequest
from toolcell.sandbox.backend import Sandbox
from toolcell_bridge.wire.messages import CallTool


class RunObserver(Protocol):
    """Follows one run. The methods are called in the order in which they are written here.

    `on_script_sent` and `on_answers_sent` come when the guest is busy with what it was sent, so their time costs the
    script nothing. No tool is called before `on_script_sent` has returned. What a method returns is awaited.
    """

    def on_sandbox(self, sandbox: Sandbox) -> None:
        """A sandbox was found for the run."""

    def on_script_sent(self) -> Awaitable[None] | None:
        """The script was sent.

        Raises:
            AuditError: this could not be recorded; the run ends with the error.
        """

    def context_of(self, call: CallTool, call_id: str, context: RunContext) -> RunContext:
        """Return the context in which the tool call `call_id` is made; `context` is the run's."""
        ...

    def on_unrecorded(self, error: AuditError) -> None:
        """A tool call could not be recorded. The run is being ended, and the result must not be returned."""

    def on_answers_sent(self) -> None:
        """Every answer so far was sent.

        Raises:
            ToolAbort: the end of a call could not be recorded; the run ends.
        """

    def on_end(self, result: ExecutionResult) -> Awaitable[None] | None:
        """The run has a result.

        Raises:
            AuditError: the result, or something before it, could not be recorded.
        """

    async def on_failure(self, error: BaseException) -> None:
        """The run ends with an exception. Must not raise."""


class RunRecorder(Protocol):
    """Begins the records of runs: `Recorder` of the audit log does."""

    async def run_observer(
        self,
        request: RunRequest,
        *,
        tools: CallableTools,
        context: RunContext,
        policy: Policy,
        environment: Mapping[str, Any],
        egress: Sequence[Mapping[str, Any]],
    ) -> RunObserver:
        """Return the observer of a script's run."""
        ...

    def observe(self, context: RunContext, kind: str, link: RunLink | None) -> AbstractAsyncContextManager[RunContext]:
        """Record the calls that are made with the yielded context."""
        ...


class NullObserver:
    """The observer of a run that nobody records."""

    __slots__ = ()

    def on_sandbox(self, sandbox: Sandbox) -> None:
        """Do nothing."""

    def on_script_sent(self) -> None:
        """Do nothing."""

    def context_of(self, call: CallTool, call_id: str, context: RunContext) -> RunContext:
        """Return the context of the run."""
        return context

    def on_unrecorded(self, error: AuditError) -> None:
        """Do nothing."""

    def on_answers_sent(self) -> None:
        """Do nothing."""

    def on_end(self, result: ExecutionResult) -> None:
        """Do nothing."""

    async def on_failure(self, error: BaseException) -> None:
        """Do nothing."""


NULL_OBSERVER: RunObserver = NullObserver()
