"""How much work the regular expressions of a JSON Schema make: to compile, and for each character that they look at.

jsonschema-rs compiles `\\w{1,900}` to a megabyte, and a schema of 64 KB holds thousands. On a text that keeps many of
its states alive, an expression takes time for each state and character; with lookaround, for each pair of characters.
So the states of a schema are counted before it is compiled, and no text is matched that is too long for its pattern.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from toolcell.errors import RegistrationError
from toolcell_bridge.wire.frozen import frozen

MAX_COMPILE_WORK: Final = 250_000
"""Most work of all patterns of a schema, or of all tools of one stranger: as many simple states, each 0.4
microseconds."""
PATTERN_WORK: Final = 100
"""Work of a pattern, however short it is. Source: one of a letter takes 100 to 180 microseconds, many in one schema."""
MAX_STATES: Final = 1_000_000
"""More are not told apart."""
MATCH_WORK: Final = 900_000
"""Visits (of `schema_work`, 0.1 microseconds each) that matching one text may take. A longer text is refused."""
VISITS_PER_STATE: Final = 0.17
"""For one character. Source: `[ab]*a[ab]{900}[cd]` on random text, 14 to 17 nanoseconds for each state."""
MAX_CHARS: Final = 100_000_000
"""More than any text has."""
_LOOKAROUND_CHARS: Final = 10_000
"""Length of a text whose pattern has one state and lookaround. Source: `(?=[ab])[ab]*a[ab]{n}[cd]` takes a nanosecond
for each state and pair of characters."""

BACKTRACKS = re.compile(r"\(\?<?[=!]|\(\?>|\\[1-9k]|[*+?}]\+")
"""What needs the engine that goes back: lookaround, backreferences, atomic groups."""
_SINGLE = re.compile(
    r"\^(?:\[(?:[^\\\]]|\\.)++\]|\\[dDwWsS]|[^\\\[\](){}*+?|^$])(?:[*+?]|\{\d++,?\d*+\})?\$", re.DOTALL
)
"""One kind of character from beginning to end. However often it is repeated, one state is alive at a time."""
_KIND = r"(?:\[(?:[^\\\[\]]|\\.)+\]|\\[dDwWsSnrt]|\\[pP]\{\w+\}|[^\\\[\](){}*+?|^$])"
"""One character of a kind. A class in a class is not read."""
_COUNTED = re.compile(rf"\^({_KIND}|\((?:\?:)?{_KIND}(?:\|{_KIND})*\))\{{(\d{{1,9}})(,?)(\d{{0,9}})\}}\$", re.DOTALL)
"""So many characters of one kind, and nothing else. The engines write the repetition out."""
_TOKEN = re.compile(
    r"\\[pPux]\{[^}\\]{0,80}\}|\\.|\[\^?\]?(?:\\.|\[:\w{1,20}:\]|[^\\\]])*+(?:\]|\Z)|\{(\d{1,9})(,?)(\d{0,9})\}"
    r"|\(\?(?:P?<\w+>|<?[=!]|>|[A-Za-z-]*[:)])|.",
    re.DOTALL,
)


@frozen
class Counted:
    """A pattern as it is compiled, and how many characters the texts have that it may match."""

    pattern: str
    least: int = 0
    most: int = MAX_CHARS


def counted(pattern: str) -> Counted:
    """Return a pattern whose repetition is counted instead of written out, where it is all that the pattern has."""
    found = _COUNTED.fullmatch(pattern)
    if found is None:
        return Counted(pattern)
    least = int(found[2])
    most = least if not found[3] else int(found[4]) if found[4] else MAX_CHARS
    return Counted(f"^{found[1]}*$", least, most) if least <= most <= MAX_CHARS else Counted(pattern)


def states_of(pattern: str) -> int:
    """Return about how many states a pattern has, once its repetitions are written out."""
    return _counted(pattern, lambda token: 1)


def compile_work(pattern: str) -> int:
    """Return the work of compiling a pattern, in simple states."""
    return PATTERN_WORK + _counted(pattern, _weight)


def _weight(token: str) -> int:
    """Return what a state costs. Source: measured; what stands for most of Unicode becomes many states of bytes."""
    if "\\p" in token or "\\P" in token:
        return 200
    return 25 if token == "." or token.startswith("[^") or _MOST_OF_UNICODE.search(token) else 1


_MOST_OF_UNICODE = re.compile(r"\\[SWD]")


def _counted(pattern: str, weight: Callable[[str], int]) -> int:
    levels, last = [0], 0
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if token[1] is not None:
            most = max(int(token[1]), int(token[3] or 0), 1)
            levels[-1] += last * (most - 1)
            last *= most
        elif text.startswith("(") and not text.endswith(")"):
            levels.append(0)
            last = 0
        elif text == ")" and len(levels) > 1:
            last = levels.pop()
            levels[-1] += last
        elif text not in ("^", "$", "|", "*", "+", "?", ")"):
            last = weight(text)
            levels[-1] += last
        if levels[-1] > MAX_STATES:
            return MAX_STATES
    return max(1, sum(levels))


def reach_of(pattern: str) -> float:
    """Return how many characters a pattern looks at, at most; infinity where a longer text is another matter."""
    if not pattern.startswith("^") or "|" in pattern:
        return math.inf
    tokens = [*_TOKEN.finditer(pattern)]
    if any(token[0] in ("*", "+") or (token[2] and not token[3]) for token in tokens):
        return math.inf
    return states_of(pattern)


def visits_of(pattern: str) -> tuple[float, float]:
    """Return the visits that a text may take, and those that each of its characters may take in addition."""
    if _SINGLE.fullmatch(pattern):
        return 1, 0.01
    if BACKTRACKS.search(pattern):
        return 1, MATCH_WORK / max_chars(pattern)
    per_char = states_of(pattern) * VISITS_PER_STATE
    reach = reach_of(pattern)
    return (1, per_char) if math.isinf(reach) else (1 + reach * per_char / 4, 0.0)


def max_chars(pattern: str) -> int:
    """Return how many characters a text may have that is matched."""
    pattern = counted(pattern).pattern
    if _SINGLE.fullmatch(pattern):
        return MAX_CHARS
    states = states_of(pattern)
    if BACKTRACKS.search(pattern):
        return int(_LOOKAROUND_CHARS / math.sqrt(states))
    return min(MAX_CHARS, int(MATCH_WORK / (states * VISITS_PER_STATE)))


def patterns_in(part: Mapping[str, Any]) -> Iterator[str]:
    """Return the patterns that a part of a schema has of its own, as they are compiled."""
    if isinstance(pattern := part.get("pattern"), str):
        yield counted(pattern).pattern
    yield from names_matched(part)


def names_matched(part: Mapping[str, Any]) -> Iterator[str]:
    """Return the patterns for names of properties."""
    if isinstance(patterns := part.get("patternProperties"), dict):
        yield from (each for each in patterns if isinstance(each, str))


def has_patterns(part: Any) -> bool:
    """Return True if a part of a schema, or a part of it in turn, has a pattern. Most schemas have none."""
    if isinstance(part, dict):
        return "pattern" in part or "patternProperties" in part or any(map(has_patterns, part.values()))
    return isinstance(part, list) and any(map(has_patterns, part))


def patterns_work(schema: Any) -> int:
    """Return the work of compiling all patterns of a schema."""
    work, left = 0, [schema]
    while left and work <= MAX_COMPILE_WORK:
        part = left.pop()
        if isinstance(part, dict):
            if "pattern" in part or "patternProperties" in part:
                work += sum(map(compile_work, patterns_in(part)))
            left += [each for each in part.values() if isinstance(each, (dict, list))]
        elif isinstance(part, list):
            left += [each for each in part if isinstance(each, (dict, list))]
    return work


def check_patterns(schema: Any) -> None:
    """Refuse a schema whose patterns are too large to be compiled.

    Raises:
        RegistrationError: they are.
    """
    if patterns_work(schema) > MAX_COMPILE_WORK:
        raise RegistrationError(
            "invalid schema: with their repetitions written out, its patterns are too large (limit "
            f"{MAX_COMPILE_WORK} states; what stands for most of Unicode counts 25, a property of Unicode 200); repeat "
            "less, or use maxLength"
        )


_VALUES: Final = ("const", "enum", "default", "examples")
"""Keywords that hold values, and no schemas."""
_ANNOTATIONS: Final = ("contentMediaType", "contentEncoding")
"""Keywords that assert nothing: a library would read a text for each."""
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords that hold schemas by names, which may be any."""


def bounded(schema: Any) -> Any:
    """Return a schema that refuses a text that is too long for its pattern. The library looks at `maxLength` first.

    A repetition that is all that a pattern has becomes `minLength` and `maxLength`.
    """
    if isinstance(schema, list):
        return [bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: each for key, each in schema.items() if key not in _ANNOTATIONS or not isinstance(each, str)}
    for key, each in [*made.items()]:
        if key in _NAMED and isinstance(each, dict):
            made[key] = {name: bounded(part) for name, part in each.items()}
        elif key not in _VALUES:
            made[key] = bounded(each)
    if isinstance(pattern := schema.get("pattern"), str):
        how = counted(pattern)
        given, most = made.pop("maxLength", MAX_CHARS), min(how.most, max_chars(pattern))
        made = {"maxLength": min(given, most) if isinstance(given, int | float) else given, **made}
        if how.least and isinstance(least := made.get("minLength", 0), int | float):
            made["minLength"] = max(least, how.least)
        made["pattern"] = how.pattern
    return made
