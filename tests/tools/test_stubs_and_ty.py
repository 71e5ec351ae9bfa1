"""Stubs are modules that a type checker accepts on their own, whatever names and schemas the tools have."""

from __future__ import annotations

import random
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell.tools import ToolRegistry

TY = Path(sysconfig.get_path("scripts"), "ty")
pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not TY.is_file(), reason="needs ty: pip install 'toolcell[types]'")]

NAMES = (
    "list", "dict", "str", "int", "Any", "Literal", "TypedDict", "staticmethod", "id", "type", "items", "keys", "others",
    "self", "from", "class", "a-b", "$top", "__debug__", "_private", "camelCase", "Query", "\ufb01x", "été", "match", "T1",
)  # fmt: skip
"""Names of parameters and fields. All of them occur in tools of real servers, or broke a stub once."""

SCALARS: tuple[dict[str, Any], ...] = (
    {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {},
    {"enum": ["a", "it's", 2, None]}, {"enum": [1.5, "x"]}, {"const": "only"}, {"type": ["string", "null"]},
    {"type": "string", "contentEncoding": "base64"}, {"type": "string", "default": "x"}, {"type": "string", "default": 3},
    {"type": "integer", "default": 5}, {"enum": ["brief", "long"], "default": "long"}, {"type": "number", "default": 1},
    {"type": "boolean", "default": True}, {"allOf": [{"type": "string"}]}, {"$ref": "#/$defs/Node"},
)  # fmt: skip
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
    "required": ["value"],
}


