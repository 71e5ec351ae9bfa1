"""`BegunCoroutine`: a coroutine that was driven to its first wait by hand. One that never waits needs no task."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


class BegunCoroutine(Generic[Answer]):
    """Awaits the rest of such a coroutine. In the same task: cancel scopes that it has entered belong to that."""

    def __init__(self, work: Coroutine[Any, Any, Answer], waits_for: Any, context: Context | None = None) -> None:
        """`waits_for`: what its first `send(None)` returned. `context`: its own, in which it was begun."""
        self._work = work
        self._waits_for = waits_for
        self._run = _call if context is None else context.run

    def __await__(self) -> Generator[Any, Any, Answer]:
        work, run, waits_for = self._work, self._run, self._waits_for
        while True:
            try:
                try:
                    sent = yield waits_for
                except BaseException as exc:
                    waits_for = run(work.throw, exc)
                else:
                    waits_for = run(work.send, sent)
            except StopIteration as finished:
                answer: Answer = finished.value
                return answer


def _call(step: Callable[[Any], Any], sent: Any) -> Any:
    return step(sent)
