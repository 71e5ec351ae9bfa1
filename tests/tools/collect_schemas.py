"""Collect schemas of real tools and APIs into `real_schemas.json.gz`, each with a call that is valid for it.

    python tests/tools/collect_schemas.py FOLDER

FOLDER holds `googleapiclient` and `botocore`, unpacked from their wheels, and `npm/node_modules` with the MCP servers
`server-everything`, `server-filesystem` and `server-memory`. Descriptions are shortened; patterns that Python does not
know are left out; of each API only a few methods are taken, and only those whose schemas are not very long.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import jsonschema_rs

from toolcell import RegistrationError, ToolRegistry

TARGET = Path(__file__).with_name("real_schemas.json.gz")
MOST_BYTES = 4_000
OF_EACH = 4
KEPT = {"type", "enum", "format", "pattern", "minLength", "maxLength", "minItems", "maxItems", "readOnly", "deprecated"}
TEXTS = {
    "date-time": "2026-01-02T03:04:05Z",
    "google-datetime": "2026-01-02T03:04:05Z",
    "date": "2026-01-02",
    "byte": "AP8=",
    "google-duration": "3.5s",
    "google-fieldmask": "name",
    "int64": "7",
    "uint64": "7",
    "uri": "https://example.com/",
}
GUESSES = (
    "", "a", "abcdef", "Abc-1", "1", "12", "123456789012", "12345678-1234-1234-1234-123456789012", "a1b2c3d4e5f6",
    "arn:aws:iam::123456789012:role/name", "arn:aws:s3:::name", "us-east-1", "https://example.com/a", "a@example.com",
    "/a/b", "a.b", "a:b", "i-1234567890abcdef0", "projects/a", "projects/a/locations/b", "organizations/1", "folders/1",
    "2026-01-02", "1.0", "1.0.0", "A", "ABCDEF", "true", "10.0.0.1", "10.0.0.0/24", "name/name", "users/a", "accounts/a",
)  # fmt: skip
"""Texts that fit most patterns; a method with another pattern in its call is left out."""
Schema = dict[str, Any]


def short(text: str) -> str:
    plain = " ".join(re.sub(r"<[^>]*>", "", text).split())
    return plain if len(plain) <= 120 else f"{plain[:119]}…"


def closure(schema: Schema, known: Mapping[str, Schema]) -> Schema:
    """Return a schema with the definitions that it refers to."""
    needed, rest = dict[str, Schema](), [schema]
    while rest:
        text = json.dumps(rest.pop())
        for name in re.findall(r'"\$ref": "#/\$defs/([^"]+)"', text):
            if name not in needed:
                needed[name] = known[name]
                rest.append(known[name])
            if len(needed) > 40:
                raise ValueError("too many definitions")
    return {**schema, "$defs": needed} if needed else schema


# Google's discovery documents


def of_google(given: Mapping[str, Any]) -> Schema:
    """Return a parameter or a schema of a discovery document as JSON Schema."""
    if "$ref" in given:
        return {"$ref": f"#/$defs/{given['$ref']}"}
    made: Schema = {name: given[name] for name in KEPT & given.keys()}
    if made.get("type") == "any":
        del made["type"]
    for bound in {"minimum", "maximum"} & given.keys():
        made[bound] = float(given[bound]) if given["type"] == "number" else int(given[bound])
    if "default" in given and given.get("type") == "string":
        made["default"] = given["default"]
    if "description" in given:
        made["description"] = short(given["description"])
    if "properties" in given:
        made["properties"] = {name: of_google(part) for name, part in given["properties"].items()}
    for name in {"items", "additionalProperties"} & given.keys():
        made[name] = of_google(given[name])
    return {"type": "array", "items": made} if given.get("repeated") else made


def google_methods(resources: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from resources.get("methods", {}).values()
    for each in resources.get("resources", {}).values():
        yield from google_methods(each)


def google(folder: Path) -> Iterator[list[Schema]]:
    latest = {path.name.partition(".")[0]: path for path in sorted(folder.glob("discovery_cache/documents/*.json"))}
    for path in latest.values():
        document = json.loads(path.read_text())
        known = {name: of_google(part) for name, part in document.get("schemas", {}).items()}
        tools = []
        for method in google_methods(document):
            given = method.get("parameters", {})
            properties = {name: of_google(part) for name, part in given.items()}
            required = [name for name, part in given.items() if part.get("required")]
            if "request" in method and "body" not in properties:
                properties["body"] = of_google(method["request"])
            schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
            returns = of_google(method["response"]) if "response" in method else None
            tools.append((f"google.{method['id']}", method.get("description", ""), schema, returns, known))
        yield finished(tools)


# botocore's service models


def of_shape(shape: Mapping[str, Any]) -> Schema:
    made: Schema = {"description": short(shape["documentation"])} if "documentation" in shape else {}
    match shape["type"]:
        case "structure" if shape.get("document"):
            return made
        case "structure":
            made |= {"type": "object", "properties": {name: of_member(part) for name, part in shape["members"].items()}}
            made["required"] = [each for each in shape.get("required", ()) if each in shape["members"]]
        case "list":
            made |= {"type": "array", "items": of_member(shape["member"])}
            made |= {name: shape[key] for key, name in (("min", "minItems"), ("max", "maxItems")) if key in shape}
        case "map":
            made |= {"type": "object", "additionalProperties": of_member(shape["value"])}
        case "integer" | "long" | "float" | "double":
            made["type"] = "integer" if shape["type"] in ("integer", "long") else "number"
            made |= {name: shape[key] for key, name in (("min", "minimum"), ("max", "maximum")) if key in shape}
        case "boolean":
            made["type"] = "boolean"
        case "timestamp":
            made |= {"type": "string", "format": "date-time"}
        case "blob":
            made |= {"type": "string", "contentEncoding": "base64"}
        case _:
            made["type"] = "string"
            made |= {name: shape[key] for key, name in (("min", "minLength"), ("max", "maxLength")) if key in shape}
            made |= {name: shape[name] for name in {"enum", "pattern"} & shape.keys()}
    return made


def of_member(member: Mapping[str, Any]) -> Schema:
    return {"$ref": f"#/$defs/{member['shape']}"}


def amazon(folder: Path) -> Iterator[list[Schema]]:
    for service in sorted(each for each in (folder / "data").iterdir() if each.is_dir()):
        model = json.loads(gzip.decompress(sorted(service.glob("*/service-2.json.gz"))[-1].read_bytes()))
        known = {name: of_shape(shape) for name, shape in model["shapes"].items()}
        tools = []
        for name, operation in model["operations"].items():
            empty: Schema = {"type": "object", "properties": {}}
            schema = known[operation["input"]["shape"]] if "input" in operation else empty
            returns = of_member(operation["output"]) if "output" in operation else None
            tools.append((f"aws.{service.name}.{name}", operation.get("documentation", ""), schema, returns, known))
        yield finished(tools)


# MCP servers


async def mcp(folder: Path) -> list[Schema]:
    registry = ToolRegistry()
    programs = folder / "npm/node_modules/.bin"
    for name in ("everything", "filesystem", "memory"):
        place = ["/tmp"] if name == "filesystem" else []
        await registry.add_mcp_server(name, command=[str(programs / f"mcp-server-{name}"), *place])
    tools = [
        (tool.name, tool.definition.description, tool.definition.parameters, tool.options.returns, {})
        for tool in registry.state.tools.values()
    ]
    await registry.close()
    return finished(tools, most=1000)


# A valid call


class Examples:
    def __init__(self, schema: Schema) -> None:
        self._defs = schema.get("$defs", {})

    def of(self, schema: Any, depth: int = 0) -> Any:
        schema = schema if isinstance(schema, dict) else {}
        if "$ref" in schema:
            return self.of(self._defs[schema["$ref"].rpartition("/")[2]], depth + 1)
        for union in ("anyOf", "oneOf", "allOf"):
            if union in schema:
                return self.of(schema[union][0], depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][0]
        kind = schema.get("type", "string")
        match kind[0] if isinstance(kind, list) else kind:
            case "object":
                return self._record(schema, depth)
            case "array":
                count = max(schema.get("minItems", 0), min(1, schema.get("maxItems", 1)) if depth < 3 else 0)
                return [self.of(schema.get("items"), depth + 1) for _ in range(count)]
            case "integer":
                return max(schema.get("minimum", -7), min(schema.get("maximum", 7), 7))
            case "number":
                return max(schema.get("minimum", -7), min(schema.get("maximum", 7.5), 7.5))
            case "boolean":
                return True
            case "null":
                return None
        return _text(schema)

    def _record(self, schema: Schema, depth: int) -> Schema:
        made, required = {}, schema.get("required", ())
        for name, part in schema.get("properties", {}).items():
            if name in required or (depth < 3 and len(made) < 6):
                made[name] = self.of(part, depth + 1)
        if isinstance(more := schema.get("additionalProperties"), dict) and depth < 3:
            made["key"] = self.of(more, depth + 1)
        return made


def _text(schema: Schema) -> str:
    if "pattern" in schema:
        least, most = schema.get("minLength", 0), schema.get("maxLength", 1 << 20)
        known = re.compile(schema["pattern"])
        fits = (text.ljust(least, "a") for text in GUESSES)
        return next((text for text in fits if len(text) <= most and known.search(text)), "")
    text = TEXTS.get(schema.get("format", ""), "AP8=" if schema.get("contentEncoding") else "text é")
    return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]


def _known_patterns(schema: Any) -> Any:
    """Return a schema without the patterns that Python or ECMAScript does not know."""
    if isinstance(schema, list):
        return [_known_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, part in schema.items():
        if name == "pattern" and isinstance(part, str):
            try:
                re.compile(part)
                jsonschema_rs.validator_for({"pattern": part})
            except (re.error, ValueError):
                continue
        kept[name] = _known_patterns(part)
    return kept


def finished(tools: list[Any], most: int = OF_EACH) -> list[Schema]:
    """Return a few of an API's tools, each with a call that its schema accepts."""
    random.Random(0).shuffle(tools)
    made: list[Schema] = []
    for name, description, schema, returns, known in tools:
        if len(made) == most:
            break
        try:
            parameters = _known_patterns(closure(schema, known))
            returned = _known_patterns(closure(returns, known)) if returns is not None else None
            if len(json.dumps([parameters, returned])) > MOST_BYTES and known:
                continue
            call = Examples(parameters).of({**parameters, "$defs": {}})
        except (ValueError, RecursionError, KeyError):
            continue
        if jsonschema_rs.validator_for(parameters).is_valid(call):
            row = {"name": name, "description": short(description) or name, "parameters": parameters, "call": call}
            made.append(row | ({"returns": returned} if returned is not None else {}))
    return made


def main(folder: Path) -> None:
    rows = anyio.run(mcp, folder)
    for several in (*google(folder / "googleapiclient"), *amazon(folder / "botocore")):
        rows += several
    registry, kept = ToolRegistry(), []
    for row in rows:
        try:
            registry.register(row["name"], row["description"], row["parameters"], lambda args: args)
            kept.append(row)
        except RegistrationError as exc:
            print("left out:", str(exc)[:200])
    text = "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in kept) + "\n]\n"
    TARGET.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(len(kept), "tools,", len(text), "bytes of JSON,", TARGET.stat().st_size, "compressed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
