"""What unplanned exceptions of tools said, for whoever runs the command. A script is only told their class.

Apart from what else is shown, because it needs the tool system, which takes a while to import.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from rich.console import Console

from toolcell.cli.output import safe
from toolcell.errors import ToolAbort
from toolcell.text import one_line
from toolcell.tools.events import TOOL_END, Event
from toolcell.tools.result import ErrorCode

MAX_RAISED_CHARS = 500
"""Of what a tool's exception said."""


def raised_teller(console: Console) -> Callable[[Event], None]:
    """A listener that writes what unplanned exceptions of tools said, once each."""
    told = {""}

    def tell(event: Event) -> None:
        line = raised_line(event)
        if line not in told:
            told.add(line)
            console.print(safe(line, "red"))

    return tell


def raised_line(event: Event) -> str:
    """Name the tool and its exception; empty when it did not end with one that nobody planned."""
    result = event.result if event.type == TOOL_END else None
    if result is None or result.error is None or result.error.code != ErrorCode.EXCEPTION:
        return ""
    if result.exc is None or isinstance(result.exc, ToolAbort):
        return ""
    said = "".join(traceback.format_exception_only(result.exc)).rstrip()
    return one_line(f"tool {event.tool} raised {said}", MAX_RAISED_CHARS)
