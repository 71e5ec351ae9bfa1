"""`ScriptFeed`: the text of a script on its way from whoever writes it to the guest, and what becomes of it there.

The host cuts the text nowhere and reads nothing in it: the guest finds its statements.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, Literal, get_args

from toolcell.errors import UsageError
from toolcell.results import ExecutionResult, Outcome
from toolcell.results.eager import EagerReport, RetractedText
from toolcell.run.early_calls import EarlyCalls
from toolcell.support.change_event import ChangeEvent
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.messages import AnnounceParts, CallAhead, PartRetracted, Ran, ScriptPart

OnRetract = Literal["report", "stop"]

ROOM_BYTES: Final = 4096
"""Part of a frame that is kept free for the fields beside the source."""

PART_CHARS: Final = 16 * 1024
"""Most that one part holds. It fits into a socket's buffer, so that sending it does not wait for the guest."""


class ScriptFeed:
    """The text of one script."""

    def __init__(self, most_chars: int, on_retract: OnRetract = "report", speculate: bool = False) -> None:
        """
        Raises:
            UsageError: an argument is wrong.
        """
        if on_retract not in get_args(OnRetract):
            raise UsageError(f'on_retract must be "report" or "stop", not {on_retract!r:.40}')
        if not isinstance(speculate, bool):
            raise UsageError(f"speculate must be True or False, not {speculate!r:.40}")
        self.speculates = speculate
        self.early: EarlyCalls | None = None
        self._on_retract = on_retract
        self._most_chars = most_chars - ROOM_BYTES
        self._pieces: list[str] = []
        self._length = 0
        self._half = ""
        """The first half of a surrogate pair whose second half has not come."""
        self._problem = ""
        self._is_whole = False
        self._sent = ""
        self._is_changed = False
        """What was sent is not the beginning of the text any more, from `_kept` on."""
        self._kept = 0
        self._is_last_sent = False
        self._waits = False
        """For the guest to say what it had run of a text that was retracted."""
        self._finished_at: float | None = None
        self._news = ChangeEvent()
        self._stop: Callable[[str], object] = _nothing
        self._retractions: deque[str] = deque()
        """The text before each part that took text back, until the guest has told about it."""
        self._retracted: list[tuple[RetractedText, float]] = []
        self._ran = Ran(0, 0)

    @classmethod
    def whole(cls, source: str, speculate: bool = False) -> ScriptFeed:
        """Return the feed of a text that is there already."""
        feed = cls(len(source) + ROOM_BYTES, speculate=speculate)
        feed.write(source)
        feed.finish()
        return feed

    # The writer's end

    @property
    def text(self) -> str:
        """Everything that was written and not retracted."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def sent(self) -> str:
        """What the guest has of it."""
        return self._sent

    def write(self, text: str) -> None:
        """Append text.

        Raises:
            UsageError: it is not text, the whole is too long, or was finished.
        """
        self._check(text, self._length + len(text))
        text, self._half = self._half + text, ""
        if not text.isascii():
            text = self._sendable(text)
        self._pieces.append(text)
        self._length += len(text)
        self._news.notify()

    def replace(self, text: str) -> None:
        """Put `text` in place of everything that was written. What both begin with stays.

        Raises:
            UsageError: as from `write`.
        """
        self._check(text, len(text))
        before = self.text
        self._half, self._problem = "", ""
        text = text if text.isascii() else self._sendable(text)
        same = _same_chars(before, text)
        self._pieces, self._length = [text], len(text)
        if same < len(self._sent):
            self._kept, self._is_changed = min(same, self._kept) if self._is_changed else same, True
        self._news.notify()

    def finish(self) -> None:
        """The text is whole."""
        if self._is_whole:
            return
        if self._half:
            self._refuse(self._half)
        self._is_whole, self._finished_at = True, time.perf_counter()
        self._news.notify()

    def _check(self, text: object, length: int) -> None:
        if not isinstance(text, str):
            raise UsageError(f"the text of a script is a str, not {type(text).__name__} {text!r:.80}")
        if self._is_whole:
            raise UsageError("this script was finished: nothing can be written any more; feed() begins another one")
        if length > self._most_chars:
            limit = self._most_chars + ROOM_BYTES
            raise UsageError(f"source is too large ({length} characters, limit frame_bytes={limit})")

    def _sendable(self, text: str) -> str:
        """Join halves of surrogate pairs, and keep back what cannot be sent."""
        if self._problem:
            return ""
        if "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as exc:
            self._refuse(text[exc.start])
            return text[: exc.start]
        return text

    def _refuse(self, half: str) -> None:
        self._problem = f"the source holds a lone surrogate, {half!a}, which is not valid text"
        self._half = ""

    # The run's end

    def announcement(self) -> AnnounceParts:
        """Return the message that comes before the script's own."""
        return AnnounceParts(dict(self.early.ahead()) if self.early is not None else {})

    async def send(self, send: Callable[[ScriptPart], Awaitable[None]], stop: Callable[[str], object]) -> None:
        """Send the text as it comes, until it is whole. `stop` ends the run."""
        self._stop = stop
        while not self._is_last_sent:
            if (part := self._next_part()) is None:
                await self._news.wait()
            else:
                await send(part)

    def _next_part(self) -> ScriptPart | None:
        if self._waits:
            return None
        start = self._kept if self._is_changed else len(self._sent)
        # Before the guest goes on, it is to say whether what is retracted has run.
        self._waits = self._on_retract == "stop" and start < len(self._sent)
        new = self.text[start : start + PART_CHARS] if self._length > start and not self._waits else ""
        is_last = start + len(new) == self._length and (self._is_whole or bool(self._problem)) and not self._waits
        if not (new or self._is_changed or is_last):
            return None
        if start < len(self._sent):
            self._retractions.append(self._sent)
        self._sent, self._is_changed = self._sent[:start] + new, False
        self._is_last_sent = is_last
        return ScriptPart(start, new, is_last, self._problem if is_last else "")

    def take(self, message: CallAhead | PartRetracted | Ran) -> None:
        """Take what the guest tells about the text.

        Raises:
            RemoteProtocolError: it tells about something that was not sent.
        """
        match message:
            case CallAhead():
                if self.early is not None:
                    self.early.expect(message)
            case Ran():
                self._ran = message
            case PartRetracted(start, end):
                if not self._retractions:
                    raise RemoteProtocolError("PartRetracted without a part that took text back")
                self._note_retracted(self._retractions.popleft(), start, end)
                self._waits = False
                self._news.notify()

    def _note_retracted(self, text: str, start: int, end: int) -> None:
        if not 0 <= start < end <= len(text):
            return
        first, last = text.count("\n", 0, start) + 1, text[:end].rstrip().count("\n") + 1
        taken = RetractedText(text[start:end].rstrip(), first, max(first, last))
        self._retracted.append((taken, time.perf_counter()))
        if self._on_retract == "stop":
            self._stop(f"lines {first} to {taken.last_line} were retracted after they had run (on_retract='stop')")

    # The result

    def with_report(self, result: ExecutionResult, started: float) -> ExecutionResult:
        """Return the result with what became of the text. `started`: when the run was, by `time.perf_counter`."""
        early = self.early
        finished_s = (self._finished_at or time.perf_counter()) - started
        saved_s = sum(
            max(0.0, min(call.started_s + call.duration_s, finished_s) - call.started_s) for call in result.calls
        )
        retracted, since_s = [], 0.0
        for each, at in self._retracted:
            lines = range(each.first_line, each.last_line + 1)
            made = (call for call in result.calls if since_s <= call.started_s <= at - started)
            retracted.append(replace(each, calls=tuple(call.id for call in made if call.line in lines)))
            since_s = at - started
        report = EagerReport(
            self._sent,
            self._ran.statements,
            line=self._ran.line,
            retracted=tuple(retracted),
            early_calls=early.started if early is not None else 0,
            hits=early.hits if early is not None else 0,
            saved_s=saved_s + (early.saved_s if early is not None else 0.0),
        )
        error = result.error
        if result.outcome is Outcome.TIMEOUT and error is not None and not self._is_whole:
            said = "its text was not whole, and nothing was written in this time; call finish() after the last text"
            error = replace(error, message=f"{error.message}: {said}")
        return replace(result, eager=report, error=error)


def _same_chars(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    if other.startswith(one):
        return len(one)
    same, differ = 0, min(len(one), len(other)) + 1
    while differ - same > 1:
        middle = (same + differ) // 2
        same, differ = (middle, differ) if one[:middle] == other[:middle] else (same, middle)
    return same


def _nothing(_why: str) -> None:
    pass
