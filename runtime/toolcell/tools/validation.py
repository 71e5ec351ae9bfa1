"""Validate the arguments of one call: large ones in a thread, so that the event loop goes on; count what it took.

Part of `pipeline`. How arguments are checked is said in `arguments`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel

from toolcell.support import daemon_threads
from toolcell.support.host_work import ELEMENT_WORK, HostWork
from toolcell.tools.arguments import ArgumentChecker, ArgumentError, CheckedArguments, parse_arguments
from toolcell.tools.call import Call
from toolcell.tools.concurrency import ToolThread, passes_on
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.execution import cut_short
from toolcell.tools.finalize import failure_of
from toolcell.tools.placeholders import effects_in
from toolcell.tools.result import ErrorCode, Status, ToolResult
from toolcell.tools.schema import OF_RESULTS
from toolcell.tools.spec import RegisteredTool
from toolcell.tools.values import NO_BLOBS, BadValue, Path, copy_arguments, is_large


class OneAtATime:
    """Lets one check after another have a thread; first the one whose run has made the host do least.

    Several threads at work would keep the interpreter from the event loop, and would not be done any sooner. Whoever
    sends much waits behind whoever sends little: no guest keeps the calls of another from being checked.
    """

    def __init__(self) -> None:
        self.threads = anyio.CapacityLimiter(math.inf)
        """Bounds nothing. anyio's own gives back the place of a thread that was given up and runs on."""
        self._is_taken = False
        self._waiting: list[tuple[int, int, anyio.Event]] = []
        self._numbers = itertools.count()

    async def enter(self, used: int) -> None:
        """Wait for the thread. `used`: the work of the run until now."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = anyio.Event()
        entry = used, next(self._numbers), turn
        heapq.heappush(self._waiting, entry)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # it was handed over in the same moment
                self.leave()
            else:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def leave(self) -> None:
        """Give the thread to whoever waits."""
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()
        else:
            self._is_taken = False


_turns: anyio.lowlevel.RunVar[OneAtATime] = anyio.lowlevel.RunVar("toolcell_large_arguments")


async def validate(call: Call, tool: RegisteredTool, received: Any) -> ToolResult | None:
    """Set `call.args` to what the tool may be given, or return what is wrong with what was received.

    Cancellation: a thread goes on until it has checked its arguments, and nobody sees the outcome.
    """
    args = tool.checker.check_plain(received) if type(received) is dict else None
    if args is not None and tool.spec.decode is None:
        call.args, call.decoded = args, None
        return None
    check = _Check(tool, received)
    try:
        if args is not None:
            check.decode(args, NO_BLOBS)
            call.args, call.decoded = args, check.decoded
            return None
        if (checked := await _check_large(call, check) if is_large(received) else check()) is None:
            return cut_short(call)
    except ArgumentError as exc:
        return _count(call, check.steps) or unusable(tool, exc)
    except BaseException as exc:  # the tool's own types failed while they were made, or a value's own code
        if passes_on(exc):
            raise
        return _count(call, check.steps) or failure_of(call, exc)
    if (refusal := _count(call, check.steps)) is not None:
        return refusal
    call.changes = (*call.changes, *checked.changes)
    call.warnings = (*call.warnings, *checked.warnings)
    call.args, call.decoded = checked.args, check.decoded
    return None


class _Check:
    """Checks arguments and makes the tool's own types of them. Remembers what that took, whoever waits for it."""

    def __init__(self, tool: RegisteredTool, received: Any) -> None:
        self._tool, self._received = tool, received
        self.steps = 0
        """Values that were looked at."""
        self.decoded: Any = None

    def __call__(self) -> CheckedArguments:
        try:
            checked = self._tool.check(self._received)
        except ArgumentError as exc:
            self.steps = exc.steps
            raise
        self.steps = checked.steps
        self.decode(checked.args, checked.blobs)
        return checked

    def decode(self, args: dict[str, Any], blobs: Mapping[Path, bytes]) -> None:
        """Make the tool's own types of valid arguments, if it has any."""
        if self._tool.spec.decode is not None:
            self.decoded = self._tool.decode(args, blobs)

    def count_for(self, call: Call) -> None:
        """Count the work of a call that was given up: giving up is not free."""
        _count(call, self.steps)


