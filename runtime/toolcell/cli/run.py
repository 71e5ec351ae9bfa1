"""`toolcell run`: a script from a file or stdin, in a fresh sandbox, with the tools it is given."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolcell.cli import exits
from toolcell.cli.arguments import (
    as_flag,
    load_registry,
    parse_inputs,
    read_files,
    read_script,
)
from toolcell.cli.builtin import BuiltinFlags, opened_dependencies
from toolcell.cli.execution import Watch, run_watched, showing_installation
from toolcell.cli.flags import command
from toolcell.cli.mcp_servers import McpFlags
from toolcell.cli.places import output_folder, save_files
from toolcell.cli.terminal import print_json, safe, stderr, stdout, value_text
from toolcell.config import CheckTypes, Layer, Limits, LintProfile, Policy, PoolConfig, Profile
from toolcell.errors import ToolAbort, UsageError
from toolcell.results import ExecutionResult
from toolcell.support.text import for_terminal, one_line

if TYPE_CHECKING:
    from toolcell.calls.events import Event

MAX_TOOL_ERROR_CHARS = 500
"""Most characters of the text of a tool's exception."""

NO_SERVERS = McpFlags()

EPILOG = "Exit status:\n\n" + "\n\n".join(f"{status}: {meaning}" for status, meaning in exits.MEANINGS.items())


