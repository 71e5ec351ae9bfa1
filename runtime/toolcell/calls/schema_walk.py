"""One walk through a value and its schema: mends what models send wrongly, fills in defaults, and finds what is wrong.

jsonschema-rs decides whether a value is valid (`compiled_schema`), and most are: this walk is for the others, and for
values that have to be completed. Each pair of a part of the schema and a container of the value is looked at once, so
its work is linear in the value, whatever unions and references a schema has.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, TypeVar

from toolcell.calls.compiled_schema import (
    compile_schema,
    equality_key,
    equality_keys,
    flat_schema,
    is_multiple,
    is_unique,
    large_from,
)
from toolcell.calls.options import Coercion, Extras
from toolcell.calls.schema import OF_RESULTS, closed_properties, is_base64, pointed
from toolcell.calls.values import (
    MAX_DEPTH,
    MAX_INTEGER,
    MAX_MESSAGE_CHARS,
    MAX_PROBLEMS,
    MIN_INTEGER,
    BadValue,
    Change,
    Copied,
    Path,
    ValueProblem,
    bounded_json,
    count_values,
    is_large,
    path_text,
    quoted,
)
from toolcell.errors import RegistrationError
from toolcell.support.checks import did_you_mean
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.tables import TABLES

MAX_REFERENCES: Final = 16
"""Parts of a schema that speak about the same value, one leading to the next; a longer chain may be a circle."""
STEPS_PER_NODE: Final = 50
"""Values that are looked at for each value received, before the rest is left as it is. Most schemas take one or two."""
FREE_STEPS: Final = 10_000
MAX_STEPS: Final = 400_000
"""Twice as many as values may be in one set of arguments. They take about a second."""
CHARS_PER_STEP: Final = 64
"""Characters for one step of text that is read as JSON."""
MAX_WARNINGS: Final = 20
MAX_CHANGES: Final = 200
"""Noted of one set of arguments. A change takes a hundred times the memory of the digit that was text."""
MAX_BRANCHES: Final = 8
"""Branches of a union that a message describes."""
BRANCH_PROBLEMS: Final = 3
"""Problems of one branch that a message names."""

Part = Mapping[str, Any]
Container = TypeVar("Container", dict[str, Any], list[Any])
Sentence = Callable[[Any, Any], str]
"""Says what is wrong: from what the schema asks for, and the value."""
Problem = tuple[Path, Sentence, Any, Any]
"""A problem that nobody may ever read: its sentence is made when somebody does."""
Outcome = tuple[Any, int, Sequence[Problem]]
"""A value, how much in it had to be mended, and what is wrong all the same. It is the value itself where nothing was
mended or filled in."""


# What a value has to be, and the sentence for one that is not


def _listed(options: Iterable[Any]) -> str:
    """Return options until the message is full: a schema may have thousands."""
    return bounded_json([*options], MAX_MESSAGE_CHARS, "...")[1:].removesuffix("]")


def _not_among(asked: Sequence[Any], value: Any) -> str:
    near = did_you_mean(value, map(str, asked)) if isinstance(value, str) else ""
    return f"must be one of {_listed(asked)}, not {quoted(value)}{near}"


def _wrong_type(asked: Iterable[str], value: Any) -> str:
    kinds = ("null", "boolean", "string", "number", "array")
    kind = next((each for each in kinds if MATCHES[each](value)), "object")
    shown = f" ({value if kind == 'number' else quoted(value)})" if kind in kinds[1:4] else ""
    return f"must be {' or '.join(sorted(asked))}, not {kind}{shown}"


def _miscounted(keyword: str) -> Sentence:
    return lambda asked, value: f"does not fit {keyword} {quoted(asked)}, and has {len(value)}"


def _unlike(asked: Part, value: Any) -> str:
    keyword = next(iter(asked))
    return f"does not fit {keyword} {quoted(asked[keyword])}"


def _repeated(asked: bool, items: list[Any]) -> str:
    seen, repeated = set[Any](), None
    for item, key in zip(items, equality_keys(items), strict=True):
        if key in seen:
            repeated = item
            break
        seen.add(key)
    return f"has {quoted(repeated)} more than once, and uniqueItems is {quoted(asked)}: send each item once"


def _said(text: str) -> Sentence:
    return lambda asked, value: text.format(asked=quoted(asked), value=quoted(value))


def _unknown(known: Iterable[str], name: str) -> str:
    return f"unknown property {quoted(name)}{did_you_mean(name, known)}"


_missing = _said("missing required property {asked}")
_nothing_fits = _said("is not allowed here")
_bytes = _said(
    "is bytes, and its schema asks for {asked}; send text such as data.decode() or base64.b64encode(data).decode()"
)
_not_base64: Sentence = lambda asked, value: f"is not base64, in which bytes are written ({asked})"  # noqa: E731
_unfit = _said("does not fit its schema")
_no_form = _said("fits none of the allowed forms")
_misnamed: Sentence = lambda asked, name: f"property name {quoted(name)} {_described(asked).message}"  # noqa: E731
_forms_too_many: Sentence = lambda asked, value: f"fits {asked} of the allowed forms, and must fit exactly one"  # noqa: E731


def _among(asked: Sequence[Any]) -> Callable[[Any], bool]:
    keys = frozenset(map(equality_key, asked))
    return lambda value: equality_key(value) in keys


def _matching(pattern: str) -> Callable[[Any], bool]:
    try:
        return compile_schema({"pattern": pattern}).is_valid
    except RegistrationError:
        return lambda value: False


_ANY: Final = (str, int, float, bool, type(None), dict, list)
_NUMBER: Final = (int, float)


def _than(compare: Callable[[Any, Any], bool], size: Callable[[Any], Any] = lambda value: value) -> Any:
    return lambda asked: lambda value: compare(size(value), asked)


CHECKS: Final[Mapping[str, tuple[tuple[type, ...], Callable[[Any], Callable[[Any], bool]], Sentence]]] = {
    "enum": (_ANY, _among, _not_among),
    "const": (_ANY, lambda asked: _among([asked]), _said("must be {asked}, not {value}")),
    "minimum": (_NUMBER, _than(operator.ge), _said("{value} is less than the minimum of {asked}")),
    "maximum": (_NUMBER, _than(operator.le), _said("{value} is greater than the maximum of {asked}")),
    "exclusiveMinimum": (_NUMBER, _than(operator.gt), _said("{value} must be greater than {asked}")),
    "exclusiveMaximum": (_NUMBER, _than(operator.lt), _said("{value} must be less than {asked}")),
    "multipleOf": (_NUMBER, is_multiple, _said("{value} is not a multiple of {asked}")),
    "minLength": ((str,), _than(operator.ge, len), _said("{value} is shorter than {asked} characters")),
    "maxLength": ((str,), _than(operator.le, len), _said("{value} is longer than {asked} characters")),
    "pattern": ((str,), _matching, _said("{value} does not match {asked}")),
    "minItems": ((list,), _than(operator.ge, len), _miscounted("minItems")),
    "maxItems": ((list,), _than(operator.le, len), _miscounted("maxItems")),
    "uniqueItems": (
        (list,),
        lambda asked: is_unique if asked else lambda value: True,
        _repeated,
    ),
    "minProperties": ((dict,), _than(operator.ge, len), _miscounted("minProperties")),
    "maxProperties": ((dict,), _than(operator.le, len), _miscounted("maxProperties")),
}
"""For each keyword: the types that it speaks of, what decides, and what is said of a value that does not fit."""


# The common mistakes in a model's arguments: for each type, what is taken for a value of it

_NUMERAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_MAX_NUMBER_CHARS = 400
_MAX_INTEGER_DIGITS = 19

MISSING = object()


def as_number(value: Any, lenient: bool) -> Any:
    """A numeric string, or a boolean; null only when lenient."""
    is_fraction = isinstance(value, str) and not value.lstrip("+-").isdigit()
    if is_fraction and len(value) <= _MAX_NUMBER_CHARS and _NUMERAL.fullmatch(value):
        number = float(value)
        return number if math.isfinite(number) else MISSING
    return as_integer(value, lenient)


def as_integer(value: Any, lenient: bool) -> Any:
    """The same as a number, but whole: "3.0" and 3.0 and "1e3" are, "3.7" is not."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return _whole(Decimal(value)) if value.is_integer() else MISSING
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_CHARS and _NUMERAL.fullmatch(value):
        return _whole(Decimal(value))
    return 0 if lenient and value is None else MISSING


