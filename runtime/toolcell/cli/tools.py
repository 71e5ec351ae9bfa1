"""`toolcell tools`: show the tools of a file or module as a model would see them."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any

import typer
from rich.table import Table

from toolcell.cli.arguments import load_registry
from toolcell.cli.builtin import packages_table
from toolcell.cli.terminal import print_json, reporting, safe, stdout, write_text
from toolcell.text import one_line
from toolcell.tools import ToolRegistry
from toolcell.tools.builtin.catalogue import all_packages


class Format(enum.StrEnum):
    """How definitions are written."""

    TABLE = "table"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    MCP = "mcp"
    PYTHON = "python"


BUILTIN = "builtin"
"""In place of a file or module: the packages that come with toolcell."""


def register(app: typer.Typer, name: str) -> None:
    """Add the command."""
    app.command(name)(reporting(tools))


def tools(
    sources: Annotated[list[str], typer.Argument(metavar="FILE|MODULE...", help="Files or modules holding tools.")],
    format: Annotated[Format, typer.Option("--format", "-f", help="A table, a provider's JSON, or Python stubs.")] = (
        Format.TABLE
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Write name, description and schema as JSON.")] = False,
) -> None:
    """List the tools of a file or module as a model would see them.

    A source is a Python file or a module name; it may hold a ToolRegistry (FILE:NAME picks one of several), tools, or
    plain functions, whose signatures and docstrings then say what they take. The word builtin stands for the packages
    that come with toolcell.
    """
    if sources == [BUILTIN]:
        show_builtin(as_json)
        return
    registry = load_registry(sources)
    if format is Format.PYTHON:
        write_text(stdout(), "\n\n".join(stub(each) for each in registry.definitions()))
    elif format is Format.TABLE and not as_json:
        stdout().print(_table(registry))
    else:
        print_json([as_dict(definition, format) for definition in registry.definitions()])


def show_builtin(as_json: bool) -> None:
    """List the built-in packages: their tools, and what each needs."""
    if as_json:
        print_json([dataclasses.asdict(info) for info in all_packages()])
    else:
        stdout().print(packages_table())


def as_dict(definition: Any, format: Format) -> dict[str, Any]:
    """Return a definition in a provider's format, or in our own."""
    match format:
        case Format.OPENAI:
            return dict(definition.to_openai())
        case Format.ANTHROPIC:
            return dict(definition.to_anthropic())
        case Format.MCP:
            return dict(definition.to_mcp())
    return {"name": definition.name, "description": definition.description, "parameters": definition.parameters}


def _table(registry: ToolRegistry) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("tool", "arguments", "description"):
        table.add_column(heading, header_style="bold", overflow="fold")
    for definition in registry.definitions():
        table.add_row(
            safe(definition.name, "cyan"), safe(arguments(definition)), safe(one_line(definition.description, 120))
        )
    return table


def arguments(definition: Any) -> str:
    """Name the arguments with their types; those in brackets may be left out."""
    schema = definition.parameters
    required = set(schema.get("required", ()))
    parts = [f"{name}: {_type(each)}" for name, each in schema.get("properties", {}).items()]
    return ", ".join(part if part.partition(":")[0] in required else f"[{part}]" for part in parts)


def _type(schema: Any) -> str:
    kind = schema.get("type", "any") if isinstance(schema, dict) else "any"
    return "|".join(map(str, kind)) if isinstance(kind, list) else str(kind)


_PYTHON_TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
    "null": "None",
}


def stub(definition: Any) -> str:
    """Write a definition as the Python function a script would see it as; it is to be read, not run."""
    schema = definition.parameters
    required = set(schema.get("required", ()))
    properties = sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required)
    parameters = [f"{name}: {_python_type(each)}{'' if name in required else ' = ...'}" for name, each in properties]
    signature = f"def {definition.name}({', '.join(['*', *parameters] if parameters else [])}) -> Any:"
    described = [f"{name}: {each['description']}" for name, each in properties if each.get("description")]
    docstring = "\n    ".join([definition.description, *(["", *described, ""] if described else [])])
    return f'{signature}\n    """{docstring}"""'


def _python_type(schema: Any) -> str:
    return " | ".join(_PYTHON_TYPES.get(name, "Any") for name in _type(schema).split("|"))
