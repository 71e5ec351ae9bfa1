"""`Script`: what a caller gives to be run; `Run`: one run of it, from its message to its result.

Checks what a caller gave and names what is wrong with it. Starts and calls nothing.
"""

from __future__ import annotations

import keyword
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import field
from typing import Any, Final

from toolcell.calls.call import Call, CallableTools, Feature, RunContext
from toolcell.calls.result import ToolResult
from toolcell.config import Limits
from toolcell.errors import AuditError, UsageError
from toolcell.results import ExecutionResult
from toolcell.run.options import NO_OPTIONS, RunOptions
from toolcell.sandbox.backend import GuestFile, Sandbox
from toolcell.support.host_work import HostWork
from toolcell_bridge.guest.tools import GUEST_NAMES
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.messages import CallTool, PutFile, RunScript

MAX_SHOWN_CHARS = 10_000
"""Most characters of a source that cannot be sent, in the record of its run."""

ROOM_BYTES: Final = 4096
"""Part of a frame that is kept free for the fields beside the source."""

CHUNK_BYTES = 1 << 20
"""Most of a file that is sent in one message."""

LARGE: Final = 4_000
"""Elements of a script and its inputs, or as many times 32 characters, of which a thread takes care."""


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
    found: Mapping[str, Any] = field(default_factory=dict)
    """What was found in it before it ran, as fields of its result."""
    sink: Sink | None = None
    """Takes the content of returned files in place of the result."""

    def message(self, number: int, *, tools: str = "", egress: bool = False) -> RunScript:
        """Build the message that carries it.

        Raises:
            UsageError: the source or an input cannot be sent; names it.
        """
        given: Any = self.source
        limits = self.limits
        if not isinstance(given, str):
            cure = "pass the script's text, such as path.read_text()"
            raise UsageError(f"source must be a str, not {given!r:.80}; {cure}")
        if self.inputs:
            _check_names(self.inputs)
        source = sendable(given)
        try:
            # Encoding the message checks inputs that are plain already.
            plain: Any = to_plain(dict(self.inputs), "inputs") if self.inputs else {}
        except (ValueError, TypeError, RuntimeError) as exc:  # the last: changed meanwhile
            raise UsageError(str(exc)) from exc
        if len(source) > limits.frame_bytes - ROOM_BYTES:
            raise UsageError(f"source is too large ({len(source)} characters, limit frame_bytes={limits.frame_bytes})")
        return RunScript(
            run=number,
            source=source,
            inputs=plain,
            tools=tools,
            lint=self.lint,
            result_bytes=limits.result_bytes,
            files=limits.files,
            files_bytes=limits.files_bytes,
            seed=self.seed,
            clock=self.clock,
            message_elements=limits.message_elements,
            answer_elements=limits.answer_elements,
            egress=egress,
        )


def script_from(source: str, options: RunOptions, limits: Limits, lint: str) -> Script:
    """Return a script with this text. `limits`, `lint`: where none are given.

    Raises:
        UsageError: a file cannot be read, or its name cannot be used.
    """
    return Script(
        source=source,
        inputs=options.inputs,
        files=options.guest_files(options.limits or limits),
        limits=options.limits or limits,
        lint=options.lint or lint,
        seed=options.seed,
        clock=options.clock,
    )


