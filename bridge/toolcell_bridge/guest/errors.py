"""Errors that a script sees or causes, as text for a model.

`describe` turns an exception into plain data: type, message, the script's own line and frames. It runs next to
hostile code: `str()` of an exception is the script's code and may do anything, so it is called once, guarded, and cut.

`install_refusals` replaces functions that would start a program. Seccomp answers EPERM to every attempt, and some
library functions hide that behind a return code; the replacements say it in words. They are not isolation: a script
may remove them and gains nothing.
"""

from __future__ import annotations

import errno
import operator
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from toolcell_bridge.guest import tracebacks
from toolcell_bridge.guest.notebook_words import NOTEBOOK_INPUT
from toolcell_bridge.guest.placeholder import NOT_LOOKED_INTO, GuestDryRun
from toolcell_bridge.guest.scripts import SCRIPTS, is_script
from toolcell_bridge.wire.messages import Plain

MESSAGE_CHARS = 8 * 1024
NAME_CHARS = 1024
FRAMES = 30
GROUPS = 10
"""Depth to which groups of exceptions are looked into."""


def describe(error: BaseException, source: str) -> dict[str, Plain]:
    """Return plain data for Done: type, message, line, column, traceback, exit_code."""
    return {name: sendable(value) for name, value in _described(error, source).items()}


