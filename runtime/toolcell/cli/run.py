"""`toolcell run`: a script from a file or stdin, in a fresh sandbox, with the tools it is given."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError
from rich.console import Console
from typer.core import TyperCommand

from toolcell.cli import exits, render
from toolcell.cli.arguments import load_registry, parse_inputs, read_files, read_script, with_limit_flags
from toolcell.cli.execution import Watch, run_watched
from toolcell.cli.render import print_json, reporting, safe, stderr, stdout
from toolcell.config import Layer, Limits, LintProfile, Policy, PoolConfig
from toolcell.errors import ToolAbort, UsageError
from toolcell.results import ExecutionResult, OutputFile
from toolcell.text import one_line

if TYPE_CHECKING:
    from toolcell.tools.events import Event

MAX_TOOL_ERROR_CHARS = 500
"""Of the text of a tool's exception."""

EPILOG = "Exit status:\n\n" + "\n\n".join(f"{status}: {meaning}" for status, meaning in exits.MEANINGS.items())


def register(app: typer.Typer, name: str) -> None:
    """Add the command."""
    app.command(name, cls=NamingCommand, epilog=EPILOG)(reporting(with_limit_flags(run)))


class NamingCommand(TyperCommand):
    """A command whose usage errors show the wrong value, as in `--wall-s abc`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line. typer leaves the value out of pydantic's error, so it is added here."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as exc:
            value = repr(exc.__cause__.errors()[0]["input"]) if isinstance(exc.__cause__, ValidationError) else ""
            if value not in exc.message:
                exc.message = f"{value}: {exc.message}"
            raise


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or - for stdin.")],
    *,
    tools: Annotated[
        list[str] | None, typer.Option("--tools", "-t", metavar="FILE|MODULE", help="Tools the script may call.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="NAME=JSON", help="A name in the script's namespace.")
    ] = None,
    put_files: Annotated[
        list[str] | None,
        typer.Option("--file", "-f", metavar="[NAME=]PATH", help="A file to put in the script's workspace."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", metavar="DIR", help="Where to save the files a script returns.")
    ] = None,
    packages: Annotated[
        list[str] | None, typer.Option("--packages", "-p", metavar="NAME", help="A package the script may import.")
    ] = None,
    preload: Annotated[
        list[str] | None,
        typer.Option("--preload", metavar="MODULE", help="A module imported before the script starts."),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", metavar="NAME", help="process or docker.")] = "process",
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="Image of the container, with --backend docker.")
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option("--runtime", metavar="NAME", help="What runs the container, with --backend docker: runsc."),
    ] = None,
    mode: Annotated[
        Literal["single", "forked"] | None,
        typer.Option("--mode", help="A container for each sandbox, or one for many; with --backend docker."),
    ] = None,
    lint: Annotated[
        LintProfile, typer.Option("--lint", help="Refuse code early, by reading it. Not isolation.")
    ] = "off",
    require: Annotated[
        str | None, typer.Option("--require", metavar="LAYER,...", help="Isolation layers that must be live.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed the script's randomness.")] = None,
    clock: Annotated[float | None, typer.Option("--clock", help="Start the script's clock at this Unix time.")] = None,
    hash_seed: Annotated[int | None, typer.Option("--hash-seed", help="PYTHONHASHSEED of the script.")] = None,
    audit: Annotated[
        str | None, typer.Option("--audit", metavar="DIR", help="Record the run in the audit log in this directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the whole result as one JSON document.")] = False,
    limits: Limits,
) -> None:
    """Run a script in a fresh sandbox and show its result.

    What the script prints goes where it was printed, its result to stdout, everything about the run to stderr.
    --tools, --input, --file, --packages and --preload may be given several times; lists of packages and modules may
    also be separated by commas.
    """
    source = read_script(script)
    registry = load_registry(tools) if tools else None
    arguments: dict[str, Any] = {
        "inputs": parse_inputs(inputs or ()),
        "files": read_files(put_files or ()),
    }
    options: dict[str, Any] = {
        "backend": backend,
        "limits": limits,
        "packages": split(packages),
        "preload": split(preload),
        "pool": PoolConfig(warm=0),
        "policy": make_policy(require, lint=lint, seed=seed, clock=clock, hash_seed=hash_seed),
        "audit": audit_folder(audit),
    }
    if image is not None or runtime is not None or mode is not None:
        options["backend"] = docker_backend(options, image, runtime, mode)
    result = execute(source, registry, options, arguments)
    saved = save_files(result.files, output_dir) if output_dir else []
    if as_json:
        print_json({**result.to_dict(), "saved": [str(path) for path in saved]})
    else:
        render.show_result(result, source, stdout(), stderr())
    raise typer.Exit(exits.BY_OUTCOME[result.outcome])


def docker_backend(
    options: dict[str, Any], image: str | None, runtime: str | None, mode: Literal["single", "forked"] | None
) -> Any:
    """Make the Docker backend that the flags describe.

    Raises:
        UsageError: another backend was chosen, or the flags exclude each other.
    """
    if options["backend"] != "docker":
        raise UsageError("--image, --runtime and --mode are about containers; add --backend docker")
    from toolcell.sandbox.docker import DockerBackend

    given = {name: options[name] for name in ("packages", "preload", "policy")}
    return DockerBackend(image, runtime=runtime, mode=mode or "single", **given)


def execute(source: str, registry: Any, options: dict[str, Any], arguments: dict[str, Any]) -> ExecutionResult:
    """Open a runtime for one script and run it."""
    from toolcell.runtime import Runtime
    from toolcell.tools import RunContext

    console, context = stderr(), RunContext()
    context.events.subscribe(tool_error_listener(console))

    async def work(watch: Watch) -> ExecutionResult:
        async with Runtime(registry, **options) as runtime:
            watch.doing = "running"
            return await runtime.execute_code(
                source,
                **arguments,
                context=context,
                cancel=watch.cancel,
                on_log=lambda stream, text: watch.say(text),
                on_progress=lambda value: watch.say(str(value)),
            )

    return run_watched(work, console)


def tool_error_listener(console: Console) -> Callable[[Event], None]:
    """Return a listener that writes each unexpected exception of a tool once. The script sees only its class."""
    written = {""}

    def listen(event: Event) -> None:
        line = tool_error_line(event)
        if line not in written:
            written.add(line)
            console.print(safe(line, "red"))

    return listen


def tool_error_line(event: Event) -> str:
    """Name the tool and its unexpected exception; empty when there was none."""
    from toolcell.tools.events import TOOL_END
    from toolcell.tools.result import ErrorCode

    result = event.result if event.type == TOOL_END else None
    if result is None or result.error is None or result.error.code != ErrorCode.EXCEPTION:
        return ""
    if result.exc is None or isinstance(result.exc, ToolAbort):
        return ""
    text = "".join(traceback.format_exception_only(result.exc)).rstrip()
    return one_line(f"tool {event.tool} raised {text}", MAX_TOOL_ERROR_CHARS)


_SEPARATOR = re.compile(r",(?![^\[]*\])(?!\s*[<>=!~])")
"""A comma that separates names; neither a comma in `a[b,c]` nor one before a version in `a>=1,<2`."""


def split(given: list[str] | None) -> tuple[str, ...]:
    """Split the values of a repeatable flag: `--packages a,b --packages c` are three names."""
    return tuple(part.strip() for text in given or () for part in _SEPARATOR.split(text) if part.strip())


def audit_folder(path: str | None) -> Path | None:
    """Return the directory of the audit log.

    Raises:
        UsageError: the path is empty, which would mean the current directory.
    """
    if path is not None and not path.strip():
        raise UsageError(f"--audit {path!r}: the path is empty; name a directory, such as runs/")
    return None if path is None else Path(path)


def make_policy(require: str | None, **settings: Any) -> Policy:
    """Make the policy that the flags describe.

    Raises:
        UsageError: a layer does not exist or a value is out of range.
    """
    if require is not None:
        from toolcell.cli.doctor import required_layers

        layers: frozenset[Layer] = required_layers(require)  # type: ignore[assignment]  # checked by name there
        settings["require"] = layers
    try:
        return Policy(**settings)
    except ValidationError as exc:
        first = exc.errors()[0]
        raise UsageError(f"--{first['loc'][0]} {first['input']!r}: {first['msg']}".replace("_", "-", 1)) from exc


def save_files(files: tuple[OutputFile, ...], folder: Path) -> list[Path]:
    """Write the returned files below `folder` and return their paths.

    The script chose the names: none may leave the folder, and no symbolic link in it is followed.

    Raises:
        UsageError: a name is not a plain relative path, or a file cannot be written.
    """
    return [_save(file, folder) for file in files if file.data is not None]


def _save(file: OutputFile, folder: Path) -> Path:
    parts = PurePosixPath(file.name).parts
    if not parts or file.name.startswith("/") or set(parts) & {"..", ""} or "\\" in file.name or "\0" in file.name:
        raise UsageError(f"the script returned a file named {file.name!r}, which leaves {folder}: not saved")
    target = folder.joinpath(*parts)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"{target.parent} is a link that leaves {folder}: {file.name!r} not saved")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(target, flags, 0o644), "wb") as opened:
            opened.write(file.data or b"")
    except OSError as exc:
        raise UsageError(f"cannot save {file.name!r} in {folder}: {exc.strerror}") from exc
    return target
