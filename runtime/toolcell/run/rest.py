"""`Rest`: await a call that was begun without a task of its own."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any

from toolcell.run.calls import Answer


class Rest:
    """Awaits, in the same task, a coroutine that has been driven to its first wait by hand."""

    def __init__(self, work: Coroutine[Any, Any, Answer], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Answer]:
        waits_for = self._waits_for
        while True:
            try:
                try:
                    sent = yield waits_for
                except BaseException as exc:
                    waits_for = self._work.throw(exc)
                else:
                    waits_for = self._work.send(sent)
            except StopIteration as finished:
                answer: Answer = finished.value
                return answer
