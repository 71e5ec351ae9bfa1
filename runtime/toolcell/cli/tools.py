"""`toolcell tools`: show the tools of a file or module as a model would see them, or check saved scripts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import anyio
import typer
from rich.table import Table

from toolcell.builtin.catalogue import all_packages
from toolcell.cli import exits
from toolcell.cli.arguments import load_registry
from toolcell.cli.builtin import packages_table
from toolcell.cli.conversion import Group
from toolcell.cli.execution import Watch, run_watched
from toolcell.cli.flags import group
from toolcell.cli.terminal import output, print_json, safe, stdout, table, write_text
from toolcell.control import check_scripts
from toolcell.errors import UsageError
from toolcell.runtime import Runtime
from toolcell.support.checks import closest
from toolcell.support.text import one_line
from toolcell.tools import Origin, ToolDefinition, ToolRegistry

# `toolcell tools check`: which saved scripts today's tools would break, and how.


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of registry.save_script.")],
    sources: Annotated[
        list[str], typer.Option("--tools", metavar="FILE|MODULE", help="The current tools; repeatable.")
    ],
    every: Annotated[bool, typer.Option("--all-versions", help="Check old versions too, not only the latest.")] = False,
    is_strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 also for scripts that may break.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Check saved scripts against the current tools: removed tools, parameters, types, and use of results.

    A script breaks when a call in it cannot succeed or has a wrong type; it may break when it could not be read whole;
    otherwise it is ok. Scripts are read and type-checked in sandboxes.

    Exit status: 0 when no script breaks, 1 when one does, 2 for a wrong folder, file or option, 3 without a sandbox.
    """
    registry = load_registry(sources).merged()  # saved scripts may call each other
    registry.load_scripts(folder)

    async def work(watch: Watch) -> Any:
        watch.doing = "checking"
        return await check_scripts(folder, registry, Runtime, watch.say, every_version=every)

    reports = run_watched(work)
    lines = []
    for each in reports:
        lines += [f"{each.status:<10} {each.name} v{each.version}", *(f"           {found}" for found in each.findings)]
    said = "\n".join(lines) or "no saved scripts"
    output([each.to_plain() for each in reports], as_json, lambda: write_text(stdout(), said))
    failing = {"breaks", "may break"} if is_strict else {"breaks"}
    if any(each.status in failing for each in reports):
        raise typer.Exit(exits.FAILED)


Format = Literal["table", "openai", "anthropic", "mcp", "python"]

SUMMARY = """Tools as a model sees them, and saved scripts that call them.

`toolcell tools FILE` lists the tools of a file or module; `toolcell tools check DIR --tools FILE` says which saved
scripts they would break.
"""

BUILTIN = "builtin"
"""In place of a file or module: the packages that come with toolcell."""
SEARCH = "search"
"""Before a query and files or modules: only the tools that fit the query."""


LIST = "list"


class ToolCommands(Group):
    """`toolcell tools FILE` is short for `toolcell tools list FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command in that was left out."""
        if args and args[0] not in (*self.commands, "-h", "--help"):
            if near := self._command_meant(args[0]):
                ctx.fail(f"There is no command, file or module {args[0]!r}. Did you mean {near!r}?")
            args = [LIST, *args]
        return list(super().parse_args(ctx, args))

    def _command_meant(self, given: str) -> str:
        """Return the command that is nearly of this name, unless there is a file or module of it."""
        if given in (SEARCH, BUILTIN):
            return ""
        near = closest(given, [*self.commands, SEARCH, BUILTIN]) or ""
        is_there = Path(given).exists() or Path(f"{given}.py").exists()
        return near if given.isidentifier() and not is_there and find_spec(given) is None else ""


def tools(
    sources: Annotated[list[str], typer.Argument(metavar="FILE|MODULE...", help="Files or modules holding tools.")],
    format: Annotated[Format, typer.Option("--format", "-f", help="A table, a provider's JSON, or Python stubs.")] = (
        "table"
    ),
    detail: Annotated[str, typer.Option(help="Plain text instead: names, signatures or full.")] = "",
    limit: Annotated[int, typer.Option(help="With search: list at most this many.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Write name, description and schema as JSON.")] = False,
) -> None:
    """List the tools of a file or module as a model sees them.

    A source is a Python file or a module name; it may hold a ToolRegistry (FILE:NAME picks one of several), tools, or
    plain functions, whose signatures and docstrings then say what they take. The word builtin stands for the packages
    that come with toolcell. `toolcell tools search "open an issue" FILE|MODULE...` lists those that fit, best first.
    """
    if sources == [BUILTIN]:
        output([dataclasses.asdict(info) for info in all_packages()], as_json, lambda: stdout().print(packages_table()))
        return
    if sources[0] == SEARCH:
        registry, found = searched(sources[1:], limit)
    else:
        registry = load_registry(sources)
        found = registry.definitions()
    if format == "python" and not as_json:
        detail = detail or "full"
    if detail:
        names = [each.name for each in found]
        write_text(stdout(), registry.describe_tools(names, detail=cast(Any, detail), origin=Origin.MODEL))
        return
    if format == "table" and not as_json:
        stdout().print(_table(found))
    else:
        print_json([as_dict(definition, format) for definition in found])


def searched(given: list[str], limit: int) -> tuple[ToolRegistry, list[ToolDefinition]]:
    """Return the registry of some sources, and those of its tools that fit a query.

    Raises:
        UsageError: there is no source, or the query cannot be used.
    """
    if len(given) < 2:
        wanted = f'write toolcell tools {SEARCH} "open an issue" FILE; a file of this name is ./{SEARCH}.py'
        raise UsageError(f"{SEARCH} takes a query and a file or module; {wanted}")
    if given[0].endswith(".py") and Path(given[0]).is_file() and not Path(given[1].partition(":")[0]).exists():
        raise UsageError(f'the query comes first: toolcell tools {SEARCH} "{given[1]}" {given[0]}')
    registry = load_registry(given[1:])
    return registry, anyio.run(partial(registry.search_tools, given[0], limit=limit, origin=Origin.MODEL))


def as_dict(definition: ToolDefinition, format: Format) -> dict[str, Any]:
    """Return a definition in a provider's format, or in our own."""
    formats: dict[str, Callable[[], Mapping[str, Any]]] = {
        "openai": definition.to_openai,
        "anthropic": definition.to_anthropic,
        "mcp": definition.to_mcp,
    }
    if format in formats:
        return dict(formats[format]())
    return {"name": definition.name, "description": definition.description, "parameters": definition.parameters}


def _table(definitions: list[ToolDefinition]) -> Table:
    shown = table("tool", "arguments", "description")
    for definition in definitions:
        shown.add_row(
            safe(definition.name, "cyan"), safe(arguments(definition)), safe(one_line(definition.description, 120))
        )
    return shown


def arguments(definition: ToolDefinition) -> str:
    """Name the arguments with their types; those in brackets may be left out."""
    schema = definition.parameters
    required = set(schema.get("required", ()))
    parts = [f"{name}: {_type(each)}" for name, each in schema.get("properties", {}).items()]
    return ", ".join(part if part.partition(":")[0] in required else f"[{part}]" for part in parts)


def _type(schema: Any) -> str:
    kind = schema.get("type", "any") if isinstance(schema, dict) else "any"
    return "|".join(map(str, kind)) if isinstance(kind, list) else str(kind)


register = group(SUMMARY, {LIST: tools, "check": check}, cls=ToolCommands)
