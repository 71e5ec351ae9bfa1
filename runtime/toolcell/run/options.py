"""`RunOptions`: the one list of what a run may be given besides its script.

`Runtime`, sessions, maps and the service's client take these as keywords, and hand one checked object on.
"""

from __future__ import annotations

import errno
import inspect
import itertools
import os
import posixpath
import stat
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, TypedDict, get_args

import anyio

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.concurrency import maybe_await
from toolcell.calls.placeholders import DryRun
from toolcell.config import CheckTypes, Limits, LintProfile, OnApproval, check_types_of
from toolcell.errors import UsageError
from toolcell.results import ExecutionResult
from toolcell.sandbox.backend import GuestFile
from toolcell.settings import settings_of
from toolcell.support.checks import brief, check_keywords, check_kind, check_one_of
from toolcell_bridge.guest.files import MAX_NAME_BYTES
from toolcell_bridge.wire.frozen import frozen

OnLog = Callable[[str, str], object]
"""Takes stream and text; may be async."""
OnProgress = Callable[[object], object]
"""Takes the reported value; may be async."""


CALLBACK_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""What ends one run when a callback raises it. Let out in a task of the monitor, it would end every run."""

HEAR_S = 1.0
"""What asynchronous callbacks may take after the end of a run, past `wall_s`."""


class Callbacks:
    """The callbacks of one run. Leaving its `with` block drops those that were not awaited yet, and cancels the one
    that is being awaited."""

    def __init__(self, options: RunOptions) -> None:
        self._on_log = options.on_log
        self._on_progress = options.on_progress
        self._lock: anyio.Lock | None = None
        self._hearing: anyio.CancelScope | None = None
        """Cancel scope of the task that awaits something now."""
        self.unheard: deque[Any] = deque()
        """What is to be awaited, in the order of the calls."""
        self.failure: BaseException | None = None
        """What an asynchronous callback raised."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
        while self.unheard:
            if hasattr(left := self.unheard.popleft(), "close"):
                left.close()

    @property
    def must_be_heard(self) -> bool:
        """True when something is to be awaited and no task does."""
        return bool(self.unheard) and self._hearing is None

    def log(self, stream: str, text: str) -> None:
        if self._on_log is not None:
            self._take(self._on_log(stream, text))

    def progress(self, value: object) -> None:
        if self._on_progress is not None:
            self._take(self._on_progress(value))

    def _take(self, answer: object) -> None:
        if answer is not None and inspect.isawaitable(answer):
            self._lock = self._lock or anyio.Lock()
            self.unheard.append(answer)

    async def hear(self, stop: Callable[[BaseException], None]) -> None:
        """Await everything that is to be awaited, also what another task awaits now. `stop` gets what one raises."""
        if self._lock is None:
            return
        async with self._lock:
            try:
                with anyio.CancelScope() as self._hearing:
                    while self.unheard and self.failure is None:
                        await maybe_await(self.unheard.popleft())
            except BaseException as exc:  # also a class of the caller's own: this may be a task of the monitor
                if _is_cancellation(exc):
                    raise
                self.failure = exc
                stop(exc)
            finally:
                self._hearing = None

    async def finish(self, left_s: float) -> None:
        """Await the rest after the end of the run, which had `left_s` to go on.

        Raises:
            Exception: a callback raised it, now or before.
        """
        if self._lock is None:  # nothing was ever to be awaited
            return
        with anyio.move_on_after(max(left_s, HEAR_S)):
            await self.hear(lambda exc: None)
        if self.failure is not None:
            raise self.failure


def _is_cancellation(exc: BaseException) -> bool:
    if isinstance(exc, BaseExceptionGroup):
        return any(map(_is_cancellation, exc.exceptions))
    return isinstance(exc, (GeneratorExit, anyio.get_cancelled_exc_class()))


FileContent = str | bytes | bytearray | memoryview | os.PathLike[str]
"""Text, bytes, or the path of a file on the host. A path that is a `str` would be text: write `Path(...)`."""

