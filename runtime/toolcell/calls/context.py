"""The tool's own view of the call it serves: who it is for, secrets, progress, background work, further calls.

`current` is the context of the call that is being executed in this task or thread. A contextual tool keeps its chat or
callback in itself, and calls for several chats overlap: a view is an object of the tool's class that passes everything
on to the author's instance, except for the attributes that `set_context` and `set_callback` set.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Self

import anyio
import anyio.from_thread
import anyio.lowlevel

from toolcell.calls.call import Call, RunContext
from toolcell.calls.concurrency import maybe_await
from toolcell.calls.events import TOOL_OUTPUT, TOOL_UPDATE
from toolcell.calls.finalize import finalize, finalize_soon, may_be_data, show_user, with_data
from toolcell.calls.hooks import after_hooks, show_after_hooks
from toolcell.calls.options import Origin
from toolcell.calls.result import ErrorCode, ToolResult
from toolcell.calls.run_state import Job, Work, contained, run_alone
from toolcell.errors import RegistrationError, ToolError, UsageError
from toolcell.support import event_loop
from toolcell.support.checks import check_kind
from toolcell.support.log import logger_of
from toolcell.support.token_bucket import TokenBucket

logger = logger_of("toolcell.tools")


# What a tool tells while it runs, from any thread, and only until it is done: states and output


UPDATES_PER_S = 20.0
BURST = 20
"""Updates let through at once before the rate applies; later ones replace each other until there is room."""
MAX_UPDATE_CHARS = 200_000
MAX_PIECE_CHARS = 8_000


class ProgressReporter:
    """The updates of one call. Call it: `progress("half way")`, `progress(details={"rows": 3})`."""

    __slots__ = ("_bucket", "_closed", "_emit", "_thread", "_token", "_wait_for_room", "_waiting", "ignored")

    def __init__(
        self, emit: Callable[[str, dict[str, Any]], None], wait_for_room: Callable[[], Awaitable[None]]
    ) -> None:
        self._emit, self._wait_for_room = emit, wait_for_room
        self._closed = False
        self._bucket = TokenBucket(1 / UPDATES_PER_S, BURST)
        self._thread = threading.get_ident()
        self._token = anyio.lowlevel.current_token()
        self._waiting: dict[str, Any] | None = None
        self.ignored = 0
        """Updates that came after the tool was done."""

    def __call__(self, partial: object = None, *, details: Any = None) -> None:
        update = _as_update(partial, details)
        if self._closed or threading.get_ident() == self._thread:
            self._accept(update)
            return
        try:
            anyio.from_thread.run_sync(self._accept, update, token=self._token)
        except RuntimeError:  # the event loop is gone, and with it whoever was watching
            self.ignored += 1

    def write(self, text: str) -> Awaitable[None]:
        """Write a piece of the tool's output: `await on_update.write("a line")`. In a thread it waits by itself."""
        check_kind("what a tool writes", text, str)
        if self._closed or threading.get_ident() == self._thread:
            return self._write(text)
        with suppress(RuntimeError):  # the event loop is gone, and with it whoever was watching
            anyio.from_thread.run(lambda: maybe_await(self._write(text)), token=self._token)
        return _Later()

    def _write(self, text: str) -> Awaitable[None]:
        if self._closed:
            self.ignored += 1
            return _Later()
        for start in range(0, len(text), MAX_PIECE_CHARS):
            self._emit(TOOL_OUTPUT, {"text": text[start : start + MAX_PIECE_CHARS]})
        return _Later(self._wait_for_room)

    def _accept(self, update: dict[str, Any]) -> None:
        if self._closed:
            self.ignored += 1
        elif self._has_room():
            self._waiting = None
            self._emit(TOOL_UPDATE, update)
        else:
            self._waiting = update

    def _has_room(self) -> bool:
        now = time.monotonic()
        if self._bucket.wait_s(now):
            return False
        self._bucket.take(now)
        return True

    def close(self) -> None:
        """Let the last update that waited for room through, and no other after it."""
        if self._waiting is not None:
            self._emit(TOOL_UPDATE, self._waiting)
            self._waiting = None
        self._closed = True
        self._emit, self._wait_for_room = lambda kind, update: None, anyio.lowlevel.checkpoint
        # it leads to the call, and from there to here: only the garbage collector would find that


class _Later:
    """Awaits what there is to wait for, if anything; nothing is lost when nobody does."""

    def __init__(self, wait: Callable[[], Awaitable[Any]] | None = None) -> None:
        self._wait = wait

    def __await__(self) -> Generator[Any, Any, Any]:
        if self._wait is not None:
            yield from self._wait().__await__()