def sendable(value: Any) -> Any:
    """Write in another way what no text on the wire may hold: halves of surrogate pairs."""
    if isinstance(value, str):
        return str.__str__(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {sendable(name): sendable(each) for name, each in value.items()}
    return [sendable(each) for each in value] if isinstance(value, list) else value


def _described(error: BaseException, source: str) -> dict[str, Plain]:
    if isinstance(error, SystemExit):
        return _exit(error)
    if isinstance(error, SyntaxError) and error.filename == SCRIPTS.current:
        return _syntax(error, source)
    text = _text(error)
    cure, failed = cure_of(error, text), _that_failed(error)
    message = text + cure
    if len(message) > MESSAGE_CHARS:
        message = f"{message[:MESSAGE_CHARS]}... ({len(message)} characters)"
    return {
        "type": type(error).__name__[:NAME_CHARS],
        "message": message,
        "line": _script_line(failed) or _script_line(error),
        "column": None,
        "traceback": _traceback(error, message, cure),
        "frames": _frames(failed),
    }


def _that_failed(error: BaseException) -> BaseException:
    """Return the first exception of a group that is none itself."""
    for _ in range(GROUPS):
        if not isinstance(error, BaseExceptionGroup):
            break
        error = error.exceptions[0]
    return error


def _script_line(error: BaseException) -> int | None:
    numbers = [line for name, line, _ in _script_lines(error.__traceback__) if name == SCRIPTS.current]
    return numbers[-1] if numbers else None


def _traceback(error: BaseException, message: str, cure: str) -> str:
    try:
        return tracebacks.format_exception(error, cure, with_libraries=False).removesuffix("\n")
    except BaseException:  # memory or time are short, or the script has changed the module traceback
        return f"{type(error).__name__}: {message}"


def _frames(error: BaseException) -> list[Plain]:
    try:
        from toolcell_bridge.guest.frames import describe_frames  # costs nothing in runs that end well

        return describe_frames(error.__traceback__)
    except BaseException:  # memory or time are short: the error itself counts
        return []


def _text(error: BaseException) -> str:
    try:
        text = str(error)
        text = text if type(text) is str else str.__str__(text)
    except BaseException as exc:
        text = f"<message unavailable: its __str__ raised {type(exc).__name__}>"
    if isinstance(error, BaseExceptionGroup):
        said = [(each, _text(each)) for each in error.exceptions[:10]]
        parts = [f"{type(each).__name__}: {its_text}{cure_of(each, its_text)}" for each, its_text in said]
        text = f"{text}: {'; '.join(parts)}"
    found: str = sendable(text)
    return found


NO_PIP = "there is no pip in a sandbox: install_package(NAME) says what is there, and installs what its host allows"

OTHER_NAMES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "fitz": "pymupdf",
    "pptx": "python-pptx",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Modules whose package has another name."""


OWN_NAMES = frozenset({"tools", "toolcell", "call_tool", "call_tools_parallel", "call_tool_async", "set_result"})
"""What scripts try to import, although they have it."""


def cure_of(error: BaseException, text: str) -> str:
    """Return what a model or its programmer can do about an error of the sandbox's own, as the end of its message."""
    try:
        if type(error) is ModuleNotFoundError:
            return _missing_module(error.name)
        if type(error) is NameError:
            return f"; {UNESCAPE}" if _is_escaped(error) else _tool_as_function(error.name)
        if type(error) is FileNotFoundError and type(error.filename) is str:
            return _missing_file(error.filename)
        if type(error) is OSError and error.errno == errno.ENOSPC:
            return f"; the run's limit {full_limit()} is used up"
        if type(error) is AttributeError and type(error.obj) is dict and error.name in error.obj:
            return f"; it is a dict: write [{error.name!r}]"
        if type(error) in (TypeError, AttributeError) and (said := _coroutine(error, text)):
            return said
        if type(error) is TypeError and GuestDryRun.is_on and "Placeholder" in text:
            return f"; a Placeholder stands for the result of a call that a dry run collected: {NOT_LOOKED_INTO}"
        if isinstance(error, (ImportError, AttributeError)) and type(first := _first(error)) is ModuleNotFoundError:
            return _missing_module(first.name)
        if type(error) is ImportError and error.name is None and any(word in text for word in ("install", "pip")):
            return _chosen_by_host("NAME")  # a library names what it would need in words of its own
        return _network(error)
    except BaseException:  # a script can give an exception any attributes: the error itself counts
        pass
    return ""


def _missing_module(given: object) -> str:
    name = given.partition(".")[0] if isinstance(given, str) else ""
    if not name.isidentifier() or name in sys.modules or name in sys.stdlib_module_names:
        return ""
    if name == "pip":
        return f"; {NO_PIP}"
    if name in OWN_NAMES or _call_path(name):
        called = _call_path(name) or "tools.NAME"
        return f"; tools and call_tool are names of every script: write {called}(...), and no import"
    return _chosen_by_host(OTHER_NAMES.get(name, name))


def _chosen_by_host(package: str) -> str:
    """Say how a package is added. A sandbox knows of a notebook's kernel, but not which other program its host is."""
    word = f"'{package}'" if set(package) & set("<>=!~[];") else package
    if SCRIPTS.chosen_by:
        return f"; the packages of a notebook are chosen with its kernel: {SCRIPTS.chosen_by} --packages {word}"
    return (
        f"; a sandbox has the packages that its host chose: Runtime(packages=[{package!r}]) in a program, --packages "
        f"{word} with a toolcell command, `packages` in the settings of a service"
    )


def _allowed_by_host(package: str) -> str:
    """Say how a script may be allowed to install a package."""
    if SCRIPTS.chosen_by:
        return f"; with --allow-package {package}, a cell may install it"
    return (
        f"; with Egress(packages=[{package!r}]), --allow-package {package} or `allow_packages`, a script may install "
        "it if it is pure Python"
    )


def _missing_file(path: str) -> str:
    """Name the files that a script may have meant: by a name in the workspace, or in a folder that is elsewhere."""
    folder, name = os.path.split(path)
    names = sorted(
        each.name for each in os.scandir(SCRIPTS.workspace) if each.is_file() and not each.name.startswith(".")
    )
    if os.path.isabs(path):
        if name in names:
            return f"; the workspace has {name[:100]!r}: it is the folder in which a script begins, so write that"
        if os.path.isdir(folder):
            return ""
    elif os.getcwd() != SCRIPTS.workspace or not os.path.isdir(folder or "."):
        return ""
    if not names:
        return "; the workspace has no files: its host gives them, with files=[...] or `toolcell run --file`"
    more = f" and {len(names) - MOST_FILES} more" if len(names) > MOST_FILES else ""
    return f"; the workspace has {', '.join(repr(each[:100]) for each in names[:MOST_FILES])}{more}"


MOST_FILES = 10
"""Files that are named to a script that looks for another."""


def _tool_as_function(name: object) -> str:
    written = _call_path(name)
    return f"; tools are called as {written}(...)" if written else ""


def _is_escaped(error: NameError) -> bool:
    """Whether the name is what `x &gt; y` is read as."""
    *_, (name, number, _) = _script_lines(error.__traceback__)
    return f"&{error.name};" in ESCAPED and f"&{error.name};" in SCRIPTS.texts[name].splitlines()[number - 1]


def _call_path(name: object) -> str:
    """Return how the script calls the tool or the namespace of this name; nothing when there is none."""
    from toolcell_bridge.guest.tool_names import name_meant, python_path

    if not isinstance(name, str):
        return ""
    names = SCRIPTS.tools.split()
    paths = [f"{python_path(each)}." for each in names]
    meant = f"{python_path(name_meant(name, names))}."
    if meant in paths:
        return f"tools.{meant[:-1]}"
    return f"tools.{name}.NAME" if any(each.startswith(f"{name}.") for each in paths) else ""


def _coroutine(error: BaseException, text: str) -> str:
    """Cure an `await` that is missing, or one that is too many."""
    if "'coroutine'" in text or "of type coroutine" in text:
        return "; a coroutine has no value yet: await it first"
    is_plain = "'await' expression" in text or "can't be awaited" in text
    if not is_plain and not any(each in text for each in AWAITS_VALUE):
        return ""
    *_, (name, number, _) = _script_lines(error.__traceback__)
    line = SCRIPTS.texts[name].splitlines()[number - 1]
    if "tools." not in line and "call_tool(" not in line:
        return ""
    if not is_plain:
        return "; a call of a tool returns its value at once: write call_tool_async(NAME, ...) where it is awaited"
    return "; a call of a tool returns its value: leave out await, or write await call_tool_async(NAME, ...)"


AWAITS_VALUE = (
    "an awaitable is required",
    "a coroutine was expected",
    "'async for' requires an object",
    "unhashable type",
)
"""What asyncio says when it is given a value where it wants a coroutine."""


def _network(error: BaseException) -> str:
    """Cure an attempt to reach something over a network, also where a library raises an exception of its own for it."""
    if type(error).__module__ != "builtins":
        error = _first(error)
    if not isinstance(error, OSError):
        return ""
    code, traceback = "", error.__traceback__
    while traceback is not None:
        code, traceback = traceback.tb_frame.f_code.co_filename, traceback.tb_next
    if not code.endswith("/socket.py") and type(error).__name__ not in ("URLError", "gaierror"):
        return ""
    if not SCRIPTS.may_send:
        return "; a sandbox has no network: call a tool of the host, or have the data given as inputs or files"
    return f"; {NO_SOCKETS}" if code.endswith("/socket.py") and NO_SOCKETS not in str(error) else ""


def _first(error: BaseException) -> BaseException:
    """Return the exception that led to this one, or itself."""
    for _ in range(20):
        error = error.__cause__ or error.__context__ or error
    return error


NO_SOCKETS = (
    "a sandbox has no network of its own: use urllib, requests, httpx or aiohttp, whose requests the host makes"
)


def full_limit() -> str:
    """Return the limit that is used up where there is no space left."""
    try:
        status = os.statvfs(".")
    except OSError:
        return "disk_bytes"
    return "inodes" if status.f_files and not status.f_ffree else "disk_bytes"


def _exit(error: SystemExit) -> dict[str, Plain]:
    code = error.code
    number = code if isinstance(code, int) else 1
    message = f"exit code {number}" if isinstance(code, int) else _text(error)[:MESSAGE_CHARS]
    nowhere: dict[str, Plain] = {"line": None, "column": None, "traceback": ""}
    exit_code = number & 255 if -sys.maxsize <= number <= sys.maxsize else 255  # as of a C long
    return nowhere | {"type": "SystemExit", "message": message, "exit_code": exit_code}


def _syntax(error: SyntaxError, source: str) -> dict[str, Plain]:
    line = error.lineno or None
    lines = source.splitlines()
    shown = ""
    if line is not None and 0 < line <= len(lines):
        marker = " " * max(0, (error.offset or 1) - 1) + "^"
        shown = f'  File "{SCRIPTS.current}", line {line}\n    {lines[line - 1][:500]}\n    {marker[:500]}\n'
    message = error.msg or "invalid syntax"
    message += _notebook_command(lines[line - 1] if line is not None and 0 < line <= len(lines) else "")
    return {
        "type": type(error).__name__[:NAME_CHARS],
        "message": message,
        "line": line,
        "column": error.offset,
        "traceback": f"{shown}{type(error).__name__}: {message}",
    }


def _notebook_command(line: str) -> str:
    """Return the cure of a line that a notebook or a shell understands, and Python does not."""
    words = line.strip().lstrip("!%").split()
    if "install" in words[:4] and any(word in ("pip", "pip3", "conda", "uv") for word in words[:3]):
        return f"; a script is Python only: {NO_PIP}"
    if any(each in line for each in ESCAPED):
        return f"; {UNESCAPE}"
    if line.strip().startswith(("!", "%")):
        return "; a script is Python only: commands of notebooks and shells do not work"
    return ""


ESCAPED = ("&gt;", "&lt;", "&amp;", "&quot;", "&#39;", "&#x27;")
UNESCAPE = "the script is escaped as HTML: send it with >, <, &, and quotation marks as they are"


def _script_lines(traceback: TracebackType | None) -> list[tuple[str, int, str]]:
    """List (name of the code, line, function) of the scripts' own frames, outermost first.

    Keeps at least the innermost FRAMES.
    """
    found: list[tuple[str, int, str]] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_script(code.co_filename):
            found.append((code.co_filename, traceback.tb_lineno, code.co_name))
            if len(found) > 2 * FRAMES:
                del found[FRAMES // 2 : FRAMES // 2 + 1]
        traceback = traceback.tb_next
    return found


ASK_SIGNAL = 50
"""A real-time signal that no library uses. The host sends it to a script whose time is over."""


def answer_with_line() -> None:
    """Have the main thread's frames written to descriptor 2 at `ASK_SIGNAL`, also from inside a C function."""
    import faulthandler

    faulthandler.register(ASK_SIGNAL, file=2, all_threads=False)


EXECUTES = ("system", "posix_spawn", "posix_spawnp", "execv", "execve")


def blocked() -> str:
    """Say that no program is started, and what the script can use in its place: tools, where it has any."""
    has_tools = any(name != NOTEBOOK_INPUT for name in SCRIPTS.tools.split())
    instead = "call_tool()" if has_tools else "Python's own modules, such as os, pathlib and shutil,"
    return f"blocked: use {instead} instead; nothing can be executed in the sandbox; threads and fork work"


def refuse(*args: Any, **_options: Any) -> NoReturn:
    """Stand in for a function that would start a program."""
    asked = repr(args[:2])[:MESSAGE_CHARS]
    cure = f"; {NO_PIP}" if "pip" in asked and "install" in asked else ""
    raise PermissionError(errno.EPERM, blocked() + cure)


def install_refusals() -> None:
    """Replace the functions that would start a program. Call it before `subprocess` is imported, which copies one."""
    import _posixsubprocess  # type: ignore[import-not-found, unused-ignore]  # not on Windows

    for name in EXECUTES:
        setattr(os, name, refuse)
    _posixsubprocess.fork_exec = refuse


def install_package(name: str) -> None:
    """Check that a package can be imported.

    Without `Egress(packages=[...])` nothing can be installed: a script can import what its host listed.

    Raises:
        RuntimeError: it cannot be imported; the message says who can change that.
    """
    if not installed(name):
        bare = _bare(name)
        raise not_installed(name, f"a sandbox has no network{_chosen_by_host(bare)}{_allowed_by_host(bare)}")


def installed(name: str) -> str:
    """Return the version of a package that can be imported, by the name of a module or a distribution; "" without one.

    Raises:
        RuntimeError: it is there in another version than `name` asks for, such as "x>=2". Another one would come later
            on `sys.path`.
    """
    import importlib.metadata
    import importlib.util

    wanted = _bare(name)
    try:
        found = importlib.metadata.distribution(wanted).version
    except (ImportError, ValueError):
        try:
            is_there = importlib.util.find_spec(wanted.replace("-", "_")) is not None
        except (ImportError, ValueError):
            return ""
        return "of this sandbox" if is_there else ""
    asked = str(name).partition(";")[0].strip()[len(wanted) :]
    if "[" in asked:
        asked = asked.partition("]")[2]
    if not all(_fits(found, each.strip()) for each in asked.strip(" ()").split(",")):
        raise not_installed(name, f"{wanted} {found} is there{_chosen_by_host(str(name))}")
    return found


def _fits(version: str, clause: str) -> bool:
    """Whether a version is one that a clause such as ">=2" names. Its releases count: "2.0rc1" is 2.0."""
    wanted = clause.lstrip("=<>!~ ")
    sign, has, asked = clause[: len(clause) - len(wanted)].strip(), _release(version), _release(wanted)
    if sign == "~=":
        return has >= asked and has[: len(asked) - 1] == asked[:-1]
    size = len(asked) if wanted.endswith(".*") else max(len(has), len(asked))
    padded = [(each + (0,) * size)[:size] for each in (has, asked)]
    return sign not in COMPARES or bool(COMPARES[sign](*padded))


COMPARES: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def _release(version: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in version.strip().lstrip("v").split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)


def not_installed(name: str, why: str) -> RuntimeError:
    """Return the error for a package that cannot be had."""
    return RuntimeError(f"pip install {name} failed: {why}")


def _bare(name: str) -> str:
    """Return the name of a requirement without versions and extras."""
    bare = str(name)
    for mark in "=<>!~[;":
        bare = bare.partition(mark)[0]
    return bare.strip()
