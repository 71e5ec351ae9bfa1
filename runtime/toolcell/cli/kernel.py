"""`toolcell kernel`: a Jupyter kernel whose cells run in a sandbox."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolcell.cli import exits
from toolcell.cli.builtin import BuiltinFlags, opened_dependencies
from toolcell.cli.execution import run_watched, showing_installation, showing_warnings
from toolcell.cli.flags import group
from toolcell.cli.run import RuntimeFlags
from toolcell.cli.terminal import safe, stdout
from toolcell.config import Limits
from toolcell.errors import UsageError

if TYPE_CHECKING:
    from toolcell.kernel.cells import Cells
    from toolcell.kernel.folder import NotebookFolder

SUMMARY = """A Jupyter kernel whose cells run in a sandbox: for JupyterLab, VS Code, nbclient, papermill and others."""

EPILOG = f"Exit status: {exits.OK} success, {exits.USAGE} wrong usage, {exits.UNAVAILABLE} no sandbox can be started."

OF_THE_SPEC = frozenset({"name", "user", "sys_prefix", "display_name"})
"""Flags of `install` that the kernel itself does not have."""

PATHS = frozenset({"tools", "mounts", "record", "record_config", "limits_file", "workspace", "store"})
"""Flags whose values may be paths: Jupyter starts a kernel in the folder of its notebook."""


@dataclass(frozen=True, slots=True)
class FolderFlags:
    """Flags about the files of a notebook."""

    mounts: Annotated[
        list[Path] | None,
        typer.Option(
            "--mount", metavar="DIR", help="Copy this folder into each notebook's workspace, under its base name."
        ),
    ] = None
    save: Annotated[
        bool, typer.Option("--save", help="Copy the files that a cell writes to the notebook's folder, after the cell.")
    ] = False

    def folder(self) -> NotebookFolder:
        """Return the folder of the notebook: Jupyter starts a kernel there.

        Raises:
            UsageError: a folder does not exist, or would have the name of another one.
        """
        from toolcell.kernel.folder import NotebookFolder

        names = set[str]()
        for each in self.mounts or ():
            if not each.is_dir():
                raise UsageError(f"--mount {each}: there is no such folder")
            name = each.resolve().name
            if not name or name in names:
                raise UsageError(f"--mount {each}: the workspace needs a name for it, and {name!r} is taken or empty")
            names.add(name)
        return NotebookFolder(Path.cwd(), tuple(self.mounts or ()), is_saved=self.save)


def install(
    context: typer.Context,
    *,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name in notebook files.")] = "toolcell",
    display_name: Annotated[
        str | None, typer.Option("--display-name", metavar="TEXT", help="Name shown in menus.")
    ] = None,
    user: Annotated[
        bool, typer.Option("--user", help="Install for this user, not in this Python environment.")
    ] = False,
    sys_prefix: Annotated[
        bool, typer.Option("--sys-prefix", help="Install in this Python environment, as without --user.")
    ] = False,
    files: FolderFlags,
    settings: RuntimeFlags,
    builtins: BuiltinFlags,
    limits: Limits,
) -> None:
    """Install the kernel: fetch its packages, start a sandbox once, and register it with Jupyter.

    Limits apply to each cell; memory, disk and processes to the whole notebook.
    """
    from toolcell.kernel import spec
    from toolcell.kernel.cells import Cells

    if user and sys_prefix:
        raise UsageError("--user and --sys-prefix are two places: name one")
    files.folder()
    cells = Cells(_options(settings, builtins, limits))

    async def try_out(_watch: Any) -> None:
        with showing_installation(_watch):
            async with opened_dependencies():
                await cells.open()
                await cells.close()

    run_watched(try_out)
    place = spec.install(name, _arguments(context), display_name=display_name or spec.DISPLAY_NAME, for_user=user)
    stdout().print(safe(f"kernel {name} is in {place}"))


def start(
    *,
    connection_file: Annotated[Path, typer.Option("-f", metavar="FILE", help="Where Jupyter has written the ports.")],
    files: FolderFlags,
    settings: RuntimeFlags,
    builtins: BuiltinFlags,
    limits: Limits,
    installed_by: Annotated[str, typer.Option("--installed-by", hidden=True)] = "",
) -> None:
    """Serve a notebook. Jupyter starts it."""
    from toolcell.kernel.kernel import start as serve

    def make_cells() -> Cells:
        from toolcell.kernel.cells import Cells

        return Cells(_options(settings, builtins, limits), files.folder(), installed_by)

    with showing_warnings():
        serve(str(connection_file), make_cells)


def _options(settings: RuntimeFlags, builtins: BuiltinFlags, limits: Limits) -> dict[str, Any]:
    from toolcell.kernel.cells import LIMITS

    if settings.lint != "off" or settings.check_types not in (None, "off"):
        raise UsageError("--lint and --check-types read scripts, and the cells of a notebook are IPython's")
    given = {name: getattr(limits, name) for name in limits.model_fields_set}
    return settings.options(builtins) | {"limits": LIMITS.model_copy(update=given)}


def _arguments(context: typer.Context) -> list[str]:
    """Return the flags that were given, for the command that starts the kernel."""
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in OF_THE_SPEC or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        for each in value if isinstance(value, list | tuple) else [value]:
            words.append(max(parameter.opts, key=len))
            if not isinstance(each, bool):
                text = str(each)
                words.append(os.path.abspath(text) if name in PATHS and os.path.exists(text) else text)
    return words


register = group(SUMMARY, {"install": install, "start": start}, hidden=("start",), epilog=EPILOG)