def _as_update(partial: object, details: Any) -> dict[str, Any]:
    """Shape: {"text", "details"}, without what is None."""
    text: str | None
    match partial:
        case ToolResult():
            text, details = partial.output or None, partial.details if details is None else details
        case None:
            text = None
        case str():
            text = partial
        case Mapping():
            text, details = None, partial if details is None else details
        case _:
            text = str(partial)
    if isinstance(details, str):
        details = details[:MAX_UPDATE_CHARS]
    elif details is not None and not _is_short(details):
        details = f"({type(details).__name__} too large to show)"
    given = {"text": None if text is None else text[:MAX_UPDATE_CHARS], "details": details}
    return {name: value for name, value in given.items() if value is not None}


def _is_short(value: Any) -> bool:
    """True when the text of a value is within bounds. Looks at no more of the value than that."""
    left, unseen = MAX_UPDATE_CHARS, [value]
    while unseen:
        each = unseen.pop()
        is_many = isinstance(each, Mapping | list | tuple | set | frozenset)
        left -= len(each) if is_many or isinstance(each, str | bytes | bytearray) else 1
        if left < 0:
            return False
        if is_many:
            unseen += each
            unseen += each.values() if isinstance(each, Mapping) else ()
    return len(repr(value)) <= MAX_UPDATE_CHARS


class ToolContext:
    """What a tool may know about its call. Read-only; one per call."""

    __slots__ = ("call", "completion", "is_closing", "is_over", "progress", "scope")

    def __init__(self, call: Call) -> None:
        self.call = call
        """The record of the call."""
        self.scope: anyio.CancelScope | None = None
        """Cancelled when the call times out or the run is cancelled."""
        self.progress: ProgressReporter | None = None
        """Made by `update`."""
        self.completion: Completion | None = None
        """Made by `callback`."""
        self.is_over = False
        """The tool has returned: further updates are ignored."""
        self.is_closing = False
        """Somebody closes the coroutine of the call, and it must not go on."""

    # Who asks

    @property
    def run(self) -> RunContext:
        """The run, for passing on to other registries and agents."""
        return self.call.nested_run()

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.call.run.run_id

    @property
    def call_id(self) -> str:
        """The model's id of this call, unchanged."""
        return self.call.call_id

    @property
    def tool(self) -> str:
        """The name that was called."""
        return self.call.name

    @property
    def origin(self) -> Origin:
        """Where the call comes from."""
        return self.call.origin

    @property
    def parent_call_id(self) -> str | None:
        """The call this one was made in."""
        return self.call.parent_call_id

    @property
    def user_id(self) -> str:
        """Empty when the run is for nobody in particular."""
        return self.call.run.user_id

    @property
    def thread_id(self) -> str:
        """Empty when there is none."""
        return self.call.run.thread_id

    @property
    def channel(self) -> str:
        """Empty when there is none."""
        return self.call.run.channel

    @property
    def chat_id(self) -> str:
        """Empty when there is none."""
        return self.call.run.chat_id

    @property
    def custom(self) -> Mapping[str, Any]:
        """The application's own keys."""
        return self.call.run.custom

    @property
    def limits(self) -> Any:
        """Limits of the run's sandboxes, as given with the run."""
        return self.call.run.limits

    @property
    def logger(self) -> logging.Logger:
        """The run's logger, which is the program's: what a tool writes to it is not searched for secrets."""
        return self.call.run.logger

    @property
    def deadline(self) -> float:
        """On the event loop's clock; `math.inf` when nothing bounds the call yet."""
        own = self.scope.deadline if self.scope is not None else self.call.run.deadline
        return min(self.call.run.deadline, own)

    def secret(self, name: str) -> str:
        """Return a secret registered with the run.

        Raises:
            ToolError: there is none of that name.
        """
        if (value := self.call.run.secrets.get(name)) is None:
            raise ToolError(f"no secret named {name!r} is configured", code="unavailable")
        return value

    def require_task(self) -> RunContext:
        """Return the run, when it is for somebody: a user, a thread, a chat.

        Raises:
            ToolError: `no task context`.
        """
        run = self.call.run
        if not (run.user_id or run.thread_id or run.chat_id or run.channel or run.custom):
            raise ToolError("no task context", code="unavailable")
        return run

    # Progress and events

    @property
    def update(self) -> ProgressReporter:
        """Report progress: `ctx.update("half way")`, `ctx.update(details={...})`. Works from any thread."""
        if self.progress is None:
            self.progress = ProgressReporter(self._emit_update, self.call.run.events.wait_for_room)
            if self.is_over:
                self.progress.close()
        return self.progress

    def _emit_update(self, kind: str, update: dict[str, Any]) -> None:
        self.call.emit(kind, args=self.call.args, update=update)

    def write(self, text: str) -> Awaitable[None]:
        """Stream a piece of the tool's output, whole and in order: `await ctx.write("a line")`.

        Who listens gets each piece as `tool_execution_output`. It waits while more is written than is read. In a thread
        it needs no `await`.
        """
        return self.update.write(text)

    def for_any_thread(self) -> Self:
        """Return the context, after creating what can only be created in the event loop's thread."""
        _ = self.update
        return self

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Let the end of its run alone cut short a call whose tool is done: its result waits for others' large data,
        and this time does not count."""
        scope, now = self.scope, event_loop.clock()
        assert scope is not None
        began, before, scope.deadline = now(), scope.deadline, self.call.run.deadline
        try:
            yield
        finally:
            scope.deadline = min(before + now() - began, self.call.run.deadline)

    def emit(self, kind: str, **data: Any) -> None:
        """Emit an event of the tool's own."""
        self.call.emit(kind, data=data)

    # Further calls and background work

    @property
    def callback(self) -> Completion | None:
        """To be called once with the final result of work that goes on after the call; None when nobody listens."""
        call = self.call
        jobs = call.run.state.jobs
        if self.completion is None and (jobs is not None or call.run.on_complete is not None):
            self.completion = Completion(call, jobs.start(call, None) if jobs is not None else None)
        return self.completion

    def start_job(self, work: Work, *, ack: str = "started", timeout_s: float | None = None) -> ToolResult:
        """Have work go on after the call, and return the pending result to give back.

        It belongs to the run's jobs. A call that is made without any has it as its own last step, and returns its
        result; with an `on_complete`, the work goes on by itself and that gets the result.
        """
        call = self.call
        jobs = call.run.state.jobs

        async def finished() -> ToolResult:
            return await concluded(call, await contained(work))

        if jobs is not None:
            return ToolResult.async_(ack, job_id=jobs.start(call, finished, timeout_s).id)

        alone = partial(run_alone, call.name, finished, timeout_s)

        async def delivered() -> None:
            await maybe_await(call.deliver(await alone()))

        if call.run.on_complete is None:
            call.last_step = alone
        else:
            _begun(delivered())
        return ToolResult.async_(ack)

    async def call_tool(self, name: str, args: Mapping[str, Any] | None = None) -> ToolResult:
        """Call another tool on the same path, with the caller's rights."""
        call, tools = self.call, self.call.registry
        return await tools.make(tools.new_call(name, args or {}, origin=call.origin, context=call.nested_run()))