FileInput = str | os.PathLike[str] | tuple[str, FileContent] | GuestFile

InputFiles = Iterable[FileInput] | Mapping[str, FileContent]
"""A list of paths and (name, content), or a mapping from names to content."""

MAX_PART_BYTES = 255
"""Most bytes of one part of a name. Source: NAME_MAX of Linux."""


def _check_names(files: Sequence[GuestFile]) -> None:
    for file in files:
        _check_name(file.name)
    # With a sign for "/" that sorts before all others, what is in a folder follows the name of that folder.
    names = sorted(posixpath.normpath(file.name).replace("/", "\0") for file in files)
    for first, second in itertools.pairwise(names):
        if first == second:
            name = second.replace("\0", "/")
            raise UsageError(f'two input files are called {name!r}; name one of them as in files=[("other", content)]')
        if second.startswith(f"{first}\0"):
            folder, name = first.replace("\0", "/"), second.replace("\0", "/")
            raise UsageError(f"an input file cannot be called {folder!r}: {name!r} needs a folder of that name")


def _check_name(name: str) -> None:
    try:
        encoded = name.encode()
    except UnicodeEncodeError as exc:
        raise UsageError(f"input file name {name!r:.80} is not valid Unicode") from exc
    is_short = len(encoded) <= MAX_NAME_BYTES
    parts, most = (encoded.split(b"/"), MAX_PART_BYTES) if is_short else ([encoded], MAX_NAME_BYTES)
    if (longest := max(map(len, parts))) > most:
        raise UsageError(f"input file name {name!r:.80} has {longest} bytes, and {most} are possible")
    is_odd = "\0" in name or "\\" in name or posixpath.normpath(name) == "."
    if is_odd or not parts[-1] or b".." in parts or name[0] == "/":
        raise UsageError(f"input file name {name!r:.80} must be a relative path inside the workspace")


class _Loader:
    """Loads files one after the other, as long as there is room for them."""

    def __init__(self, limits: Limits | None) -> None:
        self._limits = limits
        self._files = self._bytes = 0

    def load(self, given: object) -> GuestFile:
        """Make a workspace file from a path on the host, or from (name, content)."""
        match given:
            case GuestFile():
                file = given
            case (str() as name, content) if isinstance(given, tuple):
                file = GuestFile(name, self._content(name, content))
            case str() | os.PathLike():
                file = GuestFile(os.path.basename(os.fspath(given)), self._read(given))
            case _:
                raise UsageError(_not_a_file(given))
        self._files, self._bytes = self._files + 1, self._bytes + len(file.data)
        if self._limits is not None and self._files > (most := self._limits.inodes):
            raise UsageError(
                f"there is no room for more than {most} input files: a sandbox has {most} files and folders (inodes); "
                "give an archive, or fewer files"
            )
        return file

    def _check_room(self, name: str, size: int) -> None:
        most = None if self._limits is None else self._limits.disk_bytes
        if most is not None and self._bytes + size > most:
            before = f", beside {self._bytes} of those before it" if self._bytes else ""
            raise UsageError(
                f"there is no room for the input file {name!r:.80}: it has {size} bytes{before}, and a sandbox has "
                f"{most} for all its files (disk_bytes)"
            )

    def _content(self, name: str, content: object) -> bytes:
        match content:
            case bytes() | bytearray() | memoryview():
                return bytes(content)
            case str():
                try:
                    return content.encode()
                except UnicodeEncodeError as exc:
                    problem = f"the text of the input file {name!r:.80} is not valid Unicode: {exc.reason}"
                    raise UsageError(problem) from exc
            case os.PathLike():
                return self._read(content)
        cure = "; write file.read()" if hasattr(content, "read") else ""
        raise UsageError(
            f"the content of the input file {name!r:.80} must be text or bytes, not {type(content).__name__}{cure}"
        )

    def _read(self, path: str | os.PathLike[str]) -> bytes:
        name = os.fspath(path)
        try:
            # Opening a pipe waits for its writer, and a device may have no end: both are found out without waiting.
            if os.path.isdir(name):
                raise UsageError(f"input file {name!r:.80} is a folder; give its files")
            descriptor = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            with open(descriptor, "rb") as source:
                about = os.fstat(descriptor)
                if not stat.S_ISREG(about.st_mode):
                    kind = "a named pipe" if stat.S_ISFIFO(about.st_mode) else "a device"
                    raise UsageError(f"input file {name!r:.80} is {kind}; give a regular file or bytes")
                self._check_room(name, about.st_size)
                room = -1 if self._limits is None else self._limits.disk_bytes - self._bytes + 1
                return source.read(room) or b""  # None: one of the kernel's own, and there is nothing yet
        except (OSError, ValueError) as exc:
            if isinstance(exc, OSError) and exc.errno == errno.ENXIO:  # opening one is an error
                raise UsageError(f"input file {name!r:.80} is a socket; give a regular file or bytes") from None
            said = exc.strerror if isinstance(exc, OSError) else exc
            raise UsageError(f"input file {name!r:.80} cannot be read: {said}") from exc


