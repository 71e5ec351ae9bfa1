"""How commands speak: consoles that colour only a terminal, JSON, errors as text and exit status.

Nothing a script or a tool said is ever parsed as markup, and all of it goes through `text.for_terminal`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from toolcell.cli import exits
from toolcell.errors import ToolcellError
from toolcell.text import for_terminal

Command = TypeVar("Command", bound=Callable[..., Any])


def stdout() -> Console:
    """A console for what was asked for."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def stderr() -> Console:
    """A console for everything said beside it: progress, failures, the summary."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_json(data: object) -> None:
    """Write one JSON document to stdout, in ASCII: no character of a stranger's text reaches a terminal raw."""
    sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")
    sys.stdout.flush()


def write_text(console: Console, text: str) -> None:
    """Write a stranger's text as it is but for what a terminal would obey, and end its last line."""
    shown = for_terminal(text)
    console.print(Text(shown), end="" if shown.endswith("\n") else "\n")


def safe(text: str, style: str = "") -> Text:
    """A stranger's text, ready for a console."""
    return Text(for_terminal(text), style)


def reporting(command: Command) -> Command:
    """Turn toolcell's errors into one readable message and the documented exit status; other exceptions are bugs."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            # Whoever read our output has seen enough. Python would complain once more while it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(exits.FAILED) from None
        except KeyboardInterrupt:
            raise _interrupted() from None
        except (ToolcellError, BaseExceptionGroup) as exc:
            if isinstance(exc, BaseExceptionGroup) and exc.subgroup(KeyboardInterrupt) is not None:
                raise _interrupted() from None
            error = first_of_ours(exc)
            if error is None:
                raise
            _tell(error, as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(exits.status_of(error)) from exc

    return wrapped  # type: ignore[return-value]


def _interrupted() -> typer.Exit:
    stderr().print("interrupted")
    return typer.Exit(exits.INTERRUPTED)


def first_of_ours(exc: BaseException) -> ToolcellError | None:
    """Find toolcell's own error in what a task group raised."""
    if isinstance(exc, ToolcellError):
        return exc
    inner = exc.exceptions if isinstance(exc, BaseExceptionGroup) else ()
    return next((found for each in inner if (found := first_of_ours(each))), None)


def _tell(error: ToolcellError, as_json: bool) -> None:
    if as_json:
        print_json({"error": {"code": error.code, "message": str(error)}})
        return
    console = stderr()
    console.print(Text(f"{error.code.replace('_', ' ')}: ", "bold red"), end="")
    write_text(console, str(error))