async def concluded(call: Call, result: ToolResult) -> ToolResult:
    """Return the result of background work as everybody gets it: bounded, redacted, and seen by the after hooks."""
    result = await with_data(call.name, call.options, result, is_foreign=True)  # nobody here knows
    result = await finalize_soon(result, call, 0.0)
    shown = await show_after_hooks(call, result)
    result = result if shown is result else await finalize_soon(shown, call, 0.0)
    await show_user(call, result)
    return result


def _needs_time(call: Call, result: ToolResult) -> bool:
    """Return whether something is done about a final result that has to be awaited."""
    shows = call.run.scope.on_user is not None and result.user_text is not None
    return shows or may_be_data(call.options, result) or bool(after_hooks(call))


def _begun(delivery: Coroutine[Any, Any, None]) -> Awaitable[Any]:
    """Begin to deliver a result, so that it arrives whether or not the tool awaits it. On trio the tool has to."""
    try:
        return event_loop.start_task(delivery)
    except RuntimeError:  # asyncio's loop does not run here
        return delivery


class Completion:
    """Given to a tool with its call: `await callback(result)`, or `callback(ctx, result)`. Only the first counts."""

    def __init__(self, call: Call, job: Job | None) -> None:
        self._call = call
        self._job = job
        self._used = False
        self._thread = threading.get_ident()
        self._token = anyio.lowlevel.current_token()

    @property
    def job_id(self) -> str | None:
        """Id of the job the run keeps for this work."""
        return self._job.id if self._job is not None else None

    def discard_job(self) -> None:
        """Keep no job: the call has its answer already."""
        jobs = self._call.run.state.jobs
        if self._job is not None and not self._used and jobs is not None:
            jobs.discard(self._job)
            self._job = None

    def __call__(self, *args: Any) -> Awaitable[Any]:
        result = args[-1] if args else None
        if not isinstance(result, ToolResult):
            result = ToolResult.fail("async tool completed without a result", code=ErrorCode.NO_RESULT)
        if threading.get_ident() != self._thread:
            anyio.from_thread.run(lambda: maybe_await(self._complete(result)), token=self._token)
            return _Later()
        return self._complete(result)

    def _complete(self, result: ToolResult) -> Awaitable[Any]:
        state = self._call.run.state
        if self._used or state.cancel_reason is not None:
            logger.warning("late completion of %s (call %s) ignored", self._call.name, self._call.call_id)
            return _Later()
        self._used = True
        job, jobs = self._job, state.jobs
        if _needs_time(self._call, result):
            if job is None or jobs is None:
                return _begun(self._deliver(result))
            jobs.conclude(job, partial(concluded, self._call, result))
            return _Later(job.wait)
        result = finalize(result, self._call, 0.0)
        if job is not None and jobs is not None:
            jobs.finish(job, result)
            return _Later()
        delivery = self._call.deliver(result)
        return _begun(delivery) if inspect.iscoroutine(delivery) else delivery or _Later()

    async def _deliver(self, result: ToolResult) -> None:
        await maybe_await(self._call.deliver(await concluded(self._call, result)))


