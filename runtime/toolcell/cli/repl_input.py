"""Read scripts from a terminal: history, several lines, completion of names. prompt_toolkit does the work."""

from __future__ import annotations

import ast
import builtins
import codeop
import keyword
import re
import warnings
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from toolcell.errors import UsageError
from toolcell.support.private_files import make_private_folder
from toolcell_bridge.guest.tools import GUEST_NAMES

WORD = re.compile(r"[A-Za-z_][\w.]*")


def is_complete(text: str) -> bool:
    """Whether Enter runs this text, or begins another line of it."""
    lines = text.split("\n")
    if text.lstrip().startswith("?"):
        return True
    if len(lines) > 1 and lines[-1].strip() and lines[-1][0] in " \t":
        return False  # inside a block, which an empty line ends
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return compiler(text, "<code>", "exec") is not None
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            return True  # the sandbox says what is wrong


def words(tools: Iterable[str]) -> list[str]:
    """Return what can be completed: tools, the sandbox's own functions, and Python's."""
    own = [f"tools.{name}" for name in tools]
    return [*own, *sorted({*tools, *GUEST_NAMES, *keyword.kwlist, *dir(builtins)})]


def completer(tools: Iterable[str]) -> Any:
    """Return what completes the name before the cursor."""
    from prompt_toolkit.completion import WordCompleter

    return WordCompleter(words(tools), pattern=WORD)


def reader(tools: Iterable[str], history: Path | None, **terminal: Any) -> Callable[[], Awaitable[str]]:
    """Return a function that reads the next script. `terminal`: prompt_toolkit's `input` and `output`, for tests.

    Raises:
        UsageError: prompt_toolkit is missing, or the history cannot be kept.
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError as exc:
        raise UsageError("toolcell repl needs prompt_toolkit: pip install 'toolcell[repl]'") from exc
    bindings = KeyBindings()
    session: Any = None

    def can_run() -> bool:
        return is_complete(session.default_buffer.text)

    def run(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    bindings.add("enter", filter=Condition(can_run))(run)
    session = PromptSession(
        ">>> ",
        history=_history(history),
        completer=completer(tools),
        complete_while_typing=False,
        multiline=True,
        key_bindings=bindings,
        prompt_continuation="... ",
        **terminal,
    )

    async def read() -> str:
        text: str = await session.prompt_async()
        return text

    return read


def _history(path: Path | None) -> Any:
    """Return the history of a file, by default one in the user's state directory. Nobody else may read it."""
    import platformdirs
    from prompt_toolkit.history import FileHistory

    chosen = path or platformdirs.user_state_path("toolcell") / "repl_history"
    try:
        make_private_folder(chosen.parent)
        chosen.touch(mode=0o600)
    except OSError as exc:
        raise UsageError(f"the history {chosen} cannot be written: {exc.strerror}; choose one with --history") from exc
    return FileHistory(str(chosen))