def _not_a_file(given: object) -> str:
    got = ", ".join(type(each).__name__ for each in given) if isinstance(given, tuple) else type(given).__name__
    cure = "; write (name, file.read())" if hasattr(given, "read") else ""
    if isinstance(given, bytes) or (isinstance(given, tuple) and given and not isinstance(given[0], str)):
        cure = "; names and paths are text: write os.fsdecode(path)"
    return f"an input file is a path, or (name, content) with text or bytes as content, not ({got}){cure}"


Refresh = Literal["", "reads"]


class ResumeKwargs(TypedDict, total=False):
    """What a run that is resumed may be given, as keywords: see `RunOptions`."""

    tools: CallableTools | Iterable[Any] | None
    context: RunContext | None
    cancel: anyio.Event | None
    on_log: OnLog | None
    on_progress: OnProgress | None


class SessionRunKwargs(ResumeKwargs, total=False):
    """What a script of a session may be given, as keywords: see `RunOptions`."""

    inputs: Mapping[str, Any] | None
    files: InputFiles
    limits: Limits | None
    lint: LintProfile | None
    on_approval: OnApproval
    dry_run: bool | DryRun
    check_types: bool | CheckTypes | None


class RunKwargs(SessionRunKwargs, total=False):
    """What a run may be given, as keywords: see `RunOptions`."""

    seed: int | None
    clock: float | None
    repairs: ExecutionResult | str | None
    refresh: Refresh
    preflight: bool


