"""The command line: the table of commands. A command's module is imported only when the command is called."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from toolcell.cli.streams import standard_streams

if TYPE_CHECKING:
    import typer

SUMMARY = "Run a model's Python in a kernel-isolated sandbox, with your tools as its only way out."

COMMANDS: dict[str, str] = {
    "run": "Run a script in a fresh sandbox and show its result.",
    "repl": "Type Python into a sandbox that keeps its state.",
    "demo": "Show a script that calls tools, and attacks that fail.",
    "doctor": "Show which isolation layers work here, and how to get the rest.",
    "tools": "List the tools of a file or module as a model sees them.",
    "schedule": "List scheduled actions, and run those that are due.",
    "mcp": "Serve execute_code and your tools to MCP clients.",
    "serve": "Serve sandboxes and tools over HTTP.",
    "tokens": "Create, list, rotate and revoke tokens for `toolcell serve`.",
    "ui": "Look at recorded runs in a browser.",
    "audit": "List, show, verify, export and replay recorded runs.",
    "images": "Build, list and check the images of the Docker backend.",
    "kernel": "Install a Jupyter kernel whose cells run in a sandbox.",
}
"""Command to its line in `--help`; its module has the same name."""
TABLE_COLUMNS = 72
"""A terminal of fewer gets its help without tables."""


def main() -> None:
    try:
        gc.disable()  # imports leave no garbage: a tenth of their time
        with standard_streams():  # first: a file that is opened takes the number of a stream that is closed
            if sys.argv[1:2] == ["run"]:
                importlib.import_module("toolcell.cli.early_zygote").start(sys.argv[2:])
            app = build(sys.argv[1:])
            gc.freeze()
            gc.enable()
            # At its end the interpreter looks for garbage in all that was imported: a tenth of a short command's time.
            atexit.register(gc.freeze)
            app(prog_name="toolcell")
    except KeyboardInterrupt:  # while modules are imported; a command that runs has its own way to end
        os.write(2, b"interrupted\n")
        os._exit(128 + signal.SIGINT)  # `exits.INTERRUPTED`, whose module may not be imported yet


def build(arguments: Sequence[str]) -> typer.Typer:
    """Make the application with the command that `arguments` name. Other commands are only lines of the help."""
    from shutil import get_terminal_size

    import typer

    from toolcell.cli.conversion import Group

    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    app = typer.Typer(
        cls=Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        # Rendering with rich costs more than all else that the top-level help needs. In its tables, names break in
        # a narrow terminal.
        rich_markup_mode="rich" if called in COMMANDS and get_terminal_size().columns >= TABLE_COLUMNS else None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    version = Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ]
    _global_options.__annotations__["version"] = version
    app.callback(help=SUMMARY)(_global_options)
    is_completing = "_TOOLCELL_COMPLETE" in os.environ
    for name, summary in COMMANDS.items():
        if name == called or is_completing:
            importlib.import_module(f"toolcell.cli.{name}").register(app, name)
            _unwrap(app)
        else:
            app.command(name, help=summary)(_not_called)
    return app


def _unwrap(app: typer.Typer) -> None:
    """Join the lines of each paragraph of help: in its tables, typer breaks lines where the docstring does."""
    for group in app.registered_groups:
        if (inner := group.typer_instance) is not None:
            inner.info.help = _unwrapped(inner.info.help)
            _unwrap(inner)
    for command in app.registered_commands:
        command.help = _unwrapped(command.help or (command.callback and command.callback.__doc__))


def _unwrapped(text: object) -> str | None:
    import inspect
    import re

    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text)) if isinstance(text, str) else None


def _global_options(version: bool = False) -> None:
    """Take no other option: each command has its own."""


def _version(is_wanted: bool) -> None:
    if is_wanted:
        import typer

        from toolcell_bridge import __version__

        typer.echo(f"toolcell {__version__}")
        raise typer.Exit


def _not_called() -> None:
    raise AssertionError("only the command that was named is ever called")
