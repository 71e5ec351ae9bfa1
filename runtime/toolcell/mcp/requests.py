"""What a server asks of its client, between a call and its answer: a person's answer, or a model's.

Refused, unless the host's program gave a function for it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
from mcp.client import ClientRequestContext
from mcp_types import (
    INVALID_REQUEST,
    CreateMessageRequestParams,
    CreateMessageResult,
    ElicitRequestParams,
    ElicitRequestURLParams,
    ElicitResult,
    ErrorData,
    TextContent,
)

from toolcell.calls.checker_process import find_problem, refused_schemas
from toolcell.errors import RegistrationError
from toolcell.support import daemon_threads
from toolcell.support.event_loop import ChangeEvent
from toolcell.support.foreign_definitions import bounded_schema, safe_text

MAX_QUESTION_CHARS = 2_000
MAX_QUESTIONS_OF_CALL = 10
"""That a server may ask between one call and its answer, of a person and of a model together."""
MAX_OPEN_QUESTIONS = 8
"""Most questions of one server, that wait for an answer: fewer than the requests that end its connection."""

Elicit = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any] | None] | Mapping[str, Any] | None]
"""`elicit(message, schema)`, awaited or plain: the answer, an object that fits the schema; None declines. Of a question
that asks to open a page, the schema is {"url": "https://..."}, and the answer {} when the person has agreed to."""
Sample = Callable[[Mapping[str, Any]], Awaitable[str] | str]
"""`sample(params)`, awaited or plain: a model's text for the params of `sampling/createMessage`."""


def defaults_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default values of a form's fields: what an answer leaves out has them."""
    fields = schema.get("properties")
    if not isinstance(fields, Mapping):
        return {}
    return {
        name: field["default"] for name, field in fields.items() if isinstance(field, Mapping) and "default" in field
    }


async def called(function: Callable[..., Any], *args: Any, purpose: str) -> Any:
    """Return what a function of the host returns. A plain one runs in a thread, of those for this purpose."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    found = await daemon_threads.run_sync(
        partial(function, *args), abandon_on_cancel=True, limiter=daemon_threads.limiter_of(purpose)
    )
    return await found if inspect.isawaitable(found) else found


class Refused(Exception):
    """A question that is not asked. The text says why."""


class Questions:
    """What one server asks: only during a call, at most one at a time for each, and not many in all."""

    def __init__(self) -> None:
        self._calls = 0
        self._left = 0
        """Questions that may still be asked."""
        self._waiting = 0
        self._asked: list[anyio.CancelScope] = []
        """Those that somebody answers now, oldest first."""
        self._changed = ChangeEvent()
        self._threads: anyio.CapacityLimiter | None = None
        self._busy = 0
        """Threads in which a function goes on, though nobody waits for it any more."""
        self._lock = threading.Lock()

    @contextmanager
    def during_call(self) -> Iterator[None]:
        """Let the server ask while a call is under way. At its end, its question is over."""
        self._calls += 1
        self._left += MAX_QUESTIONS_OF_CALL
        try:
            yield
        finally:
            self._calls -= 1
            self._left = min(self._left, self._calls * MAX_QUESTIONS_OF_CALL)
            for scope in self._asked[: max(0, len(self._asked) - self._calls)]:
                scope.cancel()
            self._changed.notify()

    async def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function of the host returns. A plain one runs in a thread: it may wait for a person.

        Raises:
            Refused: it is not asked, or its call has ended meanwhile.
        """
        if not self._calls:
            raise Refused("no call is under way")
        if not self._left:
            raise Refused(f"a call may ask {MAX_QUESTIONS_OF_CALL} questions, and has")
        if self._waiting + len(self._asked) >= MAX_OPEN_QUESTIONS or self._busy >= MAX_OPEN_QUESTIONS:
            raise Refused(f"{MAX_OPEN_QUESTIONS} questions of this server are not answered")
        self._left -= 1
        self._waiting += 1
        try:
            while len(self._asked) >= self._calls > 0:
                await self._changed.wait()
        finally:
            self._waiting -= 1
        if not self._calls:
            raise Refused("its call has ended")
        with anyio.CancelScope() as scope:
            self._asked.append(scope)
            try:
                is_async = inspect.iscoroutinefunction(function)
                found = function(*args) if is_async else await self._in_thread(function, args)
                return await found if inspect.isawaitable(found) else found
            finally:
                self._asked.remove(scope)
                self._changed.notify()
        raise Refused("its call has ended")

    async def _in_thread(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(MAX_OPEN_QUESTIONS)

        def work() -> Any:
            with self._lock:
                self._busy += 1
            try:
                return function(*args)
            finally:
                with self._lock:
                    self._busy -= 1

        return await daemon_threads.run_sync(work, abandon_on_cancel=True, limiter=self._threads)


def request_callbacks(questions: Questions, elicit: Elicit | None, sample: Sample | None) -> dict[str, Any]:
    """Return the callbacks of an MCP client. The capability of what is refused is not declared."""

    async def answer(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult | ErrorData:
        assert elicit is not None
        message, form = safe_text(params.message, MAX_QUESTION_CHARS), None
        try:
            if isinstance(params, ElicitRequestURLParams):
                url = params.url
                if not url.startswith(("https://", "http://")) or safe_text(url, MAX_QUESTION_CHARS) != url:
                    raise Refused("a page to open has an http or https URL")
                given = await questions.ask(elicit, message, {"url": url})
            else:
                form = bounded_schema(params.requested_schema, "the question's schema")
                if refused := (await refused_schemas([form]))[0]:
                    raise RegistrationError(refused)
                given = await questions.ask(elicit, message, form)
        except (RegistrationError, Refused) as exc:
            return ErrorData(code=INVALID_REQUEST, message=f"the question was not asked: {exc}")
        except Exception as exc:
            return ErrorData(code=INVALID_REQUEST, message=f"the question was not answered: {type(exc).__name__}")
        if given is None:
            return ElicitResult(action="decline")
        if form is None:
            return ElicitResult(action="accept")
        content = defaults_of(form) | dict(given)
        if (problem := await find_problem(form, content, is_foreign=True)) is not None:
            at = "/".join(map(str, problem.path)) or "its root"
            return ErrorData(code=INVALID_REQUEST, message=f"the answer does not fit the schema at {at:.100}")
        return ElicitResult(action="accept", content=content)

    async def write(
        context: ClientRequestContext, params: CreateMessageRequestParams
    ) -> CreateMessageResult | ErrorData:
        assert sample is not None
        try:
            text = await questions.ask(sample, params.model_dump(mode="json", by_alias=True, exclude_none=True))
        except Refused as exc:
            return ErrorData(code=INVALID_REQUEST, message=f"the model was not asked: {exc}")
        except Exception as exc:
            return ErrorData(code=INVALID_REQUEST, message=f"no text was written: {type(exc).__name__}")
        return CreateMessageResult(role="assistant", content=TextContent(type="text", text=text), model="host")

    callbacks = {"elicitation_callback": (elicit, answer), "sampling_callback": (sample, write)}
    return {name: callback for name, (function, callback) in callbacks.items() if function is not None}
