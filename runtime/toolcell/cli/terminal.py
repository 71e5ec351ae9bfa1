"""How commands write: consoles, JSON and errors. rich is imported only where something is printed with it.

Consoles use colour only on a terminal. Text of a script or a tool is never parsed as markup, and all of it passes
`text.for_terminal`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from toolcell.cli import exits
from toolcell.errors import ToolcellError
from toolcell.support.exact_json import json_text
from toolcell.support.text import for_terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Command = TypeVar("Command", bound=Callable[..., Any])


def stdout() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def stderr() -> Console:
    """Return a console for everything else: progress, failures, the summary."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_json(data: object) -> None:
    """Write one JSON document to stdout, in ASCII: so no control character reaches a terminal."""
    sys.stdout.write(json_text(data, indent=2, is_ascii=True) + "\n")
    sys.stdout.flush()


def output(data: object, as_json: bool, show: Callable[[], object]) -> None:
    """Write `data` as JSON, or have it shown to a person."""
    print_json(data) if as_json else show()


def write_text(console: Console, text: str) -> None:
    """Write untrusted text, with terminal controls escaped, and end its last line."""
    from rich.text import Text

    shown = for_terminal(text)
    console.print(Text(shown), end="" if shown.endswith("\n") else "\n")


def value_text(value: Any) -> str:
    """Return a text as it is, an array or a table as its text, and everything else as JSON."""
    from toolcell.results import Array, Table  # help does not need them

    return str(value) if isinstance(value, str | Array | Table) else json_text(value, indent=2)


def safe(text: str, style: str = "") -> Text:
    """Return untrusted text with terminal controls escaped."""
    from rich.text import Text

    return Text(for_terminal(text), style)


def table(*headings: str, no_wrap: Collection[str] = ()) -> Table:
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        made.add_column(heading, header_style="bold", overflow="fold", no_wrap=heading in no_wrap)
    return made


def reporting(command: Command) -> Command:
    """Turn toolcell's errors into a message and the documented exit status. Other exceptions are bugs and pass."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            raise _interrupted() from None
        except (ToolcellError, BaseExceptionGroup) as exc:
            if isinstance(exc, BaseExceptionGroup) and exc.subgroup(KeyboardInterrupt) is not None:
                raise _interrupted() from None
            error = find_our_error(exc)
            if error is None:
                raise
            _write_error(error, as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(exits.status_of(error)) from exc

    return wrapped  # type: ignore[return-value]


def _interrupted() -> typer.Exit:
    stderr().print("interrupted")
    return typer.Exit(exits.INTERRUPTED)


def find_our_error(exc: BaseException) -> ToolcellError | None:
    """Find toolcell's own error in what a task group raised."""
    if isinstance(exc, ToolcellError):
        return exc
    inner = exc.exceptions if isinstance(exc, BaseExceptionGroup) else ()
    return next((found for each in inner if (found := find_our_error(each))), None)


def _write_error(error: ToolcellError, as_json: bool) -> None:
    if as_json:
        print_json({"error": {"code": error.code, "message": str(error)}})
        return
    from rich.text import Text

    console = stderr()
    console.print(Text(f"{error.code.replace('_', ' ')}: ", "bold red"), end="")
    write_text(console, str(error))
