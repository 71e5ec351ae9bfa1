"""The scripts of a sandbox: the names of their code, and their text.

The first one is `<code>`. Later ones of a session are `<code 2>`, `<code 3>` and so on: their functions may be called
by any script after them, and a traceback has to tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SCRIPT: Final = "<code>"
"""Name of a script's code: in tracebacks, and in what the host shows."""

NOT_KEPT: Final = "the last expression's value was not kept as the result: "
"""What a script's stderr says before the reason."""


class Scripts:
    """The scripts that were begun, in order."""

    def __init__(self) -> None:
        self.current = SCRIPT
        """Name of the code of the script that runs."""
        self.texts: dict[str, str] = {}
        self.workspace = ""
        """Folder of their files."""
        self.tools = ""
        """Names of the tools that it may call, with a space between two."""
        self.may_send = False
        """Its libraries may send HTTP requests."""
        self.chosen_by = ""
        """The command that chooses the packages of a notebook's kernel; empty in every other sandbox."""
        self.run_cell: Callable[..., None] | None = None
        """Runs the scripts of a notebook's kernel; None in every other sandbox."""

    def begin(self, source: str, number: int = 1, tools: str = "") -> str:
        """Name the next script, by its number in its session. Outside of sessions every script has the same name."""
        self.tools = tools
        self.current = SCRIPT if number == 1 else f"{SCRIPT[:-1]} {number}>"
        self.texts[self.current] = source
        return self.current


SCRIPTS = Scripts()


def is_script(filename: str) -> bool:
    """Whether a script's code has this file name."""
    return filename == SCRIPT or filename in SCRIPTS.texts