def _whole(number: Decimal) -> Any:
    # "1e9999" must not become an integer of ten thousand digits
    if number and number.adjusted() >= _MAX_INTEGER_DIGITS:
        return MISSING
    if number != number.to_integral_value() or not MIN_INTEGER <= number <= MAX_INTEGER:
        return MISSING
    return int(number)


def as_boolean(value: Any, lenient: bool) -> Any:
    """Exactly "true" and "false", as JSON and Python write them, 1 and 0."""
    if value in ("true", "True") or (type(value) in (int, float) and value == 1):
        return True
    if value in ("false", "False") or (type(value) in (int, float) and value == 0):
        return False
    return False if lenient and value is None else MISSING


def as_string(value: Any, lenient: bool) -> Any:
    """A number in decimal without exponent, or a boolean."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    return "" if lenient and value is None else MISSING


CONVERSIONS: Mapping[str, Callable[[Any, bool], Any]] = {
    "number": as_number,
    "integer": as_integer,
    "boolean": as_boolean,
    "string": as_string,
    # An empty string, zero or false.
    "null": lambda value, lenient: None if type(value) in (str, int, float, bool) and not value else MISSING,
}

DECODED: Mapping[str, type] = {"object": dict, "array": list}
"""Types that text is decoded for, when it is JSON."""

MATCHES: Mapping[str, Callable[[Any], bool]] = {
    "number": lambda value: type(value) in (int, float),
    "integer": lambda value: type(value) is int,
    "boolean": lambda value: type(value) is bool,
    "string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}


# A schema


class Node:
    """One part of a schema, read once."""

    def __init__(self, part: Part) -> None:
        kinds = part.get("type")
        self.kinds: tuple[str, ...] = (kinds,) if isinstance(kinds, str) else tuple(kinds or ())
        self.checks: dict[type, list[tuple[Callable[[Any], bool], Sentence, Any]]] = {}
        for keyword in part.keys() & CHECKS.keys():
            types, make, sentence = CHECKS[keyword]
            if keyword.startswith("exclusive") and isinstance(part[keyword], bool):
                continue  # as draft 4 wrote it
            check = make(part[keyword]), sentence, part[keyword]
            for each in types:
                self.checks.setdefault(each, []).append(check)
        self.unions = [(keyword, part[keyword]) for keyword in ("anyOf", "oneOf") if keyword in part]
        self.same = [*part.get("allOf", ()), *([{"$ref": part["$ref"]}] if "$ref" in part else ())]
        self.conditions = {keyword: part[keyword] for keyword in _CONDITIONS if keyword in part}
        self.part = part
        self.properties: Part = part.get("properties") or {}
        self.patterns = [(_matching(pattern), below) for pattern, below in part.get("patternProperties", {}).items()]
        is_alone = not (self.unions or self.same or self.conditions)
        others = part.get("unevaluatedProperties", True) if is_alone else True
        self.extra = part.get("additionalProperties", others)
        self.closed = closed_properties(part)
        self.required: Sequence[str] = part.get("required") or ()
        each, first = part.get("items", True), part.get("prefixItems", ())
        if isinstance(each, list):
            each, first = part.get("additionalItems", True), each
        self.each, self.first = each, first
        self.is_base64 = is_base64(part)
        self.is_bytes = "contentEncoding" in part and part.get("format") not in ("base64", "base64url")
        """The type is `bytes`: others of Python take the base64 text itself."""
        self.says_text = "string" in self.kinds or not _TEXT_RULES.isdisjoint(part)
        self.is_leaf = is_alone
        self.is_scalar = not {"object", "array"} & {*self.kinds}
        self.defaults: tuple[str, ...] | None = None
        self.needed = frozenset(self.required)
        fitting = {kind for name, kind in _PLAIN if not self.kinds or name in self.kinds} if is_alone else set()
        self.plain = frozenset() if self.is_base64 else frozenset(fitting - self.checks.keys())
        """Types of which every value fits as it is."""


_PLAIN: Final = (
    ("string", str), ("integer", int), ("number", int), ("number", float), ("boolean", bool), ("null", type(None)),
)  # fmt: skip
_CONDITIONS: Final = ("if", "not", "contains", "dependentSchemas", "dependentRequired", "dependencies", "propertyNames")
_TEXT_RULES: Final = frozenset({"enum", "const", "pattern", "maxLength", "minLength"})
_ANNOTATIONS: Final = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$id", "$schema",
    "$defs", "definitions", "nullable",
})  # fmt: skip


class SchemaParts:
    """One schema, and each part of it as a node. A part is identified by the object that it is inside the schema."""

    def __init__(self, root: Part) -> None:
        self.root = root
        self._nodes: dict[int, Node] = {}

    def node(self, part: Part) -> Node:
        """Return what a part says. References inside the schema are followed; of any other nothing is known here."""
        found = self._nodes.get(id(part))
        if found is None:
            self._nodes[id(part)] = found = self._read(part)
        return found

    def _read(self, part: Any) -> Node:
        for _ in range(MAX_REFERENCES):
            if "$ref" not in part or part.keys() - _ANNOTATIONS != {"$ref"}:
                return Node(part)
            target = str(part["$ref"])
            part = pointed(self.root, target) if target.startswith("#/") or target == "#" else {}
            if not isinstance(part, dict):
                return Node({"not": {}} if part is False else {})
            if (found := self._nodes.get(id(part))) is not None:
                return found
        return Node({})

    def fits(self, part: Any, value: Any) -> bool:
        """Return whether a value fits a part as it is, as far as this walk can tell."""
        return not Walk(self, Copied(FREE_STEPS), "off", "allow", fill=False).problems(part, value)

    def defaults(self, node: Node) -> tuple[str, ...]:
        """Return the properties that have a default that fits. Many schemas of the world have others, such as null for
        text."""
        if node.defaults is None:
            with_one = [
                name for name, below in node.properties.items() if isinstance(below, dict) and "default" in below
            ]
            node.defaults = tuple(
                name for name in with_one if self.fits(node.properties[name], node.properties[name]["default"])
            )
        return node.defaults


# The walk


@frozen
class CheckedArguments:
    """Arguments a tool may be given, what was done to make them fit, and what is wrong all the same."""

    args: dict[str, Any]
    changes: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = ()
    steps: int = 0
    """Values that were looked at, each as often as it was."""
    problems: Sequence[ValueProblem] = ()


class Walk:
    """One walk. Nothing is changed in place, and past a number of steps that is linear in what was received, values are
    left as they are."""

    def __init__(
        self,
        schema: SchemaParts,
        copied: Copied,
        coercion: Coercion,
        extras: Extras,
        *,
        fill: bool = True,
        makes_bytes: bool = False,
    ) -> None:
        """`fill`: in defaults. `makes_bytes`: of base64 text; else bytes become base64 text where it is asked for."""
        self._schema = schema
        self._copied = copied
        self._coercion = coercion
        self._extras = extras
        self._fill = fill
        self._makes_bytes = makes_bytes
        self._added = Copied(copied.nodes, copied.chars)
        """Bounds what is decoded and filled in as the arguments themselves are bounded."""
        self._decoded: dict[tuple[int, Path], tuple[str, Any]] = {}
        """What texts say as JSON, with the texts: while they are held, no others get their ids."""
        self._decoded_chars = 0
        self._steps = 0
        self._inside = 0
        """Parts above that share the value with others: there, nobody knows which properties are extras."""
        self._attempts = 0
        """Those of them that may turn out not to be meant."""
        self._mended = 0
        """Values that had to be mended in this attempt."""
        self._problems: list[Problem] = []
        """What is wrong in this attempt."""
        self.unknown: list[ValueProblem] = []
        """Properties that the schema does not name, where it is silent about others: the first of them."""
        self._unknown_count = 0
        self._dropped: set[tuple[int, str]] = set()
        """All of them: the object that they were in, by its identity, and the name."""
        self._active: set[int] = set()
        """Pairs that are being looked at. A part that refers to itself for the same value adds nothing."""
        self._outcomes: dict[int, Any] = {}
        """Outcomes of containers inside unions, by identity of part and container: what was made of the container, and
        the container; or it alone where it fits as it is, in a tuple where it does not fit. It is kept, so that its
        identity stays its own."""

    @property
    def steps(self) -> int:
        """Values that were looked at, those that text was decoded to included."""
        return self._steps + self._added.nodes + self._decoded_chars // CHARS_PER_STEP

    @property
    def is_exhausted(self) -> bool:
        """True when some values were not looked at."""
        return self._steps > min(FREE_STEPS + STEPS_PER_NODE * self._added.nodes, MAX_STEPS)

    @property
    def no_reason(self) -> ValueProblem:
        """What is said of a value that does not fit when this walk has found nothing wrong."""
        more = ", and is too large for it to say where; send less" if self.is_exhausted else ""
        return ValueProblem((), f"does not fit its schema{more}")

    def arguments(self) -> CheckedArguments:
        """Mend the whole set of arguments.

        Raises:
            BadValue: text that had to be decoded holds something that no argument can be.
        """
        args = self._copied.args
        mended = self._value(self._schema.root, args, ())
        changes = self._changes(args, mended, ())
        noted = [
            Change(path_text(path), before, after) for path, before, after in itertools.islice(changes, MAX_CHANGES)
        ]
        more_changes = sum(1 for _ in changes)
        warnings = [f"{problem.message} was dropped" for problem in self.unknown]
        if self._unknown_count > MAX_WARNINGS:
            warnings.append(f"{self._unknown_count - MAX_WARNINGS} more unknown properties were dropped")
        if more_changes:
            warnings.append(f"{more_changes} more values were mended")
        return CheckedArguments(mended, tuple(noted), tuple(warnings), self.steps, self._described())

    def _changes(self, before: Any, after: Any, path: Path) -> Iterator[tuple[Path, Any, Any]]:
        """Compare what was received with what became of it. Defaults, dropped properties and bytes are no changes."""
        if before is after:
            return
        if isinstance(before, dict) and isinstance(after, dict):
            for name, member in before.items():
                if name in after:
                    yield from self._changes(member, after[name], (*path, name))
                elif (id(before), name) not in self._dropped:
                    yield (*path, name), member, "(omitted)"
        elif isinstance(before, list) and isinstance(after, list):
            for at, (old, new) in enumerate(zip(before, after, strict=True)):
                yield from self._changes(old, new, (*path, at))
        elif not isinstance(before, bytes) and not isinstance(after, bytes):
            yield path, before, after

    def problems(self, part: Any, value: Any) -> list[ValueProblem]:
        """Return what is wrong with a value: at most `MAX_PROBLEMS`, and one more when there are more."""
        self._value(part, value, ())
        return self._described()

    def _described(self) -> list[ValueProblem]:
        return [*map(_described, self._problems)]

    @property
    def _is_full(self) -> bool:
        return len(self._problems) > MAX_PROBLEMS

    def _refuse(self, path: Path, sentence: Sentence, asked: Any = None, value: Any = None) -> None:
        self._problems.append((path, sentence, asked, value))

    def _value(self, part: Any, value: Any, path: Path, depth: int = 0) -> Any:
        """Return a value mended; `depth` counts the parts above that speak about the same value."""
        self._steps += 1
        if part is True or type(value) in TABLES:
            return value
        if not isinstance(part, dict):
            self._refuse(path, _nothing_fits)
            return value
        node = self._schema.node(part)
        if type(value) in node.plain:
            return value
        if node.is_leaf and type(value) is not dict and type(value) is not list and (node.is_scalar or value is None):
            return self._checked(node, value, path, depth)
        key = (id(node) << 64 | id(value)) << 1 | (self._inside > 0)  # a tuple would take three times the memory
        if depth > MAX_REFERENCES or key in self._active or self.is_exhausted or self._is_full:
            return value
        if (known := self._outcomes.get(key)) is not None:
            made, mended, *_ = known if type(known) is tuple else (value, 0)
            self._mended += mended or 0
            if mended is None:
                self._refuse(path, _unfit)
            return made
        mended, problems = self._mended, len(self._problems)
        self._active.add(key)
        try:
            made = self._checked(node, value, path, depth)
        finally:
            self._active.discard(key)
        if self._inside and isinstance(value, dict | list):  # elsewhere nobody asks again
            mended = None if len(self._problems) > problems else self._mended - mended
            self._outcomes[key] = value if made is value and mended == 0 else (made, mended, value)
        return made

    def _attempt(self, part: Any, value: Any, path: Path, depth: int = 0) -> Outcome | None:
        """Return the outcome of a value that may not be meant to be of this type. None: nothing of the type can be."""
        above = self._inside, self._attempts, self._mended, self._problems
        self._inside, self._attempts, self._mended, self._problems = above[0] + 1, above[1] + 1, 0, []
        try:
            return self._value(part, value, path, depth), self._mended, self._problems
        except BadValue:
            return None
        finally:
            self._inside, self._attempts, self._mended, self._problems = above

    def _typed(self, node: Node, value: Any, path: Path) -> Any:
        """Return a value as the type that is asked for; `MISSING` and the only problem where it cannot be made."""
        if type(value) is bytes:
            return self._blob(node, value, path)
        kinds = node.kinds
        if not kinds or any(MATCHES[kind](value) for kind in kinds if kind in MATCHES):
            return value
        is_whole = "integer" in kinds and isinstance(value, float) and value.is_integer()
        for kind in kinds if self._coercion != "off" else ():
            if (converted := self._converted(kind, value, path)) is not MISSING:
                self._mended += 1
                return converted
        if is_whole and self._coercion == "off":
            return value
        if is_whole:
            raise BadValue(ValueProblem(path, "must be an integer of at most 64 bits"))
        self._refuse(path, _wrong_type, kinds, value)
        return MISSING

    def _blob(self, node: Node, value: bytes, path: Path) -> Any:
        if node.is_base64:
            return value if self._makes_bytes and node.is_bytes else base64.b64encode(value).decode("ascii")
        is_text = node.says_text and node.part.get("format") != "binary"
        if is_text or (node.kinds and "string" not in node.kinds):
            self._refuse(path, _bytes, "text" if is_text else "something else")
            return MISSING
        return value

    def _converted(self, kind: str, value: Any, path: Path) -> Any:
        if kind in CONVERSIONS:
            return CONVERSIONS[kind](value, self._coercion == "lenient")
        if kind not in DECODED or not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
            return MISSING
        key = id(value), path
        if key not in self._decoded:
            self._decoded_chars += len(value)
            try:
                said = json.loads(value)
            except RecursionError:
                raise BadValue(ValueProblem(path[:4], f"nested deeper than {MAX_DEPTH} levels")) from None
            except ValueError:
                return MISSING
            self._decoded[key] = value, self._added.copy(said, path)
        decoded = self._decoded[key][1]
        return decoded if isinstance(decoded, DECODED[kind]) else MISSING

    def _checked(self, node: Node, value: Any, path: Path, depth: int) -> Any:
        if (made := self._typed(node, value, path)) is MISSING:
            return value
        value = made
        self._inside += 1
        for keyword, branches in node.unions:
            value = self._union(keyword, branches, value, path, depth)
        for part in node.same:
            value = self._value(part, value, path, depth + 1)
        self._inside -= 1
        if isinstance(value, dict):
            value = self._members(node, value, path)
        elif isinstance(value, list):
            value = self._items(node, value, path)
        if not self._is_full:
            for fits, sentence, asked in node.checks.get(type(value), ()):
                if not fits(value):
                    self._refuse(path, sentence, asked, value)
            self._inside += 1
            for keyword, part in node.conditions.items():
                value = self._condition(keyword, part, node, value, path, depth + 1)
            self._inside -= 1
        if self._makes_bytes and node.is_bytes and type(value) is str:
            try:
                digits = value.translate(_URL_SAFE)
                value = base64.b64decode(digits + "=" * (-len(digits) % 4), validate=True)
            except (binascii.Error, ValueError) as exc:
                self._refuse(path, _not_base64, exc)
        return value

    def _union(self, keyword: str, branches: Sequence[Any], value: Any, path: Path, depth: int) -> Any:
        """The first branch that fits as it is, else the first that fits when it is mended."""
        outcomes = dict[int, Outcome]()
        fitting: list[int] = []
        above = self._inside, self._attempts, self._mended, self._problems
        for at in sorted(range(len(branches)), key=lambda at: not self._may_fit(branches[at], value)):
            self._attempts, self._mended, self._problems = above[1] + 1, 0, []  # an attempt, one frame less deep
            try:
                outcomes[at] = self._value(branches[at], value, path, depth + 1), self._mended, self._problems
            except BadValue:
                continue
            finally:
                self._inside, self._attempts, self._mended, self._problems = above
            if _fits(outcomes[at]):
                fitting.append(at)
                if keyword == "anyOf":
                    break
        if len(fitting) > 1:
            self._refuse(path, _forms_too_many, len(fitting))
        elif chosen := fitting or [at for at in sorted(outcomes) if not outcomes[at][2]]:
            value, mended, _ = outcomes[chosen[0]]
            self._mended += mended
        elif self._attempts:
            self._refuse(path, _no_form)
        else:
            shown = [[*outcomes[at][2][:BRANCH_PROBLEMS]] for at in sorted(outcomes)[:MAX_BRANCHES]]
            self._refuse(path, _forms, (shown, len(branches), len(path)))
        return value

    def _may_fit(self, branch: Any, value: Any) -> bool:
        """Return whether a branch is about values of this type, before any is made of text."""
        if not isinstance(branch, dict):
            return branch is True
        kinds = self._schema.node(branch).kinds
        return not kinds or type(value) is bytes or any(MATCHES[kind](value) for kind in kinds if kind in MATCHES)

    def _members(self, node: Node, members: dict[str, Any], path: Path) -> dict[str, Any]:
        closed = None if self._inside or self._extras == "allow" else node.closed
        defaults = self._schema.defaults(node) if self._fill and node.properties else ()
        given = self._by_names_of_arguments(node.part, members) if OF_RESULTS in node.part else members
        for name in node.required:
            if name not in given and name not in defaults and not self._is_full:
                self._refuse(path, _missing, name)
        mended: dict[str, Any] = {}
        for name, member in given.items():
            if closed is not None and name not in closed:
                self._dropped.add((id(members), name))
                self._take_unknown(path, name, (each for each in closed if each not in members))
                continue
            parts = [node.properties[name]] if name in node.properties else []
            if member is None and name not in node.needed and parts and self._means_omitted(parts[0]):
                self._mended += 1
                continue
            parts += [below for matches, below in node.patterns if matches(name)]
            if not parts and node.extra is False:
                self._refuse(path, _unknown, [*node.properties], name)
            for below in parts or (() if isinstance(node.extra, bool) else (node.extra,)):
                member = self._value(below, member, (*path, name))
            if self._is_full:
                return members
            mended[name] = member
        for name in defaults:
            if name not in mended:
                default = node.properties[name]["default"]
                is_container = isinstance(default, dict | list)
                mended[name] = self._added.copy(default, (*path, name)) if is_container else default
        return _unless_same(members, mended)

    def _by_names_of_arguments(self, part: Part, members: dict[str, Any]) -> dict[str, Any]:
        """Take out what only results of the type have; what has another name there gets its own."""
        others, given = part[OF_RESULTS], dict(members)
        for other in others if isinstance(others, list) else ():
            match other:
                case [str(of_result), name] if of_result in given:
                    value = given.pop(of_result)
                    self._mended += 1
                    if isinstance(name, str):
                        given.setdefault(name, value)
        return given

    def _take_unknown(self, path: Path, name: str, absent: Iterable[str]) -> None:
        self._unknown_count += 1
        if len(self.unknown) < MAX_WARNINGS:
            shown = path_text((*path, name))
            self.unknown.append(ValueProblem(path, f"unknown property {shown!r}{did_you_mean(name, absent)}"))

    def _means_omitted(self, part: Any) -> bool:
        """Null for an optional property that cannot be null stands for leaving it out."""
        return self._coercion == "safe" and isinstance(part, Mapping) and not _fits(self._attempt(part, None, ()))

    def _items(self, node: Node, items: list[Any], path: Path) -> list[Any]:
        if node.each is True and not node.first:
            return items
        mended: list[Any] = []
        for index, item in enumerate(items):
            below = node.first[index] if index < len(node.first) else node.each
            mended.append(self._value(below, item, (*path, index)))
            if self._is_full:
                return items
        return _unless_same(items, mended)

    def _condition(self, keyword: str, asked: Any, node: Node, value: Any, path: Path, depth: int) -> Any:
        """Rules that hold a schema, or that depend on what the value is."""
        match keyword, value:
            case "if", _:
                chosen = node.part.get("then" if _fits(self._attempt(asked, value, path, depth)) else "else", True)
                return self._value(chosen, value, path, depth)
            case "not", _ if _fits(self._attempt(asked, value, path, depth)):
                self._refuse(path, _unlike, {"not": asked}, value)
            case "contains", list():
                count = sum(_fits(self._attempt(asked, item, (*path, at))) for at, item in enumerate(value))
                if not node.part.get("minContains", 1) <= count <= node.part.get("maxContains", count):
                    self._refuse(path, _unlike, {"contains": asked}, value)
            case "propertyNames", dict():
                for name in value:
                    if not self._is_full and (problems := self._problems_of_name(asked, name)):
                        self._refuse(path, _misnamed, problems[0], name)
            case "dependentSchemas" | "dependentRequired" | "dependencies", dict():
                for name, below in asked.items():
                    if name in value and isinstance(below, list):
                        self._problems += [(path, _missing, each, None) for each in below if each not in value]
                    elif name in value:
                        value = self._value(below, value, path, depth)
        return value

    def _problems_of_name(self, part: Any, name: str) -> list[Problem]:
        """Unlike an attempt, it is meant to fit: the problems are whole, and a name that is too deep is refused."""
        above = self._mended, self._problems
        self._problems = []
        self._value(part, name, ())
        problems = self._problems
        self._mended, self._problems = above
        return problems


def _fits(outcome: Outcome | None) -> bool:
    return outcome is not None and not outcome[1] and not outcome[2]


def _described(problem: Problem) -> ValueProblem:
    path, sentence, asked, value = problem
    return ValueProblem(path, sentence(asked, value)[:MAX_MESSAGE_CHARS])


def _forms(asked: tuple[list[list[Problem]], int, int], value: Any) -> str:
    """Name what is wrong with each branch of a union, with paths from the value on."""
    branches, count, above = asked
    shown = []
    for problems in branches:
        each = [ValueProblem(problem.path[above:], problem.message) for problem in map(_described, problems)]
        shown.append(" and ".join((str(one) if one.path else one.message)[:200] for one in each))
    return f"fits none of the allowed forms: {'; or '.join(shown)}{'; ...' if count > len(shown) else ''}"


def _unless_same(before: Container, after: Container) -> Container:
    """`before` where mending changed nothing, so that what was found out about it stays known."""
    if len(before) != len(after):
        return after
    if isinstance(before, dict):
        is_same = all(name in before and before[name] is value for name, value in after.items())
    else:
        is_same = all(old is new for old, new in zip(before, after, strict=True))
    return before if is_same else after


_URL_SAFE: Final = str.maketrans("-_", "+/", " \t\r\n=")


class ValueCheck:
    """Checks values against one schema."""

    def __init__(self, schema: Part) -> None:
        """Compile the schema.

        Raises:
            RegistrationError: it cannot be used.
        """
        self._parts = SchemaParts(schema)
        self._is_valid = compile_schema(schema).is_valid
        self._large_from = large_from(schema)

    def fits_here(self, value: Any) -> bool:
        """Return whether a check of the value takes a few milliseconds at most, if the schema is not hostile."""
        return not is_large(value, self._large_from)

    def problem(self, value: Any) -> ValueProblem | None:
        """Return what is wrong first; None when the value fits."""
        try:
            if self._is_valid(value):
                return None
        except (ValueError, RecursionError, OverflowError) as exc:
            return ValueProblem((), f"cannot be checked: {type(exc).__name__}")
        walk = Walk(self._parts, Copied(count_values(value, MAX_STEPS)), "off", "allow", fill=False)
        return next(iter(walk.problems(self._parts.root, value)), None) or walk.no_reason


@lru_cache(128)
def check_of(schema: str, is_foreign: bool = False) -> ValueCheck | None:
    """Return what checks values of a type here, given as JSON text; compiled once for as long as it is asked for.

    `is_foreign`: a stranger wrote it. Then only what is flat in it is used, and a checker process has the last word on
    what does not fit. None: nothing is flat.

    Raises:
        RegistrationError: it cannot be used, and no stranger wrote it.
    """
    if not is_foreign:
        return ValueCheck(json.loads(schema))
    try:
        return ValueCheck(flat) if (flat := flat_schema(json.loads(schema))) else None
    except RegistrationError:
        return None