class RunPart:
    """What takes part in one run from its sandbox to its result: a journal, a record. The methods do nothing here.

    They are called in the order in which they are written. `script_sent` and `answers_sent` come when the guest is busy
    with what it was sent, so their time costs the script nothing. What a method returns is awaited where it says so.
    """

    __slots__ = ()
    features: tuple[Feature, ...] = ()
    """What it adds to the context of the run's calls."""
    journal_id = ""
    """Name of the journal for the run's result, if this keeps one."""
    make_call: Callable[[Call], Awaitable[ToolResult]] | None = None
    """Makes the run's calls, or answers them, in place of its tools."""

    def sandbox_found(self, sandbox: Sandbox) -> None:
        """A sandbox was found for the run."""

    def script_sent(self) -> Awaitable[None] | None:
        """The script was sent. No tool is called before this has returned.

        Raises:
            AuditError: this could not be recorded; the run ends with the error.
        """
        return None

    def context_of(self, call: CallTool, call_id: str, context: RunContext) -> RunContext:
        """Return the context in which the tool call `call_id` is made; `context` is the run's."""
        return context

    def unrecorded(self, error: AuditError) -> None:
        """A tool call could not be recorded. The run is being ended, and the result must not be returned."""

    def answered(self, call_number: int, frame: bytes) -> None:
        """Take the answer to a call before it is sent; nothing when the script has cancelled the call."""

    def answers_sent(self) -> None:
        """Every answer so far was sent.

        Raises:
            ToolAbort: the end of a call could not be recorded; the run ends.
        """

    def finish(self, result: ExecutionResult) -> ExecutionResult:
        """Return the result with what this adds. In a thread where a person is going to look at much."""
        return result

    def ended(self, result: ExecutionResult) -> Awaitable[None] | None:
        """Record the result that the caller gets.

        Raises:
            AuditError: the result, or something before it, could not be recorded.
        """
        return None

    async def failed(self, error: BaseException) -> None:
        """The run ends with an exception, and has no result. Must not raise."""


class Run:
    """One run of a script: what its sandbox is sent, what it may use, who it is for, and who takes part in it."""

    def __init__(
        self,
        script: Script,
        tools: CallableTools,
        context: RunContext,
        message: RunScript,
        *,
        work: HostWork | None = None,
        is_large: bool = False,
        options: RunOptions = NO_OPTIONS,
    ) -> None:
        """`message`: the script and its settings, as they are sent. `is_large`: a thread packs its inputs."""
        self.script, self.message, self.is_large = script, message, is_large
        self.tools = tools
        self.context = context
        """Context of its calls, under the rules of the runtime."""
        self.work = work or HostWork(script.limits.host_work)
        """Where the run's work is counted; its calls count theirs in the same place."""
        self.options = options
        self.parts: tuple[RunPart, ...] = ()
        self.make_call: Callable[[Call], Awaitable[ToolResult]] = tools.make
        """Makes a call, or answers it from a journal."""
        self.journal_id = ""
        """Name of the run's journal, for its result."""

    def join(self, part: RunPart) -> None:
        """Let a part take part in the run, after those that have joined before, with what it declares."""
        self.parts += (part,)
        if part.features:
            self.context = self.context.having(*part.features)
        if part.make_call is not None:
            self.make_call, self.journal_id = part.make_call, part.journal_id

    def file_messages(self) -> Iterator[PutFile]:
        """The files as messages, in pieces that fit into a frame."""
        size = min(CHUNK_BYTES, self.script.limits.frame_bytes // 2)
        for file in self.script.files:
            for start in range(0, max(1, len(file.data)), size):
                yield PutFile(file.name, file.data[start : start + size], start + size >= len(file.data))


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
        said = f"the source holds a lone surrogate, {source[exc.start]!a}, which is not valid text: remove it"
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
        if not name.isascii() and (read := _as_python_reads(name)):
            raise UsageError(f"inputs= has {name!r:.80}, which Python reads as {read!r} in a script; give it that name")
        if name in GUEST_NAMES or (name.startswith("__") and name.endswith("__")):
            raise UsageError(f"inputs= has {name!r}, which is a name of the sandbox itself; choose another one")


def _as_python_reads(name: str) -> str:
    """Return the beginning of the name that Python has for it; empty when that is itself."""
    import unicodedata  # few names need it

    # `normalize` takes quadratic time for rows of marks
    return "" if unicodedata.is_normalized("NFKC", name) else unicodedata.normalize("NFKC", name[:80])
