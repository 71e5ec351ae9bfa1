"""The parts of one JSON Schema, each with a validator of its own that is compiled at its first use.

jsonschema-rs answers `is_valid` in time linear in the value, for recursive unions too. Mending arguments and
describing problems both ask for the validity of parts, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import jsonschema_rs

from toolcell.errors import RegistrationError
from toolcell.tools.schema_work import SchemaWork

BACKTRACK_LIMIT = 20_000
"""Steps a pattern with lookaround may take; about a millisecond, then the value is refused."""
MAX_REFERENCES = 16
"""References that are followed for one value; a chain that is longer may be a circle."""

_ROOT = "urn:toolcell:schema"
_DEFINITIONS = ("$defs", "definitions", "$schema")

Validator = jsonschema_rs.Validator
Part = Mapping[str, Any]


def compile_schema(schema: Part, registry: jsonschema_rs.Registry | None = None, like: Part | None = None) -> Validator:
    """Compile a schema; its own errors show here, not at the first call.

    Patterns run on a linear-time engine. Patterns that need lookaround or backreferences run with a bounded number
    of backtracks. References to other documents are never fetched. `like` chooses the draft in place of `schema`.

    Raises:
        RegistrationError: the schema is not valid JSON Schema (2020-12, or draft 7 where it says so or
            writes tuples its way), or checking one value takes too much work.
    """
    chosen = _draft(schema if like is None else like)
    validator = _compiled(chosen, schema, registry)
    if registry is None and (lost := SchemaWork(schema).lost):  # parts of one in a registry were weighed with it
        raise RegistrationError(f"invalid schema: the reference {lost!r:.200} leads nowhere")
    return validator


def _compiled(chosen: Any, schema: Part, registry: jsonschema_rs.Registry | None) -> Validator:
    try:
        return _compile(chosen, schema, jsonschema_rs.RegexOptions(), registry)
    except (jsonschema_rs.ValidationError, ValueError):
        pass
    try:
        return _compile(chosen, schema, jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACK_LIMIT), registry)
    except (jsonschema_rs.ValidationError, ValueError) as exc:
        path = getattr(exc, "instance_path", ())
        reason = getattr(exc, "message", str(exc))
        raise RegistrationError(f"invalid schema at {'/'.join(map(str, path)) or 'root'}: {reason}") from exc


def _compile(chosen: Any, schema: Part, regex: Any, registry: jsonschema_rs.Registry | None) -> Validator:
    validator: Validator = chosen(dict(schema), pattern_options=regex, registry=registry, offline=True)
    return validator


def _draft(schema: Part) -> Any:
    if "$schema" in schema:
        return jsonschema_rs.validator_for
    return jsonschema_rs.Draft7Validator if _has_tuple_items(schema) else jsonschema_rs.Draft202012Validator


def _has_tuple_items(schema: Any) -> bool:
    """Draft 7 wrote tuples as a list of `items`; later drafts do not know that."""
    if isinstance(schema, Mapping):
        return isinstance(schema.get("items"), list) or any(map(_has_tuple_items, schema.values()))
    return isinstance(schema, list) and any(map(_has_tuple_items, schema))


class Subschemas:
    """One schema and its parts. A part is identified by the object that it is inside the schema."""

    def __init__(self, root: Part) -> None:
        self.root = root
        self._pointers: dict[int, str] | None = None
        self._registry: jsonschema_rs.Registry | None = None
        self._checks: dict[int, Callable[[Any], bool]] = {}
        self._derived: dict[tuple[str, int], Validator | None] = {}
        self._defaults: dict[int, bool] = {}

    def is_valid(self, part: Any, value: Any) -> bool:
        """True when `value` is valid under this part. A part that cannot be compiled accepts nothing."""
        if not isinstance(part, Mapping):
            return part is True
        check = self._checks.get(id(part))
        if check is None:
            self._checks[id(part)] = check = self._compiled(part)
        return check(value)

    def has_default(self, part: Any) -> bool:
        """True when a part has a default that fits it. Many schemas of the world have others, such as null for text."""
        if not (isinstance(part, Mapping) and "default" in part):
            return False
        if id(part) not in self._defaults:
            self._defaults[id(part)] = self.is_valid(part, part["default"])
        return self._defaults[id(part)]

    def derived(self, name: str, part: Part, make: Callable[[Part], Part]) -> Validator | None:
        """A validator of `make(part)`, with the definitions of the whole schema; None where it cannot be compiled."""
        key = (name, id(part))
        if key not in self._derived:
            definitions = {each: self.root[each] for each in _DEFINITIONS if each in self.root}
            try:
                self._derived[key] = compile_schema({**definitions, **make(part)}, like=self.root)
            except RegistrationError:
                self._derived[key] = None
        return self._derived[key]

    def resolved(self, part: Any) -> Any:
        """Follow references inside the schema. None for one that leads nowhere or in circles."""
        for _ in range(MAX_REFERENCES):
            if not (isinstance(part, Mapping) and "$ref" in part):
                return part
            part = self.referenced(part)
        return None

    def referenced(self, part: Part) -> Any:
        """The part that `part` refers to; None where there is none."""
        target: Any = self.root
        for step in str(part["$ref"]).removeprefix("#").split("/")[1:]:
            if isinstance(target, list):
                target = target[int(step)] if step.isdecimal() and int(step) < len(target) else None
            else:
                key = step.replace("~1", "/").replace("~0", "~")
                target = target.get(key) if isinstance(target, Mapping) else None
        return target

    def _compiled(self, part: Part) -> Callable[[Any], bool]:
        if self._pointers is None:
            self._pointers = dict(_pointers(self.root))
            self._registry = jsonschema_rs.Registry([(_ROOT, dict(self.root))], **_registry_draft(self.root))
        pointer = self._pointers.get(id(part))
        try:
            if pointer is not None:
                return compile_schema({"$ref": f"{_ROOT}#{pointer}"}, self._registry, like=self.root).is_valid
            return compile_schema(part, like=self.root).is_valid
        except RegistrationError:
            return _refuse


def _registry_draft(root: Part) -> dict[str, Any]:
    return {"draft": jsonschema_rs.Draft7} if "$schema" not in root and _has_tuple_items(root) else {}


def _pointers(root: Part) -> list[tuple[int, str]]:
    """JSON Pointer of every mapping in a schema, percent-encoded for a URI fragment, by identity."""
    found: list[tuple[int, str]] = []
    pending: list[tuple[Any, str]] = [(root, "")]
    while pending:
        value, pointer = pending.pop()
        if isinstance(value, Mapping):
            found.append((id(value), pointer))
            pending += [(item, f"{pointer}/{_escaped(str(key))}") for key, item in value.items()]
        elif isinstance(value, list):
            pending += [(item, f"{pointer}/{index}") for index, item in enumerate(value)]
    return found


def _escaped(key: str) -> str:
    return quote(key.replace("~", "~0").replace("/", "~1"), safe="~")


def _refuse(value: Any) -> bool:
    return False