@frozen(kw_only=True)
class RunOptions:
    """What one run is given, checked. Each method takes as many of these as it can use (`RunKwargs`).

    Raises:
        UsageError: names the option, its value and what it may be.
    """

    PLAIN: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "lint": (str,),
        "on_approval": (str,),
        "check_types": (str, bool),
        "seed": (int,),
        "clock": (float, int),
        "refresh": (str,),
        "preflight": (bool,),
    }
    """Options that a service gets as they are, with the types of their values."""

    cancel: anyio.Event | None = None
    """Setting it ends the run with outcome `cancelled`."""
    on_log: OnLog | None = None
    """Called with stream and text for everything the script prints."""
    on_progress: OnProgress | None = None
    """Called with every value the script reports as its progress."""
    inputs: Mapping[str, Any] | None = None
    """Names that the script finds, and their values."""
    files: InputFiles = ()
    """For the workspace."""
    tools: CallableTools | Iterable[Any] | None = None
    """What the script may call. None: the tools of whoever runs it."""
    limits: Limits | None = None
    lint: LintProfile | None = None
    context: RunContext | None = None
    """Who the run is for, and what its calls are given."""
    seed: int | None = None
    clock: float | None = None
    """Where the script's clock starts, in seconds since 1970."""
    on_approval: OnApproval = "ask"
    """What becomes of a call that needs approval."""
    repairs: ExecutionResult | str | None = None
    """The run whose script this one mends."""
    refresh: Refresh = ""
    """What a repair makes again."""
    dry_run: bool | DryRun = False
    """Collect the calls that write, and make none."""
    preflight: bool = False
    """List the calls that are written in the script before it runs."""
    check_types: bool | CheckTypes | None = None

    @classmethod
    def of(cls, door: str, given: Mapping[str, Any], known: type = RunKwargs) -> RunOptions:
        """Return the keywords that the method `door` was given, checked. `known`: a TypedDict of those that it has."""
        check_keywords(door, given, known.__annotations__)
        return cls(**given)

    def guest_files(self, limits: Limits | None = None) -> tuple[GuestFile, ...]:
        """Load the input files: a list of paths and (name, content), or a mapping from names to content.

        `limits`: of the run, where they are known: files beyond them are not read.

        Raises:
            UsageError: a file is not a regular file or cannot be read, its content is not text or bytes, its name
                leaves the workspace, two files have one name, or there is no room for them.
        """
        given = self.files
        if given == ():
            return ()
        one: object = given
        if isinstance(one, str | bytes | os.PathLike) or not hasattr(given, "__iter__"):
            path = os.fsdecode(one) if isinstance(one, bytes) else one
            cure = f"; write files=[{path!r:.80}]" if isinstance(path, str | os.PathLike) else ""
            raise UsageError(f'files= takes a list of paths and ("name", content), not {type(given).__name__}{cure}')
        files = tuple(map(_Loader(limits).load, given.items() if isinstance(given, Mapping) else given))
        _check_names(files)
        return files

    def __post_init__(self) -> None:
        if self.lint is not None:
            check_one_of("lint=", self.lint, get_args(LintProfile))
        if self.limits is not None:
            settings_of(Limits, self.limits, "limits")
        if self.seed is not None or self.clock is not None:
            _check_seed_and_clock(self.seed, self.clock)
        if self.cancel is not None and not _is_async_event(self.cancel):
            raise UsageError(
                f"cancel= takes an anyio.Event, which does not block the event loop, not {brief(self.cancel)}"
            )
        if self.context is not None and not isinstance(self.context, RunContext):
            raise UsageError(f"context= takes a RunContext, not {brief(self.context)}; write RunContext(user_id=...)")
        for name, function in (("on_log", self.on_log), ("on_progress", self.on_progress)):
            if function is not None and not callable(function):
                raise UsageError(f"{name}= takes a function, not {brief(function)}")
        if self.on_approval != "ask" and self.on_approval not in get_args(OnApproval):
            raise UsageError(f'on_approval must be "ask", "deny" or "suspend", not {brief(self.on_approval)}')
        if self.refresh not in ("", "reads"):
            raise UsageError(f'refresh must be "" or "reads", not {self.refresh!r:.40}')
        if self.refresh and self.repairs is None:
            raise UsageError("refresh= says what a repair makes again; pass repairs= too")
        if self.check_types is not None:
            check_types_of(self.check_types)
        if self.preflight is not False:
            check_kind("preflight=", self.preflight, bool)

    def plain(self) -> dict[str, Any]:
        """Return those that a service gets as they are, as far as they were set."""
        return {name: value for name in self.PLAIN if (value := getattr(self, name)) != getattr(NO_OPTIONS, name)}


NO_OPTIONS: Final = RunOptions()


def _check_seed_and_clock(seed: object, clock: object) -> None:
    if seed is not None and (type(seed) is not int or not -(1 << 63) <= seed < 1 << 63):
        raise UsageError(f"seed= must be a whole number of 64 bits, not {brief(seed)}")
    if clock is not None and (type(clock) not in (int, float) or not -1e15 < clock < 1e15):  # type: ignore[operator]
        raise UsageError(f"clock= must be a number of seconds since 1970, not {brief(clock)}; write time.time()")


def _is_async_event(event: object) -> bool:
    return callable(getattr(event, "is_set", None)) and inspect.iscoroutinefunction(getattr(event, "wait", None))
