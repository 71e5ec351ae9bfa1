"""Tools as Python functions without bodies: what a model that writes code needs to call them rightly.

Out of JSON Schemas alone, so that hand-written tools get stubs too. What comes out is always valid Python.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from toolcell.tools.definition import ToolDefinition
from toolcell.tools.stub_types import (
    OBSERVED,
    StubTypes,
    default_text,
    is_identifier,
    is_observed,
    mapping,
    names_in,
)
from toolcell_bridge.guest.tool_names import python_name

Described = tuple[ToolDefinition, Mapping[str, Any] | None]
"""A tool, and the schema of what it returns."""


def python_module(tools: Iterable[Described], asynchronous: bool = False) -> str:
    """Write the stubs of several tools as a module that a type checker takes as a `.pyi` file: with its imports.

    `asynchronous`: as `async def`, for scripts that use `await call_tool_async(...)`.
    """
    given = [*tools]
    types = _types(given)
    text = _written(given, types, asynchronous)
    return "\n\n\n".join(filter(None, (types.imports(text), text)))


def checked_module(tools: Iterable[Described], name: str) -> str:
    """Write the stubs that scripts are checked against: all tools in one class of this `name`.

    They take what a sandbox takes: values in order, and any mapping or sequence of the right kind.
    """
    given = [*tools]
    types = _types(given, lenient=True)
    text = _written(given, types, False, name)
    return "\n".join((types.imports(text), text))


def python_stubs(tools: Iterable[Described]) -> str:
    """Write the stubs of several tools as one text, without imports: for a model to read.

    The tools of a namespace stand together, in a class of its name.
    """
    given = [*tools]
    return _written(given, _types(given), False)


def python_stub(definition: ToolDefinition, returns: Mapping[str, Any] | None = None) -> str:
    """Write one tool as a keyword-only function; records in its arguments come before it as TypedDicts."""
    return python_stubs([(definition, returns)])


def python_signature(definition: ToolDefinition, returns: Mapping[str, Any] | None = None) -> str:
    """Write one tool on one line, by the name that it is called by; records are dicts."""
    types = StubTypes(has_classes=False)
    stub = _Stub(definition, None, types, False)
    returned = types.annotation(returns, "", "") if returns is not None else "Any"
    parameters = [each for each in stub.parameters if each != "*"]
    return f"{definition.name}({', '.join(parameters)}) -> {returned}{' (observed)' * is_observed(returns)}"


def _types(tools: Iterable[Described], lenient: bool = False) -> StubTypes:
    taken = set[str]()
    for definition, returns in tools:
        taken.update(map(python_name, definition.name.split(".")), names_in(definition.parameters), names_in(returns))
    return StubTypes(taken, lenient)


def _written(tools: Iterable[Described], types: StubTypes, asynchronous: bool, inside: str = "") -> str:
    blocks, spaces = list[str](), dict[str, Any]()
    for definition, returns in tools:
        stub = _Stub(definition, returns, types, asynchronous)
        *path, _ = [*([inside] if inside else []), *definition.name.split(".")]
        space, qualified = spaces, ""
        for part in path:
            qualified += f"{part}."
            if qualified not in space:
                space[qualified] = {}
                if space is spaces:
                    blocks.append(qualified)
            space = space[qualified]
        text = stub.text
        blocks += types.new_classes()
        if path:
            space[definition.name] = f"@{types.visible('staticmethod')}\n{text}"
        else:
            blocks.append(text)
    return "\n\n\n".join(_namespace(each, spaces[each]) if each in spaces else each for each in blocks)


def _namespace(qualified: str, members: Mapping[str, Any]) -> str:
    """Write a namespace as a class: `tools.github` of `tools.github.create_issue(...)`."""
    written = [_namespace(name, member) if isinstance(member, Mapping) else member for name, member in members.items()]
    name = python_name(qualified.removesuffix(".").rpartition(".")[2])
    return f"class {name}:\n" + textwrap.indent("\n\n".join(written), "    ")


class _Stub:
    def __init__(
        self, definition: ToolDefinition, returns: Mapping[str, Any] | None, types: StubTypes, asynchronous: bool
    ) -> None:
        self._definition = definition
        self._types = types
        self._asynchronous = asynchronous
        self._prefix = "".join(part.capitalize() for part in re.split(r"[^A-Za-z0-9]+", definition.name)) or "Tool"
        self.parameters = self._parameters()
        self._returns = returns

    @property
    def text(self) -> str:
        """The function with its docstring."""
        return f"{self._signature()}\n{_docstring(self._documentation())}"

    def _signature(self) -> str:
        name, returns, parameters = (
            python_name(self._definition.name.rpartition(".")[2]),
            self._returns,
            self.parameters,
        )
        returned = self._types.annotation(returns, self._prefix, "Result") if returns is not None else "Any"
        returned = self._types.visible(returned)
        start = f"{'async ' if self._asynchronous else ''}def {name}("
        line = f"{start}{', '.join(parameters)}) -> {returned}:"
        seen = f"  # returns as observed in {returns[OBSERVED]} results" if returns and is_observed(returns) else ""
        if len(line) <= 110:
            return line + seen
        listed = "".join(f"    {parameter},\n" for parameter in parameters)
        return f"{start}\n{listed}) -> {returned}:{seen}"

    def _parameters(self) -> list[str]:
        schema = self._definition.parameters
        properties = mapping(schema.get("properties"))
        required = [name for name in schema.get("required") or () if name in properties]
        optional = [name for name in properties if name not in required]
        named = [name for name in dict.fromkeys((*required, *optional)) if is_identifier(name)]
        written = [self._parameter(name, properties[name], name in required) for name in named]
        rest = len(named) < len(properties) or schema.get("additionalProperties") not in (None, False)
        others = "others"
        while others in named:
            others += "_"
        any_type = self._types.visible("Any")
        if self._types.lenient and len(named) < len(properties):
            return [f"*values: {any_type}", f"**{others}: {any_type}"]
        if self._types.lenient:
            return written + ([f"**{others}: {any_type}"] if rest else [])
        return (["*", *written] if written else []) + ([f"**{others}: {any_type}"] if rest else [])

    def _parameter(self, name: str, schema: Any, is_required: bool) -> str:
        self._types.is_argument = True
        annotation = self._types.annotation(schema, self._prefix, name, self._definition.parameters)
        self._types.is_argument = False
        if is_required:
            return f"{name}: {self._types.visible(annotation)}"
        default = mapping(schema).get("default")
        if default is None and not annotation.endswith("None") and annotation != "Any":
            annotation += " | None"
        return f"{name}: {self._types.visible(annotation)} = {default_text(default, annotation)}"

    def _documentation(self) -> str:
        properties = mapping(self._definition.parameters.get("properties"))
        described = {name: mapping(part).get("description") for name, part in properties.items()}
        lines = [f"    {name}: {' '.join(str(text).split())}" for name, text in described.items() if text]
        heading = self._definition.description.strip()
        if self._asynchronous:
            heading += f"\n\nCall it as await call_tool_async({self._definition.name!r}, {{...}})."
        elif not all(map(is_identifier, self._definition.name.split("."))):
            heading += f"\n\nCall it as call_tool({self._definition.name!r}, {{...}})."
        return "\n".join([heading, "", "Args:", *lines]) if lines else heading


def _docstring(text: str) -> str:
    safe = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"').replace("\0", "")
    if safe.endswith('"'):
        safe += " "
    lines = safe.splitlines() or [""]
    indented = "\n".join(f"    {line}".rstrip() for line in lines[1:])
    closing = "\n    " if len(lines) > 1 else ""
    return f'    """{lines[0]}' + (f"\n{indented}" if len(lines) > 1 else "") + f'{closing}"""'
