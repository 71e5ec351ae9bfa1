"""Read one record for many requests: a thread of its own keeps it open and answers in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from toolcell.audit import Index, Verifier
from toolcell.support import daemon_threads

Answer = TypeVar("Answer")

LOOK_AGAIN_S: Final = 0.25
READING_SHARE: Final = 10
"""A log that grows is read again at most for a tenth of the time, however large it is."""


class LogReader:
    """One record, and answers from it that are kept until it changes. Close it."""

    def __init__(
        self,
        directory: str | Path,
        verifiers: Iterable[Verifier] = (),
        *,
        is_patient: bool = True,
    ) -> None:
        """`is_patient`: an answer may be of a moment ago; otherwise it has all that was written before the question."""
        self.directory = Path(directory)
        self._is_patient = is_patient
        self.verifiers = tuple(verifiers)
        self.revision = 0
        """Counts how often something new was read."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="toolcell-log")
        self._index: Index | None = None
        self._seen: object = None
        self._look_at_s = 0.0
        self._kept: dict[object, tuple[int, Any]] = {}

    async def read(self, question: Callable[[Index], Answer]) -> Answer:
        """Return the answer to a question.

        Raises:
            AuditError: there is no log, or it cannot be read.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._answer, question)

    async def read_kept(self, key: object, question: Callable[[Index], Answer]) -> Answer:
        """Do the same, and keep the answer until the log changes. `key` names the question."""

        def kept(index: Index) -> Answer:
            revision, answer = self._kept.get(key, (-1, None))
            if revision != self.revision:
                answer = question(index)
                if len(self._kept) >= 64:
                    self._kept.clear()
                self._kept[key] = (self.revision, answer)
            return answer  # type: ignore[no-any-return]

        return await self.read(kept)

    async def close(self) -> None:
        """Close the index and end the thread. Safe to call twice."""
        await daemon_threads.run_sync(self.close_now)

    def close_now(self) -> None:
        """Close where no event loop runs."""
        try:
            self._executor.submit(self._close_index)
        except RuntimeError:  # closed before
            return
        self._executor.shutdown(wait=True)

    # In the thread

    def _answer(self, question: Callable[[Index], Answer]) -> Answer:
        if self._index is None:
            self._index = Index(self.directory, self.verifiers)
        self._refresh(self._index)
        return question(self._index)

    def _refresh(self, index: Index) -> None:
        """Read what is new, unless that was done a moment ago."""
        if self._is_patient and time.monotonic() < self._look_at_s:
            return
        state = index.state()
        begun_s = time.monotonic()
        if state != self._seen:
            index.refresh()
            self._seen = state
            self.revision += 1
        took_s = time.monotonic() - begun_s
        self._look_at_s = time.monotonic() + max(LOOK_AGAIN_S, READING_SHARE * took_s)

    def _close_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None