@dataclass(frozen=True, slots=True)
class RuntimeFlags:
    """Flags that say which runtime the script gets."""

    tools: Annotated[
        list[str] | None, typer.Option("--tools", "-t", metavar="FILE|MODULE", help="Tools the script may call.")
    ] = None
    packages: Annotated[
        list[str] | None, typer.Option("--packages", "-p", metavar="NAME", help="A package the script may import.")
    ] = None
    preload: Annotated[
        list[str] | None,
        typer.Option("--preload", metavar="MODULE", help="A module imported before the script starts."),
    ] = None
    backend: Annotated[str, typer.Option("--backend", metavar="NAME", help="process or docker.")] = "process"
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="Container image, with --backend docker.")
    ] = None
    runtime: Annotated[
        str | None,
        typer.Option("--runtime", metavar="NAME", help="Container runtime, such as runsc, with --backend docker."),
    ] = None
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="RULE",
            help="Where the script may send HTTP requests, such as 'api.example.com/v1' or 'GET,POST *.example.com'.",
        ),
    ] = None
    allow_secret: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-secret",
            metavar="HOST=HEADER: {NAME}",
            help="A header for requests to HOST; {NAME} is an environment variable that the script never sees.",
        ),
    ] = None
    allow_package: Annotated[
        list[str] | None,
        typer.Option("--allow-package", metavar="NAME", help="A package that the script may install: install_package."),
    ] = None
    package_index: Annotated[
        str | None,
        typer.Option(
            "--package-index",
            metavar="URL",
            help="Where packages come from instead of PyPI: URL, or 'URL @ADDRESS' for one that is not public.",
        ),
    ] = None
    lint: Annotated[LintProfile, typer.Option("--lint", help="Refuse some Python before it runs. Not isolation.")] = (
        "off"
    )
    check_types: Annotated[
        CheckTypes | None,
        typer.Option("--check-types", help="Check the script's types first: warn of mistakes, or refuse it."),
    ] = None
    profile: Annotated[
        Profile, typer.Option("--profile", help="How to isolate: full, container, or the strongest that runs here.")
    ] = "auto"
    require: Annotated[
        str | None, typer.Option("--require", metavar="LAYER,...", help="Isolation layers that must be live.")
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", help="Seed the script's randomness.")] = None
    clock: Annotated[float | None, typer.Option("--clock", help="Start the script's clock at this Unix time.")] = None
    hash_seed: Annotated[int | None, typer.Option("--hash-seed", help="PYTHONHASHSEED of the script.")] = None
    record: Annotated[
        str | None, typer.Option("--record", metavar="FILE", help="Record the run in this file, or in postgresql://...")
    ] = None
    record_config: Annotated[
        Path | None,
        typer.Option(
            "--record-config", metavar="FILE", help="Settings of the record as TOML: value_bytes, keep_s, key, ..."
        ),
    ] = None

    def options(self, builtins: BuiltinFlags) -> dict[str, Any]:
        """Return the keyword arguments for `Runtime`.

        Raises:
            UsageError: a flag's value is wrong, or flags exclude each other.
        """
        settings = {
            "seed": self.seed,
            "clock": self.clock,
            "hash_seed": self.hash_seed,
            "check_types": self.check_types,
        }
        options: dict[str, Any] = {
            "packages": split(self.packages),
            "preload": split(self.preload),
            "pool": PoolConfig(warm=0),
            "policy": make_policy(self.require, profile=self.profile, lint=self.lint, **settings),
            "record": self._record(),
        }
        given = (self.allow or (), self.allow_secret or (), self.allow_package or ())
        if any(given) or self.package_index is not None:
            from toolcell.egress import Egress

            egress = Egress.of_texts(*given, self.package_index)
            options |= {"egress": egress} if any(given) else {}
        if self.package_index is not None:
            from toolcell.sandbox import use_package_index

            use_package_index(self.package_index.split()[0])
        options["backend"] = self._backend(options)
        tools = load_registry(self.tools) if self.tools else None
        return options | {"registry": builtins.with_tools(tools, self.backend)}  # last: it makes folders

    def _record(self) -> Any:
        file = record_path(self.record)
        if self.record_config is None:
            return file
        if file is None:
            raise UsageError("--record-config needs --record FILE")
        from toolcell.audit import AuditLog

        return AuditLog(file, config=record_config(self.record_config))

    def _backend(self, options: dict[str, Any]) -> Any:
        if self.image is None and self.runtime is None:
            return self.backend
        if self.backend != "docker":
            raise UsageError("--image and --runtime are about containers; add --backend docker")
        from toolcell.sandbox.docker import DockerBackend

        given = {name: options[name] for name in ("packages", "preload", "policy")}
        return DockerBackend(self.image, runtime=self.runtime, **given)


def run(
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="A Python file, or - for stdin.")] = None,
    *,
    code: Annotated[
        str | None, typer.Option("--code", "-c", metavar="CODE", help="The script itself, instead of a file.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="NAME=JSON", help="A variable of the script.")
    ] = None,
    put_files: Annotated[
        list[str] | None,
        typer.Option("--file", "-f", metavar="[NAME=]PATH", help="A file to put in the script's workspace."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", metavar="DIR", help="Where to save the files a script returns.")
    ] = None,
    settings: RuntimeFlags,
    builtins: BuiltinFlags,
    servers: McpFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Write the whole result as one JSON document.")] = False,
    limits: Limits,
) -> None:
    """Run a script in a fresh sandbox and show its result.

    The script's output goes to stdout and stderr, its result to stdout, everything else to stderr.
    --tools, --input, --file, --packages and --preload may be given several times; lists of packages and modules may
    also be separated by commas.
    """
    if (script is None) == (code is None):
        raise UsageError("name a SCRIPT or give it with -c CODE" + ("" if code is None else ", not both"))
    source = code if code is not None else read_script(script or "")
    arguments = {"inputs": parse_inputs(inputs or ()), "files": read_files(put_files or ())}
    with output_folder(output_dir):
        # The document is all that may reach stdout. A tool, or the file that defines it, may print too.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            result = execute(source, settings.options(builtins) | {"limits": limits}, arguments, servers, not as_json)
        saved, problems = save_files(result.files, output_dir) if output_dir else ({}, [])
    if as_json:
        unsaved = {"not_saved": problems} if problems else {}
        print_json({**result.to_dict(), "saved": [str(path) for path in saved.values()], **unsaved})
    else:
        show(result, source)
        if output_dir is None and any(not file.problem for file in result.files):
            stderr().print("not saved: --output-dir DIR saves files", style="dim")
    for name, path in saved.items():
        if not name.endswith(path.name):
            stderr().print(safe(f"{path.parent} has a {Path(name).name} already: saved as {path}", "yellow"))
    for problem in problems:
        stderr().print(safe(problem, "red"))
    status = exits.BY_OUTCOME[result.outcome]
    raise typer.Exit(exits.FAILED if problems and status == exits.OK else status)


def show(result: ExecutionResult, source: str) -> None:
    """Write a run's result, without its output. One that is only a value, and nothing around it, needs no rich."""
    if result.ok and not (
        result.files or result.warnings or result.type_findings or sys.stderr.isatty() or sys.stdout.isatty()
    ):
        if result.has_value:
            text = for_terminal(value_text(result.value))
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    from toolcell.cli import render

    render.show_result(result, source, stdout(), stderr())


def execute(
    source: str,
    options: dict[str, Any],
    arguments: dict[str, Any],
    servers: McpFlags = NO_SERVERS,
    shows_output: bool = False,
) -> ExecutionResult:
    """Open a runtime for one script and run it. `shows_output`: what it prints is written as it comes."""
    from toolcell.cli import early_zygote

    registry = servers.with_registry(options["registry"])
    options = options | {"backend": early_zygote.backend_for(options), "registry": registry}
    from toolcell.calls.call import RunContext
    from toolcell.runtime import Runtime

    context = RunContext()
    context.events.subscribe(tool_error_listener())

    async def work(watch: Watch) -> ExecutionResult:
        with showing_installation(watch):
            return await opened(watch)

    async def opened(watch: Watch) -> ExecutionResult:
        async with opened_dependencies(), servers.connected(registry), Runtime(**options) as runtime:
            watch.doing = "running"
            return await runtime.execute_code(
                source,
                **arguments,
                context=context,
                cancel=watch.cancel,
                on_log=watch.show if shows_output else lambda stream, text: watch.say(text),
                on_progress=lambda value: watch.say(str(value)),
            )

    return run_watched(work)


def tool_error_listener() -> Callable[[Event], None]:
    """Return a listener that writes each unexpected exception of a tool once. The script sees only its class."""
    written = {""}

    def listen(event: Event) -> None:
        line = tool_error_line(event)
        if line not in written:
            written.add(line)
            stderr().print(safe(line, "red"))

    return listen


def tool_error_line(event: Event) -> str:
    """Name the tool and its unexpected exception; empty when there was none."""
    from toolcell.calls import events
    from toolcell.calls.result import ErrorCode

    result = event.result if event.type == events.TOOL_END else None
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


def record_config(path: Path | None) -> Any:
    """Return the settings of a record that a file has.

    Raises:
        UsageError: it cannot be read, or a setting is wrong.
    """
    if path is None:
        return None
    from toolcell.audit import RecordConfig  # only for those who have such a file

    return RecordConfig.from_toml(path)


def record_path(path: str | None) -> str | None:
    """Return the place of the record.

    Raises:
        UsageError: the path is empty, which would mean the current directory.
    """
    if path is not None and not path.strip():
        raise UsageError(f"--record {path!r}: the path is empty; name a file, such as runs.db")
    return path


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
    except UsageError as exc:
        raise UsageError(as_flag(exc)) from exc


register = command(run, epilog=EPILOG)
