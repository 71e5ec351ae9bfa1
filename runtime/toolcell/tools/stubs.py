"""Tools as Python functions without bodies: what a model that writes code needs to call them rightly.

Out of JSON Schemas alone, so that hand-written tools get stubs too. What comes out is always valid Python.
"""

from __future__ import annotations

import json
import keyword
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from toolcell.tools.definition import ToolDefinition
from toolcell_bridge.guest.tool_names import python_name

_SIMPLE = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_ABOUT = frozenset({"description", "default", "examples"})
_MAX_LITERALS = 20
_MAX_DEPTH = 5


def python_stubs(tools: Iterable[tuple[ToolDefinition, Mapping[str, Any] | None]]) -> str:
    """Write the stubs of several tools as one module's text. Each is a definition and the schema of what it returns.

    The tools of a namespace stand together, in a class of its name.
    """
    blocks, spaces = list[str](), dict[str, Any]()
    for definition, returns in tools:
        stub = _Stub(definition, returns)
        *path, _ = definition.name.split(".")
        space, qualified = spaces, ""
        for part in path:
            qualified += f"{part}."
            if qualified not in space:
                space[qualified] = {}
                if space is spaces:
                    blocks.append(qualified)
            space = space[qualified]
        blocks += stub.classes()
        if path:
            space[definition.name] = stub.function()
        else:
            blocks.append(stub.function())
    return "\n\n\n".join(_namespace(each, spaces[each]) if each in spaces else each for each in blocks)


def python_stub(definition: ToolDefinition, returns: Mapping[str, Any] | None = None) -> str:
    """Write one tool as a keyword-only function; records in its arguments come before it as TypedDicts."""
    return python_stubs([(definition, returns)])


def _namespace(qualified: str, members: Mapping[str, Any]) -> str:
    """Write a namespace as a class: `tools.github` of `tools.github.create_issue(...)`."""
    written = [
        _namespace(name, member) if isinstance(member, Mapping) else f"@staticmethod\n{member}"
        for name, member in members.items()
    ]
    name = python_name(qualified.removesuffix(".").rpartition(".")[2])
    return f"class {name}:\n" + textwrap.indent("\n\n".join(written), "    ")


def is_identifier(name: str) -> bool:
    """True when Python takes it as a plain name."""
    return name.isidentifier() and not keyword.iskeyword(name)