def share_labels(run: RunContext) -> None:
    """Give a run that begins in a tool call the labels of that call's run, and the other way round."""
    above = current.get()
    if above is None or run.scope.is_shared:
        return
    outer = above.run
    if not outer.scope.is_shared and outer.state is not run.state:
        run.state.labels.join(outer.state.labels)


current: ContextVar[ToolContext | None] = ContextVar("toolcell_context", default=None)
"""The call being executed in this task or thread."""


def current_context() -> ToolContext:
    """Return the context of the call being executed, for code that is not handed one.

    Raises:
        UsageError: no tool call is being executed here.
    """
    if (context := current.get()) is None:
        raise UsageError("no tool call is being executed here")
    return context


_TOOL, _OWN, _IS_SETTING = "_toolcell_tool", "_toolcell_own", "_toolcell_is_setting"
_READ, _WRITE = object.__getattribute__, object.__setattr__


def view_class(kind: Any) -> Any:
    """Return the class of views of such a tool.

    Raises:
        RegistrationError: its class cannot be derived from.
    """

    def read(view: Any, name: str) -> Any:
        own = _READ(view, _OWN)
        if name in own:
            return own[name]
        tool = _READ(view, _TOOL)
        if name == "__dict__":
            return tool.__dict__
        if name == "__class__":
            return kind
        if name in getattr(tool, "__dict__", ()):
            return getattr(tool, name)
        if isinstance(inspect.getattr_static(kind, name, None), types.MemberDescriptorType):  # of __slots__
            return getattr(tool, name)
        return kind.__getattribute__(view, name)

    def write(view: Any, name: str, value: object) -> None:
        own = _READ(view, _OWN)
        if isinstance(inspect.getattr_static(kind, name, None), property):
            kind.__setattr__(view, name, value)
        elif name in own or _READ(view, _IS_SETTING):
            own[name] = value
        else:
            setattr(_READ(view, _TOOL), name, value)

    def delete(view: Any, name: str) -> None:
        own = _READ(view, _OWN)
        if name in own:
            del own[name]
        else:
            delattr(_READ(view, _TOOL), name)

    body = {"__getattribute__": read, "__setattr__": write, "__delattr__": delete, "__module__": kind.__module__}
    try:
        return type(kind)(kind.__name__, (kind,), body)
    except TypeError as exc:
        raise RegistrationError(
            f"a tool with set_context or set_callback, and its class {kind.__name__} cannot be derived from: {exc}"
        ) from exc


def new_view(view: Any, tool: Any) -> Any:
    """Return a view of a tool for one call."""
    made = object.__new__(view)
    _WRITE(made, _TOOL, tool)
    _WRITE(made, _OWN, {})
    _WRITE(made, _IS_SETTING, False)
    return made


@contextmanager
def setting(view: Any) -> Iterator[None]:
    """Keep what is set inside the block for this view alone."""
    _WRITE(view, _IS_SETTING, True)
    try:
        yield
    finally:
        _WRITE(view, _IS_SETTING, False)
