"""Bytes in arguments: JSON has none, so a schema describes them as base64 text, and a script sends them as they are.

A tool that declares `bytes` gets bytes from everybody. A schema that is written by hand gets what it asks for: base64
text for `"contentEncoding": "base64"`, bytes where it says nothing about the type, and nothing else.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from toolcell.calls.problems import MAX_REFERENCES, Part, Subschemas
from toolcell.calls.schema import dicts_in
from toolcell.calls.values import Path, ValueProblem, path_text
from toolcell_bridge.wire.frozen import frozen

BASE64: Mapping[str, str] = {"type": "string", "contentEncoding": "base64"}
"""The schema of `bytes`."""

_FORMATS = frozenset({"byte", "base64", "base64url"})
"""What other schemas write for base64 text."""

_WRONG = "is bytes, and its schema asks for {}; send text such as data.decode() or base64.b64encode(data).decode()"
_URL_SAFE = str.maketrans("-_", "+/", " \t\r\n=")


class Parts:
    """Finds the parts of a schema that speak about a value: once for each pair of a branch and a container.

    For one set of arguments, which must not change meanwhile.
    """

    def __init__(self, schemas: Subschemas) -> None:
        self._schemas = schemas
        self._fitting: dict[tuple[int, int], bool] = {}
        self.steps = 0
        """Values that were looked at."""

    def at(self, part: Any, value: Any, path: Path) -> list[Part]:
        """Return the parts that speak about the value at `path`, each once: two branches often lead to the same part,
        and so the ways to it double with each level."""
        found = [*self.about(part, value)]
        for step in path:
            value = value[step]
            below = {id(each): each for one in found if (each := member(one, step)) is not None}
            about = {id(each): each for one in below.values() for each in self.about(one, value)}
            found = [*about.values()]
        return found

    def about(self, part: Any, value: Any, references: int = 0) -> Iterator[Part]:
        """Iterate over the parts that speak about the same value: this one, and the branches that it fits."""
        self.steps += 1
        part = self._schemas.resolved(part)
        if not isinstance(part, Mapping) or references > MAX_REFERENCES:
            return
        yield part
        for keyword in ("anyOf", "oneOf", "allOf"):
            for branch in part.get(keyword) or ():
                if self._fits(branch, value):
                    yield from self.about(branch, value, references + 1)

    def _fits(self, branch: Any, value: Any) -> bool:
        if not isinstance(value, dict | list):
            return self._schemas.is_valid(branch, value)
        key = id(branch), id(value)
        if key not in self._fitting:
            self.steps += len(value)
            self._fitting[key] = self._schemas.is_valid(branch, value)
        return self._fitting[key]


def member(part: Part, step: str | int) -> Any:
    """Return the part for a member of an object or a list; None where there is none."""
    if isinstance(step, str):
        return (part.get("properties") or {}).get(step, part.get("additionalProperties"))
    items, first = part.get("items"), part.get("prefixItems") or ()
    if isinstance(items, list):
        items, first = part.get("additionalItems"), items
    return first[step] if step < len(first) else items


@frozen
class Placed:
    """What became of the bytes in a set of arguments."""

    encoded: Mapping[Path, bytes]
    """Those that stay base64 text, because the schema asks for it."""
    problems: list[ValueProblem]
    steps: int


def place_bytes(schemas: Subschemas, args: dict[str, Any], blobs: Mapping[Path, bytes]) -> Placed:
    """Put bytes back into validated arguments, where they stand as base64 text, or say why they cannot be there."""
    encoded: dict[Path, bytes] = {}
    problems: list[ValueProblem] = []
    raw: list[tuple[Any, str | int, bytes]] = []
    parts = Parts(schemas)
    for path, data in blobs.items():
        holder = _holder(args, path)
        if holder is None:  # dropped, as an unknown property
            continue
        about = parts.at(schemas.root, args, path)
        if not isinstance(holder[path[-1]], str):  # the text looked like a number
            problems.append(ValueProblem(path, _WRONG.format("something else")))
        elif any(map(_is_base64, about)):
            encoded[path] = data
        elif any(map(_says_text, about)):
            problems.append(ValueProblem(path, _WRONG.format("text")))
        else:
            raw.append((holder, path[-1], data))
    for holder, step, data in raw:
        holder[step] = data
    return Placed(encoded, problems, parts.steps)


def mentions_bytes(schema: Any) -> bool:
    """Return true when a value of this schema may be, or hold, what `decoded` makes bytes of."""
    return any("contentEncoding" in part for part in dicts_in(schema))


def decoded(parts: Parts, part: Any, value: Any, path: Path, blobs: Mapping[Path, bytes]) -> Any:
    """Return a valid value with bytes for the base64 text that is declared as `bytes`; `blobs` were bytes before.

    Raises:
        ValueError: a text is not base64.
    """
    if not isinstance(value, str | dict | list):
        return value
    about = [*parts.about(part, value)]
    if isinstance(value, str):
        return _decoded_text(about, value, path, blobs)
    members = value.items() if isinstance(value, dict) else enumerate(value)
    mended = {}
    for key, item in members:
        below = next((each for each in (member(one, key) for one in about) if each is not None), None)
        mended[key] = decoded(parts, below, item, (*path, key), blobs)
    return mended if isinstance(value, dict) else [*mended.values()]


def _decoded_text(about: list[Part], text: str, path: Path, blobs: Mapping[Path, bytes]) -> str | bytes:
    encoded = [each for each in about if each.get("contentEncoding") == "base64"]
    if not encoded:
        return text
    if path in blobs:
        return blobs[path]
    if any(_says_text(each) for each in about if each not in encoded):
        return text
    digits = text.translate(_URL_SAFE)
    try:
        return base64.b64decode(digits + "=" * (-len(digits) % 4), validate=True)
    except (binascii.Error, ValueError) as exc:
        raise ValueError(f"{path_text(path)}: is not base64, in which bytes are written ({exc})") from exc


def _holder(args: Any, path: Path) -> Any:
    """Return the container that `path` ends in; None when it is not there any more."""
    holder = args
    for step in path[:-1]:
        if not _has(holder, step):
            return None
        holder = holder[step]
    return holder if _has(holder, path[-1]) else None


def _has(holder: Any, step: str | int) -> bool:
    if isinstance(holder, dict):
        return step in holder
    return isinstance(holder, list) and isinstance(step, int) and step < len(holder)


def _is_base64(part: Part) -> bool:
    return part.get("contentEncoding") == "base64" or part.get("format") in _FORMATS


def _says_text(part: Part) -> bool:
    """True for a part that text is written for: it names the type, or rules that only text has."""
    kinds = part.get("type")
    is_text = "string" in kinds if isinstance(kinds, list) else kinds == "string"
    is_text = is_text or not {"enum", "const", "pattern", "maxLength", "minLength"}.isdisjoint(part)
    return is_text and part.get("format") != "binary"