async def _check_large(call: Call, check: _Check) -> CheckedArguments | None:
    """Check in a thread, when it is this call's turn; None when the call was cut short before."""
    try:
        turns = _turns.get()
    except LookupError:
        _turns.set(turns := OneAtATime())
    checked = list[CheckedArguments]()
    with call.run.state.cancellable(call.run.deadline):
        await turns.enter(call.run.scope.work.used if call.run.scope.work is not None else 0)
        thread = ToolThread(check)
        try:
            checked.append(await daemon_threads.run_sync(thread, abandon_on_cancel=True, limiter=turns.threads))
        finally:
            if thread.abandon():  # it runs on, and nobody else has its turn before it is over
                thread.when_over(lambda: check.count_for(call))
                thread.when_over(turns.leave)
            else:
                turns.leave()
    return checked[0] if checked else None


def _count(call: Call, steps: int) -> ToolResult | None:
    """Count values that were looked at for a guest; return a refusal when that was too much."""
    work = call.run.scope.work
    if work is None:
        return None
    work.used += ELEMENT_WORK * steps
    return no_work_left(work) if work.used > work.limit else None


def no_work_left(work: HostWork) -> ToolResult:
    """Return the refusal of a call whose run has made the host do too much."""
    message = f"the run has made the host do {work.used} units of work, limit {work.limit} (host_work); send less"
    return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, retryable=False, status=Status.BLOCKED)


def unusable(tool: RegisteredTool, exc: ArgumentError) -> ToolResult:
    """Return the refusal of arguments, in the words of the tool's adapter."""
    prefix = tool.spec.args_prefix
    message = str(exc) if prefix is None else prefix + str(exc).partition(": ")[2]
    return ToolResult.fail(message, code=exc.code, exc=exc.__cause__, facts=exc.details)


_CHECKED_AROUND = frozenset({
    "type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions", "$schema",
    OF_RESULTS,
})  # fmt: skip
"""Keywords of a schema that says something about each argument by itself."""


def note_placeholders(call: Call) -> tuple[str, ...]:
    """Set and return the effects whose results the arguments of a call refer to."""
    assert call.run.dry_run is not None
    if key := call.run.dry_run.key:
        call.depends_on = effects_in(arguments_of(call), key)  # before anything else looks at them
    return call.depends_on


def arguments_of(call: Call) -> Any:
    """Return the arguments as they were received, or what their JSON text says."""
    if not isinstance(call.raw_args, str):
        return call.raw_args
    try:
        return parse_arguments(call.raw_args)
    except ArgumentError:
        return {}  # the call is refused for that


async def take_around(call: Call, tool: RegisteredTool) -> ToolResult | None:
    """Check the arguments that hold no placeholders: set `call.args`, or return what is wrong with them."""
    assert call.run.dry_run is not None
    received = arguments_of(call)
    try:
        args = copy_arguments(received, tool.checker.tables).args
    except BadValue as exc:
        return ToolResult.fail(f"invalid tool arguments: {exc}", code=ErrorCode.INVALID_ARGUMENTS)
    key, schema = call.run.dry_run.key, tool.definition.checked_parameters
    later = {name: value for name, value in args.items() if name in _properties(schema) and effects_in(value, key)}
    if schema.keys() <= _CHECKED_AROUND:
        others = {name: value for name, value in received.items() if name not in later}
        if (refusal := await validate(call, _without(tool, schema, later), others)) is not None:
            return refusal
        args = {**call.args, **later}
    call.args, call.decoded = {name: args[name] for name in dict.fromkeys([*received, *args]) if name in args}, None
    return None


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _without(tool: RegisteredTool, schema: dict[str, Any], names: Mapping[str, Any]) -> RegisteredTool:
    """Return the tool without some of its parameters."""
    schema["properties"] = {name: part for name, part in _properties(schema).items() if name not in names}
    schema["required"] = [name for name in schema.get("required", ()) if name not in names]
    definition = ToolDefinition(tool.name, tool.definition.description, schema)
    options = tool.options
    checker = ArgumentChecker(definition, options.coercion or "safe", options.extras or "drop", options.validate)
    spec = replace(tool.spec, definition=definition, decode=None, prepare=None)
    return RegisteredTool(spec, checker, tool.aliases, tool.identity)
