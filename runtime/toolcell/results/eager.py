"""`EagerReport`: what a run has done with a script whose text came in parts, as frozen data."""

from __future__ import annotations

from dataclasses import field

from toolcell_bridge.wire.frozen import frozen


class ByStatement(str):
    """A script that was fed once: again, each of its statements is compiled when the one before has run."""

    __slots__ = ()


@frozen
class RetractedText:
    """Text of a script that was retracted after it had run. What it did stays done."""

    text: str
    first_line: int
    """In the text as it was then, as the guest claims."""
    last_line: int
    calls: tuple[str, ...] = ()
    """Ids of the tool calls that its lines made, as in `ExecutionResult.calls`."""


@frozen
class EagerReport:
    """What a fed run did: statements, early calls and retracted text."""

    source: str = field(default="", repr=False)
    """The text as the guest had it when the run was over."""
    statements: int = 0
    """That were begun, as the guest claims; those that were retracted count too."""
    line: int = 0
    """Last line of the text that has run, as the guest claims."""
    retracted: tuple[RetractedText, ...] = ()
    """What was retracted although it had run."""
    early_calls: int = 0
    """Calls that were started before the script came to them."""
    hits: int = 0
    """How many of them answered the script."""
    saved_s: float = 0.0
    """Seconds for which tools worked while the text was still coming in, or before the script came to their calls."""

    @property
    def wasted(self) -> int:
        """Early calls whose answer nobody was given."""
        return self.early_calls - self.hits