class Generated:
    """Schemas out of a seed, each with a value that is valid."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self, depth: int = 0) -> dict[str, Any]:
        kind = self._random.random()
        if depth > 2 or kind < 0.5:
            return dict(self._random.choice(SCALARS))
        if kind < 0.65:
            return {"type": "array", "items": self.schema(depth + 1), "default": []}
        if kind < 0.75:
            return {"anyOf": [self.schema(depth + 1), {"type": "null"}]}
        if kind < 0.8:
            return {"type": "object", "additionalProperties": self.schema(depth + 1), "default": {}}
        return self.record(depth + 1)

    def record(self, depth: int = 0) -> dict[str, Any]:
        names = self._random.sample(NAMES, self._random.randint(0, 4))
        properties = {name: self.schema(depth) for name in names}
        required = [name for name in names if self._random.random() < 0.5]
        extra = self._random.choice(({}, {"additionalProperties": False}, {"additionalProperties": True}))
        return {"type": "object", "properties": properties, "required": required, **extra}


def valid(schema: dict[str, Any]) -> Any:
    """Return a value that the schema accepts."""
    if "$ref" in schema:
        return {"value": 1, "children": [{"value": 2, "children": []}]}
    if "enum" in schema:
        return schema["enum"][0]
    for union in ("anyOf", "allOf"):
        if union in schema:
            return valid(schema[union][0])
    if schema.get("type") == "object":
        return {name: valid(part) for name, part in schema.get("properties", {}).items()}
    if schema.get("contentEncoding"):
        return "AP8="
    of_kind = {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "null": None, "array": []}
    kind = schema.get("type")
    if kind == "array":
        return [valid(schema["items"])]
    return schema.get("const", of_kind.get(kind if isinstance(kind, str) else "string"))


def generated_registry(count: int) -> tuple[ToolRegistry, dict[str, dict[str, Any]]]:
    """Return tools that give their arguments back, and a valid call of each."""
    made, registry, calls = Generated(7), ToolRegistry(), dict[str, dict[str, Any]]()
    for number in range(count):
        base = NAMES[number % 13]
        name = (f"server{number % 17}.{base}{number}", f"{base}-{number}", f"{base}{number}")[number % 3]
        name = base if number < 8 else name if not name.startswith("$") else f"top{number}"
        parameters = {**made.record(), "$defs": {"Node": NODE}}
        returns = {**made.schema(), "$defs": {"Node": NODE}}
        calls[name] = valid(parameters)
        registry.register(
            name, f'Do the """thing""" of number {number}\\', parameters, lambda args: args, returns=returns
        )
    return registry, calls


def problems(folder: Path, text: str) -> str:
    """Return what ty says about a module of stubs."""
    (folder / "stubs.pyi").write_text(text, encoding="utf-8")
    command: list[str | Path] = [
        TY,
        "check",
        "--output-format",
        "concise",
        "--project",
        folder,
        "--python-version",
        "3.12",
        folder,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{done.stdout}\n{done.stderr}"


@pytest.mark.slow
async def test_two_thousand_schemas_get_stubs_that_ty_accepts_and_take_a_valid_call(tmp_path: Path) -> None:
    registry, calls = generated_registry(2000)
    assert registry.count() == 2000

    assert problems(tmp_path, registry.to_python())[:3000] == ""
    for name, arguments in calls.items():
        result = await registry.execute(name, arguments)
        assert result.value == arguments, (name, result)


def test_one_record_of_two_tools_is_one_class_and_a_tool_of_its_name_makes_it_another(tmp_path: Path) -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    registry = ToolRegistry()
    for name in ("far", "near", "FarP"):
        parameters = {"type": "object", "properties": {"p": point}, "required": ["p"]}
        registry.register(name, "Measure how far a point is", parameters, len, returns={"type": "array"})

    text = registry.to_python(asynchronous=True)

    assert problems(tmp_path, text) == ""
    assert text.count("(TypedDict)") == text.count("class FarP2") == 1
    assert (
        text.count("async def ")
        == text.count("(*, p: FarP2) -> list[Any]:")
        == text.count("await call_tool_async")
        == 3
    )


def test_built_in_types_have_another_name_where_a_tool_or_a_field_has_theirs(tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"rows": {"type": "array", "items": {"type": "string"}}}}
    registry = ToolRegistry()
    registry.register("list", "List rows of a table", parameters, len, returns={"type": "array"})
    registry.register("db.str", "Text of rows of a table", parameters, len, returns={"type": "string"})

    text = registry.to_python()

    assert problems(tmp_path, text) == ""
    assert "def list(*, rows: list_type[str_type] | None = None) -> list_type[Any]:" in text
    assert text.startswith("from builtins import list as list_type, str as str_type\nfrom typing import Any\n")


@each_row(
    ("schema", "annotation"),
    [
        ({"enum": [1.5, "x", None]}, "float | str | None = None"),
        ({"type": "string", "default": 3}, "str = ..."),
        ({"enum": ["a", "b"], "default": "b"}, "Literal['a', 'b'] = 'b'"),
        ({"enum": ["a", "b"], "default": "c"}, "Literal['a', 'b'] = ..."),
        ({"type": "array", "items": {"type": "string"}, "default": ["a"]}, "list[str] = ..."),
        ({"$ref": "#/$defs/Node"}, "TreeNode | None = None"),
    ],
)
def test_a_parameter_has_the_type_that_its_schema_means(
    schema: dict[str, Any], annotation: str, tmp_path: Path
) -> None:
    registry = ToolRegistry()
    parameters = {"type": "object", "properties": {"node": schema}, "$defs": {"Node": NODE}}

    registry.register("tree", "Walk through a whole tree", parameters, len)

    assert f"def tree(*, node: {annotation}) -> Any:" in registry.to_python()
    assert problems(tmp_path, registry.to_python()) == ""


def test_a_quote_in_a_description_hides_no_import() -> None:
    registry = ToolRegistry()
    schema = {"type": "object", "properties": {"list": {"type": "array", "items": {"type": "string"}}}}
    registry.register("a", 'Find screens of 5" or more.', None, lambda args: args)
    registry.register("b", "Find the others.", schema, lambda args: args)
    assert registry.to_python().startswith("from builtins import list as list_type\n")
