"""References of a plan's arguments to the results of other steps: find, read and resolve them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolcell_bridge.guest.placeholder import RESULT_OF

_ID_END = re.compile(r"[.\[]")
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[([0-9]+)\]")


class PlanError(ValueError):
    """The plan as a whole cannot run; no step did."""


def references(value: Any) -> list[str]:
    """Return every "$ref" in arguments, in order."""
    found, left = list[str](), [value]
    while left:
        each = left.pop()
        if is_reference(each):
            found.append(each["$ref"])
        elif isinstance(each, dict | list):
            items = list(each.values()) if isinstance(each, dict) else each
            left += [item for item in reversed(items) if isinstance(item, dict | list)]
    return found


def is_reference(value: Any) -> bool:
    """Shape: {"$ref": "id.path[0]"} and nothing else."""
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get("$ref"), str)


def split_reference(text: str, ids: Mapping[str, int]) -> tuple[str, str]:
    """Shape: ("id", ".path[0]"). The longest id that fits wins, so ids may contain dots."""
    ends = [len(text), *(mark.start() for mark in _ID_END.finditer(text))]
    name = max((text[:end] for end in ends if text[:end] in ids), key=len, default=text[: min(ends)])
    return name, text[len(name) :]


def look_up(value: Any, path: str) -> Any:
    """Return the part of a result that the path of a reference names.

    Raises:
        PlanError: the result has no such part; the message names the last one that exists.
    """
    walked = ""
    for key in path_steps(path):
        step = f"[{key}]" if isinstance(key, int) else f".{key}"
        if isinstance(value, list) and isinstance(key, str) and key.isdecimal():
            key = int(key)
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise PlanError(f"there is no {step!r} in {walked or 'the result'!r} ({_described(value)})") from None
        walked += step
    return value


def path_steps(path: str) -> list[str | int]:
    """Shape: ".a[2]" -> ["a", 2].

    Raises:
        PlanError: it is not a path.
    """
    steps: list[str | int] = []
    position = 0
    while position < len(path):
        step = _PATH_STEP.match(path, position)
        if step is None:
            raise PlanError(f"cannot read path {path!r} at {path[position:]!r}")
        steps.append(int(step[2]) if step[2] is not None else step[1])
        position = step.end()
    return steps


def _described(value: Any) -> str:
    if isinstance(value, Mapping) and [*value] == [RESULT_OF]:
        effect = str(value[RESULT_OF]).partition(".")[0]
        return f"it is the result of {effect}, which a dry run does not know: refer to the whole of it"
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, list(value)[:10])) or 'no keys'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"


def resolve(args: Any, results: Mapping[str, Any]) -> Any:
    """Return arguments with every reference replaced by the value it names. `results` is keyed by step id.

    Raises:
        PlanError: a reference names a part that does not exist.
    """
    if is_reference(args):
        name, path = split_reference(args["$ref"], dict.fromkeys(results, 0))
        try:
            return look_up(results[name], path)
        except PlanError as exc:
            raise PlanError(f"reference {args['$ref']!r}: {exc}") from None
    if isinstance(args, Mapping):
        return {key: resolve(item, results) for key, item in args.items()}
    if isinstance(args, list):
        return [resolve(item, results) for item in args]
    return args
