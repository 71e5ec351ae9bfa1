"""How much work a JSON Schema makes: how often a validator may visit one value, with every reference followed.

A schema of 3 KB whose definitions name each other twice on each of 28 levels makes 2**28 visits. So schemas are weighed
before they are compiled, and a check is refused whose weight times the size of its value is too much.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from toolcell.errors import RegistrationError
from toolcell.tools.schema_patterns import (
    MATCH_WORK,
    MAX_CHARS,
    has_patterns,
    max_chars,
    names_matched,
    patterns_in,
    visits_of,
)

MAX_WEIGHT: Final = 10_000
"""Visits of one value. Each takes about 0.1 microseconds."""
MAX_RECURSIVE_WEIGHT: Final = 1_000
"""The same for a schema that contains itself: the validator also remembers what it has seen, and that costs more."""
MAX_CHECK_WORK: Final = 5_000_000
"""Visits of one check; about half a second, in which the event loop waits."""
_NOT_ODD: Final = 100_000
"""Visits of texts that need no closer look."""
WORK_PER_STEP: Final = 64
"""Visits that count as one value that was looked at. Schemas that are not odd cost nothing more."""
MAX_PARTS: Final = 200_000
MAX_LEVELS: Final = 200
"""Most levels of dicts and lists in a schema. Whoever reads it calls itself for each of them."""
_MAX_DEPTH: Final = 400

VISITS_AGAIN: Final = 8
"""Visits of a value for each level of lists that it is read for once more."""
FREE_LEVELS: Final = 4

_COSTLY_PATTERN = re.compile(r"\(\?[=!<]|\\[1-9k]")
_COSTLY: Final = 1_000
"""Work of a pattern with lookaround or backreferences: it may take `BACKTRACK_LIMIT` steps."""
_COSTING: Final = ("enum", "pattern", "patternProperties", "multipleOf")
_UNIQUE: Final = 16
_MULTIPLE: Final = 20
"""Visits for one number. Source: a float of 309 digits takes 2.2 microseconds."""

_SAME_VALUE: Final = ("not", "if", "then", "else")
_SAME_VALUE_LISTS: Final = ("allOf", "anyOf", "oneOf")
_SAME_VALUE_MAPS: Final = ("dependentSchemas", "dependencies")
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_SEEN_AGAIN: Final = ("unevaluatedProperties", "unevaluatedItems")
_OTHER_PROPERTIES: Final = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_OTHER_ITEMS: Final = ("items", "additionalItems", "unevaluatedItems", "contains")
_LEADING_ON: Final = frozenset({
    *_SAME_VALUE, *_SAME_VALUE_LISTS, *_SAME_VALUE_MAPS, *_REFERENCES, *_SEEN_AGAIN, *_OTHER_PROPERTIES, *_OTHER_ITEMS,
    "properties", "patternProperties", "prefixItems", "uniqueItems",
})  # fmt: skip
"""A part without one of these costs only what it does by itself."""
_META: Final = re.compile(r"https?://json-schema\.org/.*")
_META_WEIGHT: Final = 200


class SchemaWork:
    """The weight of one schema."""

    def __init__(self, schema: Any) -> None:
        """Weigh a schema.

        Raises:
            RegistrationError: it is too heavy or too deep.
        """
        self.lost = ""
        """A reference that leads nowhere. What a validator makes of it is not weighed, so it must not be used."""
        self._roots, self._anchors = _places(schema)
        self._known: dict[int, float] = {}
        self._inside: set[int] = set()
        """Parts that are weighed now."""
        self._is_recursive = False
        self.weight = int(self._weighed(schema, _own_visits, 1))
        limit = MAX_RECURSIVE_WEIGHT if self._is_recursive else MAX_WEIGHT
        if self.weight > limit:
            kind = "a schema that contains itself" if self._is_recursive else "a schema"
            raise RegistrationError(
                f"invalid schema: with its references followed, one value is checked {_words(self.weight)} times, and "
                f"for {kind} the limit is {limit}; name each definition less often"
            )

        self._has_unique_items = _mentions(schema, "uniqueItems")
        self.has_patterns = is_patterned = has_patterns(schema)
        self._text_visits = self._weighed(schema, _own_text_visits, 0) if is_patterned else 0.0
        """Work of one text, whatever its length."""
        self.char_visits = self._weighed(schema, _own_char_visits, 0) if is_patterned else 0.0
        """Work of one character of a text, in addition."""
        self._patterns = self._weighed(schema, _own_patterns, 0) if is_patterned else 0.0
        """That one text is matched with."""
        self._name_chars = min(map(max_chars, _patterns_of_names(schema)), default=MAX_CHARS) if is_patterned else 0
        """Most characters of a name that is matched."""

    def _weighed(self, schema: Any, own: Callable[[Mapping[str, Any]], float], least: int) -> float:
        """Return the sum of what the parts that are about one value cost by themselves. `least`: of any part."""
        self._own, self._least = own, least
        self._known.clear()
        self._inside.clear()
        try:
            return self._visits_of(schema, 0)
        except RecursionError as exc:
            raise RegistrationError("invalid schema: its parts and references are nested too deeply") from exc

    @property
    def each(self) -> int:
        """Visits that one value of the arguments may cost."""
        return max(self.weight, self.weight**3 // 1_000) if self._is_recursive else self.weight

    def of(self, values: int) -> int:
        """Return the visits that checking so many values may take."""
        return values * self.each

    def of_levels(self, value: Any, values: int) -> int:
        """Return the visits for items that hold others, which `uniqueItems` on each level reads again."""
        if not self._has_unique_items:
            return 0
        levels, rest = 0, [value]
        while rest:
            levels += 1
            rest = [
                below
                for each in rest
                for below in (each.values() if isinstance(each, dict) else each)
                if isinstance(below, dict | list | tuple)
            ]
        return VISITS_AGAIN * values * max(0, levels - FREE_LEVELS)

    def of_texts(self, value: Any, values: int, chars: int) -> int:
        """Return the visits that matching the texts of a value may take. `values`, `chars`: how much of both it has."""
        again = self.each / self.weight
        if (most := (values * self._text_visits + chars * self.char_visits) * again) <= _NOT_ODD:
            return int(most)
        longest, visits = self._patterns * MATCH_WORK, 0.0
        for length, is_name in _texts(value):
            if is_name and length > self._name_chars:
                return 2 * MAX_CHECK_WORK
            visits += self._text_visits + min(longest, length * self.char_visits)
        return int(visits * again)

    def _visits_of(self, part: Any, depth: int) -> float:
        """Visits of one value, or of one member of it, whichever are more."""
        if not isinstance(part, dict):
            return self._least
        if (known := self._known.get(id(part))) is not None:
            return known
        if id(part) in self._inside:
            self._is_recursive = True
            return self._least
        if depth > _MAX_DEPTH:
            raise RegistrationError(f"invalid schema: its references are nested deeper than {_MAX_DEPTH} levels")
        if _LEADING_ON.isdisjoint(part):
            self._known[id(part)] = found = self._own(part)
            return found
        self._inside.add(id(part))
        here = sum(self._visits_of(each, depth + 1) for each in _same_value(part))
        for keyword in _REFERENCES:
            if isinstance(reference := part.get(keyword), str):
                here += self._of_reference(reference, depth + 1)
        if not part.keys().isdisjoint(_SEEN_AGAIN):
            here *= 2  # what other keywords have seen is found out once more
        self._known[id(part)] = found = min(self._own(part) + here + self._members(part, depth + 1), MAX_WEIGHT**2)
        self._inside.discard(id(part))
        return found

    def _of_reference(self, reference: str, depth: int) -> float:
        """The weight of the heaviest part that a reference may mean, whatever the base of its URI is."""
        place, _, fragment = reference.partition("#")
        if _META.fullmatch(place):
            return _META_WEIGHT
        fragment = unquote(fragment)
        if not fragment:
            found: list[Any] = self._roots
        elif fragment.startswith("/"):
            found = [part for root in self._roots if (part := _at(root, fragment)) is not None]
        else:
            found = self._anchors.get(fragment, [])
        if not found:
            self.lost = reference
            return self._least
        return max(self._visits_of(each, depth) for each in found)

    def _members(self, part: Mapping[str, Any], depth: int) -> float:
        of_object = self._most(_values(part.get("properties")), depth)
        of_object += sum(self._visits_of(each, depth) for each in _values(part.get("patternProperties")))
        of_object += sum(self._visits_of(part[key], depth) for key in _OTHER_PROPERTIES if key in part)
        first = [each for key in ("prefixItems", "items") if isinstance(part.get(key), list) for each in part[key]]
        of_list = self._most(first, depth) + sum(
            self._visits_of(part[key], depth) for key in _OTHER_ITEMS if isinstance(part.get(key), dict)
        )
        if part.get("uniqueItems") is True:
            of_list += _UNIQUE
        return max(of_object - self._least, of_list - self._least, 0)

    def _most(self, parts: Iterable[Any], depth: int) -> float:
        return max((self._visits_of(each, depth) for each in parts), default=0)


def check_levels(schema: Any) -> None:
    """Refuse a schema that is nested too deeply, its references aside.

    Raises:
        RegistrationError: it is.
    """
    level, parts = 0, [schema]
    while parts := [inner for each in parts for inner in _values(each) if isinstance(inner, (dict, list))]:
        level += 1
        if level > MAX_LEVELS:
            raise RegistrationError(f"invalid schema: it is nested deeper than {MAX_LEVELS} levels")


def count_values(value: Any, most: int) -> int:
    """Return how many values a value holds, itself included. Looks at no more than about `most`."""
    count, left = 1, [value]
    while left and count <= most:
        each = left.pop()
        if isinstance(each, dict):
            count += 2 * len(each)
            left += each.values()
        elif isinstance(each, list | tuple):
            count += len(each)
            left += each
    return count


def _mentions(schema: Any, keyword: str) -> bool:
    """Return whether a schema has a keyword, or may have one. It is known not to be nested deeply."""
    if isinstance(schema, dict):
        return bool(schema.get(keyword)) or any(_mentions(each, keyword) for each in schema.values())
    return isinstance(schema, list) and any(_mentions(each, keyword) for each in schema)


def _own_visits(part: Mapping[str, Any]) -> int:
    """Visits for the keywords of a part that are about the value itself."""
    if part.keys().isdisjoint(_COSTING):
        return 1
    options = part.get("enum")
    of_options = 0
    if isinstance(options, list) and not all(type(each) is str for each in options):
        of_options = len(options) // 8
    pattern = part.get("pattern")
    costly = _COSTLY if isinstance(pattern, str) and _COSTLY_PATTERN.search(pattern) else 0
    for each in part.get("patternProperties", ()) if isinstance(part.get("patternProperties"), dict) else ():
        costly += _COSTLY if _COSTLY_PATTERN.search(each) else 1
    return 1 + of_options + costly + (_MULTIPLE if "multipleOf" in part else 0)


def _own_text_visits(part: Mapping[str, Any]) -> float:
    return sum(visits_of(each)[0] for each in patterns_in(part))


def _own_char_visits(part: Mapping[str, Any]) -> float:
    return sum(visits_of(each)[1] for each in patterns_in(part))


def _own_patterns(part: Mapping[str, Any]) -> float:
    return sum(1 for _ in patterns_in(part))


def _patterns_of_names(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from names_matched(part)
    for each in _values(part):
        yield from _patterns_of_names(each)


def _texts(value: Any) -> Iterator[tuple[int, bool]]:
    """Yield the length of each text in a value, and whether it is the name of a member."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield len(each), False
        elif isinstance(each, dict):
            yield from ((len(name), True) for name in each)
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each


