"""`Script`: what a caller gives for one run; `RunRequest`: the same, validated and ready to be sent to a sandbox.

Checks what a caller gave and names what is wrong with it. Knows neither sandboxes nor tools.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from toolcell.calls.call import CallableTools, RunContext
from toolcell.config import Limits
from toolcell.errors import UsageError
from toolcell.results.effects import Preflight
from toolcell.run.options import NO_HANDLERS, RunHandlers, RunOptions, guest_files
from toolcell.sandbox.backend import GuestFile
from toolcell.support.host_work import HostWork
from toolcell_bridge.guest.tools import GUEST_NAMES
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.messages import PutFile, RunScript

MAX_SHOWN_CHARS = 10_000
"""Most characters of a source that cannot be sent, in the record of its run."""

ROOM_BYTES: Final = 4096
"""Part of a frame that is kept free for the fields beside the source."""

CHUNK_BYTES = 1 << 20
"""Most of a file that is sent in one message."""

FIXED = ("disk_bytes", "inodes", "frame_bytes")
"""Limits that are set when a sandbox is made and cannot be changed from outside afterwards."""

LOWERED = ("memory_bytes", "processes", "open_files", "cpu_s")
"""Limits that can be lowered from outside, and not raised."""


LARGE: Final = 20_000
"""Elements of inputs, of which a thread takes care: it takes a hundred times as long as a slice of the event loop."""
_MANY = frozenset({dict, list, tuple})


Sink = Callable[[bytes], object]
"""Takes the content of returned files, piece by piece. Never raises."""


@frozen(kw_only=True)
class Script:
    """A script with everything that it starts with."""

    source: str
    limits: Limits
    inputs: Mapping[str, Any] | None = None
    files: tuple[GuestFile, ...] = ()
    lint: str = "off"
    seed: int | None = None
    clock: float | None = None
    number: int = 0
    """Number of a script in its session; 0 outside of sessions."""
    preflight: Preflight | None = None
    sink: Sink | None = None
    """Takes the content of returned files in place of the result."""


def script_from(source: str, options: RunOptions, limits: Limits, lint: str) -> Script:
    """Return a script with this text. `limits`, `lint`: where none are given.

    Raises:
        UsageError: a file cannot be read, or its name cannot be used.
    """
    return Script(
        source=source,
        inputs=options.inputs,
        files=guest_files(options.files, options.limits or limits),
        limits=options.limits or limits,
        lint=options.lint or lint,
        seed=options.seed,
        clock=options.clock,
    )


@dataclass(slots=True, kw_only=True)
class RunRequest:
    """One run of a script: what its sandbox is sent, what it may use, who it is for, and who hears of it."""

    script: Script
    message: RunScript
    """The script and its settings, as they are sent."""
    tools: CallableTools
    context: RunContext
    """Context of its calls, under the rules of the runtime."""
    work: HostWork | None = None
    """Where the run's work is counted; its calls count theirs in the same place."""
    is_large: bool = False
    """A thread packs its inputs."""
    handlers: RunHandlers = NO_HANDLERS
    """How the caller cancels the run, and hears from it."""
    journal_id: str = ""
    """Name of the run's journal, for its result."""
    on_answer: Callable[[int, bytes], None] | None = None
    """Called with a call's number and the frame of its answer, before it is sent; b"" when the script cancelled it."""

    def file_messages(self) -> Iterator[PutFile]:
        """The files as messages, in pieces that fit into a frame."""
        size = min(CHUNK_BYTES, self.script.limits.frame_bytes // 2)
        for file in self.script.files:
            for start in range(0, max(1, len(file.data)), size):
                last = start + size >= len(file.data)
                yield PutFile(file.name, file.data[start : start + size], last)


def are_large(inputs: Mapping[str, Any] | None) -> bool:
    """True when checking and packing inputs would keep the event loop. Looks at `LARGE` elements at most."""
    count = 0
    level: list[Any] = [inputs] if inputs else []
    while level:
        below: list[Any] = []
        for each in level:
            count += len(each)
            if count > LARGE:
                return True
            items = each.values() if isinstance(each, Mapping) else each
            below += [item for item in items if type(item) in _MANY]
        level = below
    return False


def run_message(
    number: int,
    source: str,
    *,
    limits: Limits,
    inputs: Mapping[str, Any] | None = None,
    tools: str = "",
    lint: str = "off",
    seed: int | None = None,
    clock: float | None = None,
    egress: bool = False,
) -> RunScript:
    """Build the message that carries the script.

    Raises:
        UsageError: the source or an input cannot be sent; names it.
    """
    found: object = source
    if not isinstance(found, str):
        raise UsageError(f"source must be a str, not {found!r:.80}; pass the script's text, such as path.read_text()")
    if inputs:
        _check_names(inputs)
    source = sendable(source)
    try:
        # Encoding the message checks inputs that are plain already.
        plain = to_plain(dict(inputs), "inputs") if inputs else {}
    except (UnsendableValue, ValueError, TypeError, RuntimeError) as exc:  # the last: changed meanwhile
        raise UsageError(str(exc)) from exc
    if len(source) > limits.frame_bytes - ROOM_BYTES:
        raise UsageError(f"source is too large ({len(source)} characters, limit frame_bytes={limits.frame_bytes})")
    assert isinstance(plain, dict)
    return RunScript(
        run=number,
        source=source,
        inputs=plain,
        tools=tools,
        lint=lint,
        result_bytes=limits.result_bytes,
        files=limits.files,
        files_bytes=limits.files_bytes,
        seed=seed,
        clock=clock,
        message_elements=limits.message_elements,
        answer_elements=limits.answer_elements,
        egress=egress,
    )


def sendable(source: str) -> str:
    """Return the source, or in place of one that no text can hold a script that says so.

    A model wrote it, so the run fails as with any other mistake. The record shows the source with `\\ud800` for what
    cannot be written.
    """
    if source.isascii():
        return source
    try:
        source.encode("utf-8")
    except UnicodeEncodeError as exc:
        line = source.count("\n", 0, exc.start) + 1
        said = f"the source holds a lone surrogate, {source[exc.start]!a}, which is not valid text"
        shown = source[:MAX_SHOWN_CHARS].encode("ascii", "backslashreplace").decode()
        comments = "".join(f"# {each}\n" for each in shown.split("\n"))  # a line keeps its number
        return f"{comments}raise SyntaxError({said!r}, ('<code>', {line}, None, None))"
    return source


def _check_names(inputs: object) -> None:
    """Check that inputs can be names in the script.

    Raises:
        UsageError: they are not a mapping, or a name is not an identifier or belongs to the sandbox.
    """
    if not isinstance(inputs, Mapping):
        raise UsageError(f'inputs= takes a dict from names to values, not {type(inputs).__name__}; write {{"x": ...}}')
    for name in inputs:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(f"inputs= makes names of the script, and {name!r:.80} is not one; choose an identifier")
        if name in GUEST_NAMES or (name.startswith("__") and name.endswith("__")):
            raise UsageError(f"inputs= has {name!r}, which is a name of the sandbox itself; choose another one")


def fits(wanted: Limits, made_with: Limits, fixed: Collection[str] = ()) -> bool:
    """Return True when a sandbox made with the limits `made_with` can be held to `wanted` from outside.

    `fixed`: further limits that the backend cannot change.
    """
    if wanted is made_with:
        return True
    is_same = all(getattr(wanted, name) == getattr(made_with, name) for name in (*FIXED, *fixed))
    return is_same and all(getattr(wanted, name) <= getattr(made_with, name) for name in LOWERED)