class _Stub:
    def __init__(self, definition: ToolDefinition, returns: Mapping[str, Any] | None) -> None:
        self._definition = definition
        self._returns = returns
        self._classes: dict[str, str] = {}
        self._named: dict[str, str] = {}
        """The class of each record, by its schema: two parameters of one type have one class."""
        self._prefix = "".join(part.capitalize() for part in re.split(r"[^A-Za-z0-9]+", definition.name)) or "Tool"

        self._signature_text = self._signature()

    def classes(self) -> list[str]:
        """Return the records among its arguments and in what it returns, those inside others first."""
        return [*self._classes.values()]

    def function(self) -> str:
        """Return the tool as a function."""
        return f"{self._signature_text}\n{_docstring(self._documentation())}"

    def _signature(self) -> str:
        name = python_name(self._definition.name.rpartition(".")[2])
        parameters = self._parameters()
        returned = self.annotation(self._returns, "Result") if self._returns is not None else "Any"
        line = f"def {name}({', '.join(parameters)}) -> {returned}:"
        if len(line) <= 110:
            return line
        listed = "".join(f"    {parameter},\n" for parameter in parameters)
        return f"def {name}(\n{listed}) -> {returned}:"

    def _parameters(self) -> list[str]:
        schema = self._definition.parameters
        properties = _mapping(schema.get("properties"))
        required = [name for name in schema.get("required") or () if name in properties]
        optional = [name for name in properties if name not in required]
        named = [name for name in (*required, *optional) if is_identifier(name)]
        written = [self._parameter(name, properties[name], name in required) for name in named]
        rest = len(named) < len(properties) or schema.get("additionalProperties") not in (None, False)
        return (["*", *written] if written else []) + (["**others: Any"] if rest else [])

    def _parameter(self, name: str, schema: Any, is_required: bool) -> str:
        annotation = self.annotation(schema, name)
        if is_required:
            return f"{name}: {annotation}"
        default = _mapping(schema).get("default")
        if default is None and not annotation.endswith("None") and annotation != "Any":
            annotation += " | None"
        return f"{name}: {annotation} = {default!r}"

    def _documentation(self) -> str:
        properties = _mapping(self._definition.parameters.get("properties"))
        described = {name: _mapping(part).get("description") for name, part in properties.items()}
        lines = [f"    {name}: {' '.join(str(text).split())}" for name, text in described.items() if text]
        heading = self._definition.description.strip()
        if not all(map(is_identifier, self._definition.name.split("."))):
            heading += f"\n\nCall it as call_tool({self._definition.name!r}, {{...}})."
        return "\n".join([heading, "", "Args:", *lines]) if lines else heading

    def annotation(self, schema: Any, hint: str, depth: int = 0) -> str:
        """Return the Python annotation that fits a schema, or Any."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return "Any"
        if "const" in schema:
            return _literal([schema["const"]])
        if isinstance(options := schema.get("enum"), list):
            return _literal(options)
        for union in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(union), list) and branches:
                return _union(self.annotation(branch, hint, depth + 1) for branch in branches)
        kind = schema.get("type")
        if isinstance(kind, list):
            return _union(self.annotation({**schema, "type": each}, hint, depth + 1) for each in kind)
        if kind == "array":
            items = schema.get("items")
            return f"list[{self.annotation(items, hint, depth + 1)}]" if isinstance(items, Mapping) else "list[Any]"
        if kind == "object":
            return self._record(schema, hint, depth)
        if schema.get("contentEncoding") == "base64":
            return "bytes"  # a script sends and gets them as they are
        return _SIMPLE.get(kind, "Any") if isinstance(kind, str) else "Any"

    def _record(self, schema: Mapping[str, Any], hint: str, depth: int) -> str:
        properties = _mapping(schema.get("properties"))
        if not properties or not all(map(is_identifier, properties)):
            extra = schema.get("additionalProperties")
            inner = self.annotation(extra, hint, depth + 1) if isinstance(extra, Mapping) else "Any"
            return f"dict[str, {inner}]"
        own = {key: value for key, value in schema.items() if key not in _ABOUT}
        shape = json.dumps(own, sort_keys=True, default=repr)
        if shape in self._named:
            return self._named[shape]
        self._named[shape] = name = self._class_name(hint)
        self._classes[name] = ""  # its place: before the records inside it are known
        required = schema.get("required") or ()
        fields = []
        for field, part in properties.items():
            annotation = self.annotation(part, f"{hint}_{field}", depth + 1)
            fields.append(f"    {field}: {annotation if field in required else f'NotRequired[{annotation}]'}")
        del self._classes[name]  # records inside come first
        self._classes[name] = f"class {name}(TypedDict):\n" + "\n".join(fields)
        return name

    def _class_name(self, hint: str) -> str:
        words = [part for part in re.split(r"[^A-Za-z0-9]+", hint) if part]
        base = self._prefix + "".join(word[0].upper() + word[1:] for word in words)
        base = python_name(base)
        name, number = base, 2
        while name in self._classes:
            name, number = f"{base}{number}", number + 1
        return name


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _literal(options: list[Any]) -> str:
    plain = [option for option in options if option is None or isinstance(option, str | bool | int)]
    if not plain or len(plain) != len(options) or len(plain) > _MAX_LITERALS:
        return _union(dict.fromkeys(type(option).__name__ for option in plain)) if plain else "Any"
    return f"Literal[{', '.join(map(repr, plain))}]"


def _union(annotations: Iterable[str]) -> str:
    distinct = [text if text != "NoneType" else "None" for text in dict.fromkeys(annotations)]
    if "Any" in distinct:
        return "Any"
    # None goes last, as people write it
    return " | ".join(sorted(distinct, key=lambda text: text == "None"))


def _docstring(text: str) -> str:
    safe = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"').replace("\0", "")
    if safe.endswith('"'):
        safe += " "
    lines = safe.splitlines() or [""]
    indented = "\n".join(f"    {line}".rstrip() for line in lines[1:])
    closing = "\n    " if len(lines) > 1 else ""
    return f'    """{lines[0]}' + (f"\n{indented}" if len(lines) > 1 else "") + f'{closing}"""'