def chars_in(value: Any) -> int:
    """Return how many characters the texts of a value have."""
    return sum(length for length, _ in _texts(value))


def _same_value(part: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the parts that are about the same value, references aside."""
    for keyword in _SAME_VALUE:
        if keyword in part:
            yield part[keyword]
    for keyword in _SAME_VALUE_LISTS:
        yield from _values(part.get(keyword))
    for keyword in _SAME_VALUE_MAPS:
        yield from (each for each in _values(part.get(keyword)) if isinstance(each, dict))


def _values(parts: Any) -> Iterable[Any]:
    if isinstance(parts, dict):
        return parts.values()
    return parts if isinstance(parts, list) else ()


def _places(schema: Any) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return the parts that a URI may name, and those that an anchor may name.

    Raises:
        RegistrationError: there are too many parts.
    """
    roots, anchors, left, count = [schema], dict[str, list[Any]](), [schema], 0
    while left:
        part = left.pop()
        count += 1
        if count > MAX_PARTS:
            raise RegistrationError(f"invalid schema: it has more than {MAX_PARTS} parts")
        if isinstance(part, dict):
            for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
                if isinstance(name := part.get(keyword), str):
                    anchors.setdefault(name.rpartition("#")[2], []).append(part)
                    if keyword in ("$id", "id") and part is not schema:
                        roots.append(part)
        left += [each for each in _values(part) if isinstance(each, (dict, list))]
    return roots, anchors


def _at(root: Any, pointer: str) -> Any:
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict):
            root = root.get(key)
        elif isinstance(root, list) and key.isdecimal() and len(key) < 8 and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


def _words(weight: int) -> str:
    return "countless" if weight >= MAX_WEIGHT**2 else str(weight)
