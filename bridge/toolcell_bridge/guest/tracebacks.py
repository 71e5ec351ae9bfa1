"""Tracebacks as CPython prints them, without the frames of this package.

`format_exception` is what a run's error holds. `install` makes the interpreter's own hooks print the source of scripts:
until Python 3.13 they look for it in files only, and a script is none.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from itertools import groupby
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final

from toolcell_bridge.guest.scripts import SCRIPTS, is_script

if TYPE_CHECKING:
    from traceback import FrameSummary, StackSummary, TracebackException

# traceback is imported where it is used: it would lengthen a sandbox's cold start.

OWN_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_OWN_NAME: Final = re.compile(r"(?<![\w.])toolcell_bridge(?:\.\w+)*\.(?=[A-Z])")
"""The module before the name of one of our exceptions."""

SUGGESTION: Final = ". Did you mean: "

FRAMES: Final = 30
"""Most frames of one exception; repeated ones count once."""

REPEATED: Final = 3
"""Frames shown of one that repeats, as CPython shows."""

EXCEPTIONS: Final = 30
"""Most exceptions in one traceback, with causes, contexts and those of groups."""

MESSAGE_CHARS: Final = 8 * 1024

LINE_CHARS: Final = 500
TEXT_CHARS: Final = 60_000


def format_exception(
    error: BaseException,
    cure: str = "",
    traceback: TracebackType | None = None,
    *,
    with_libraries: bool = True,
    with_carets: bool = True,
) -> str:
    """Return the traceback. `cure` is added to the exception's own text; `traceback` takes the place of its own one.

    `with_libraries`: frames of other code than the script's, and of the files in its workspace. `with_carets`: the
    places in the lines, for which Python until 3.12 parses them. Not while another parser is under way, as where a
    destructor fails that the collector calls: Python 3.11 has only one.
    Runs code of the script: `str()` of exceptions.
    """
    from traceback import TracebackException

    described = TracebackException(type(error), error, traceback or error.__traceback__, compact=True)
    _trim(described, with_libraries, with_carets)
    if not isinstance(error, (SyntaxError, BaseExceptionGroup)):
        said: Any = described
        said._str = f"{str(said._str)[:MESSAGE_CHARS]}{_suggestion(error)}{cure}"
    text = ""
    for piece in described.format():
        text += "".join(map(_cut, piece.splitlines(keepends=True)))
        if len(text) > TEXT_CHARS:
            text = text[:TEXT_CHARS] + "...\n"
            break
    return _OWN_NAME.sub("", text).encode("utf-8", "backslashreplace").decode("utf-8")


_display = sys.excepthook


def _suggestion(error: BaseException) -> str:
    """Return what Python 3.11 adds to the text of an exception when it prints one, and nowhere else."""
    if sys.version_info >= (3, 12) or not isinstance(error, (NameError, AttributeError)):
        return ""
    import io

    stream, sys.stderr = sys.stderr, io.StringIO()
    try:
        _display(type(error), error, error.__traceback__)
        last = sys.stderr.getvalue().rstrip().rpartition("\n")[2]
    finally:
        sys.stderr = stream
    _, found, name = last.rpartition(SUGGESTION)
    return f"{found}{name}" if found else ""


def _cut(line: str) -> str:
    return line if len(line) <= LINE_CHARS else line[:LINE_CHARS] + "...\n"


def _trim(first: TracebackException, with_libraries: bool, with_carets: bool) -> None:
    """Take out the frames of this package, and what is past the bounds."""
    waiting: list[Any] = [first]
    count = 0
    while waiting:
        each = waiting.pop()
        frames = _visible_frames(each.stack, with_libraries) if each.stack is not None else []
        if not with_carets:
            for frame in frames:
                frame.colno = frame.end_colno = None
        each.stack = _Frames(each.stack, frames) if frames else None
        below = [each.__cause__, each.__context__, *(each.exceptions or ())]
        count += len(below) - below.count(None)
        if count > EXCEPTIONS:
            each.__cause__ = each.__context__ = None
            each.exceptions = each.exceptions[:1] if each.exceptions else each.exceptions
            below = list(each.exceptions or ())
        waiting += (one for one in below if one is not None)


def _visible_frames(stack: StackSummary, with_libraries: bool) -> list[FrameSummary]:
    """Return the frames that are not of this package. What called the first script is left out with it."""
    if not with_libraries:
        return [frame for frame in stack if _is_users(frame.filename)]
    begin = next((index for index, frame in enumerate(stack) if is_script(frame.filename)), 0)
    if not any(frame.filename.startswith(OWN_FOLDER) for frame in stack[:begin]):
        begin = 0
    return [frame for frame in stack[begin:] if not frame.filename.startswith(OWN_FOLDER)]


def _is_users(name: str) -> bool:
    """Whether code of this file name is the script's, of a file in its workspace, or of a text that it executed."""
    if name.startswith("/"):
        return name.startswith(SCRIPTS.workspace + "/")
    return not name.startswith(("<frozen ", "<__array_function__"))


class _Frames:
    """Stands in for a StackSummary: formats no more than `FRAMES` frames."""

    def __init__(self, stack: StackSummary, frames: list[FrameSummary]) -> None:
        self._stack, self._frames = stack, frames

    def format(self, **options: Any) -> Iterator[str]:
        """Yield the frames as text."""
        groups = [list(same) for _, same in groupby(self._frames, lambda each: (each[0], each[1], each[2]))]
        for index, group in enumerate(groups):
            if len(groups) > FRAMES and FRAMES // 2 <= index < len(groups) - FRAMES // 2:
                if index == FRAMES // 2:
                    yield f"  ... {len(groups) - 2 * (FRAMES // 2)} frames ...\n"
                continue
            yield from self._lines(group, options)

    def _lines(self, group: list[FrameSummary], options: dict[str, Any]) -> Iterator[str]:
        for frame in group[:REPEATED]:
            yield self._stack.format_frame_summary(frame, **options)
        if (more := len(group) - REPEATED) > 0:
            yield f"  [Previous line repeated {more} more time{'s' if more > 1 else ''}]\n"


def _is_parsing() -> bool:
    """Whether a parser may be under way: a function that calls `compile` is, in any thread."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if "compile" in at.f_code.co_names:
                return True
            at = at.f_back
    return False


def report_ignored(what: str, error: BaseException) -> None:
    """Print an exception that changes nothing, as the interpreter does. Never raises."""
    try:
        sys.stderr.write(f"Exception ignored {what}:\n{format_exception(error, with_carets=not _is_parsing())}")
        sys.stderr.flush()
    except BaseException:
        pass


def _excepthook(_kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
    """Print an exception. What `sys.excepthook` is at first."""
    sys.stderr.write(format_exception(value, traceback=traceback))
    sys.stderr.flush()


def _thread_hook(args: Any, /) -> None:
    """Print the exception that ended a thread. What `threading.excepthook` is at first."""
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread is not None else threading.get_ident()
    sys.stderr.write(f"Exception in thread {name}:\n{format_exception(args.exc_value, traceback=args.exc_traceback)}")
    sys.stderr.flush()


def _unraisable_hook(unraisable: Any, /) -> None:
    """Print an exception that nobody can catch. What `sys.unraisablehook` is at first."""
    about = unraisable.err_msg or "Exception ignored in"
    if unraisable.object is not None:
        try:
            about += f": {unraisable.object!r}"
        except BaseException:
            about += ": <object repr() failed>"
    elif unraisable.err_msg:
        about += ":"
    text = format_exception(unraisable.exc_value, traceback=unraisable.exc_traceback, with_carets=not _is_parsing())
    sys.stderr.write(f"{about}\n{text}")
    sys.stderr.flush()


def install() -> None:
    """Make these hooks the interpreter's."""
    for module, name, hook in (
        (sys, "excepthook", _excepthook),
        (sys, "unraisablehook", _unraisable_hook),
        (threading, "excepthook", _thread_hook),
    ):
        hook.__name__ = hook.__qualname__ = name
        setattr(module, name, hook)
        setattr(module, f"__{name}__", hook)


def _of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins with the script. A script that cannot be compiled has none."""
    while traceback is not None and not is_script(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback


def frames_of_script(frames: list[FrameType]) -> list[FrameType]:
    """Return those of a stack, innermost first, that are not of this package, nor below the script."""
    names = [frame.f_code.co_filename for frame in frames]
    main = max((index for index, name in enumerate(names) if is_script(name)), default=-1)
    below = (index for index, name in enumerate(names) if index > main and name.startswith(OWN_FOLDER))
    return [frames[index] for index in range(next(below, len(names))) if not names[index].startswith(OWN_FOLDER)]


def call_excepthook(error: BaseException) -> bool:
    """Call the script's own `sys.excepthook`; False when it has none.

    Raises:
        SystemExit: the hook has ended the script in its own way.
    """
    hook = getattr(sys, "excepthook", _excepthook)
    if hook is _excepthook:
        return False
    error.__traceback__ = _of_script(error.__traceback__)
    try:
        hook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as exc:
        if exc.__context__ is error:  # it is being handled here, and not in the script
            exc.__context__ = None
        sys.stderr.write(f"Error in sys.excepthook:\n{format_exception(exc)}\nOriginal exception was:\n")
        sys.stderr.write(format_exception(error))
    return True
