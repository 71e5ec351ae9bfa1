"""Write any value as strict JSON. Python's own writer writes NaN and Infinity, which no other reader takes."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from toolcell.support.host_work import NUMBERS
from toolcell_bridge.wire.tables import TABLES, Array, Table, from_bytes

_SURROGATE = re.compile("[\ud800-\udfff]")


def json_text(data: object, *, indent: int | None = None, is_ascii: bool = False) -> str:
    """Return one JSON document. What JSON does not have, NaN and infinities included, becomes its `str`.

    `is_ascii`: with an escape for every other character. Without, only for those that no encoding has.
    """
    try:
        text = json.dumps(data, indent=indent, ensure_ascii=is_ascii, default=str, allow_nan=False)
    except (ValueError, TypeError):
        text = json.dumps(_plain(data), indent=indent, ensure_ascii=is_ascii, default=str, allow_nan=False)
    return text if is_ascii else _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _plain(value: Any) -> Any:
    """Return `value` with a text for each number and each key that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {_key(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _key(key: Any) -> Any:
    is_json = key is None or isinstance(key, str | int) or (isinstance(key, float) and math.isfinite(key))
    return key if is_json else str(key)


# Exact: what comes out of `from_exact` is what went into `exact_json_text`


BYTES, FLOAT, TABLE, DICT = "$bytes", "$float", "$table", "$dict"
"""Keys of the objects that stand for what JSON does not have: {"$bytes": base64}, {"$float": "nan"}, {"$table": base64}
of an array or a table; and {"$dict": ...} for a dict that would look like one of them."""
FORMS = frozenset({BYTES, FLOAT, TABLE, DICT})


def exact_json_text(data: object) -> str:
    """Return one JSON document from which plain data with bytes, NaN and infinities can be read again.

    Integers have all their digits. What is not plain data becomes its `str`.
    """
    try:
        text = json.dumps(data, ensure_ascii=False, default=_stand_in, allow_nan=False)
        is_plain = not any(f'"{form}"' in text for form in FORMS)
    except (ValueError, TypeError):
        is_plain, text = False, ""
    if not is_plain:
        text = json.dumps(_exact(data), ensure_ascii=False, default=str, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _stand_in(value: object) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {BYTES: ""}  # the text is written again
    if type(value) in TABLES:
        return {TABLE: ""}
    return dict(value) if isinstance(value, Mapping) else str(value)


def _exact(value: Any) -> Any:
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            return value if math.isfinite(value) else {FLOAT: str(value)}
        case bytes() | bytearray() | memoryview():
            return {BYTES: base64.b64encode(value).decode()}
        case Mapping():
            exact = {each if isinstance(each, str) else str(each): _exact(value[each]) for each in value}
            return {DICT: exact} if len(exact) == 1 and FORMS & exact.keys() else exact
        case list() | tuple():
            return [_exact(each) for each in value]
        case Array() | Table():
            return {TABLE: base64.b64encode(value.to_bytes()).decode()}
    return str(value)


def from_exact(value: Any) -> Any:
    """Return what a parsed document of `exact_json_text` stands for.

    Raises:
        ValueError: a form has the wrong content.
    """
    if isinstance(value, list):
        return [from_exact(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not FORMS & value.keys():
        return {name: from_exact(each) for name, each in value.items()}
    match value:
        case {"$bytes": str(text)}:
            return _decoded(text)
        case {"$table": str(text)}:
            return from_bytes(_decoded(text, TABLE))
        case {"$float": "nan" | "inf" | "-inf" as text}:
            return float(text)
        case {"$dict": dict(members)}:
            return {name: from_exact(each) for name, each in members.items()}
    (name,) = value
    raise ValueError(f"{name} has the wrong content")


def _decoded(text: str, form: str = BYTES) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as exc:
        raise ValueError(f"{form} has no base64: {exc}") from exc


# In pieces: a large document is read and written beside other work, and never holds more than it may

MAX_DEPTH: Final = 200
"""Deepest nesting of a document that is read."""
READ_CHARS: Final = 16_384
"""Characters that are read in one step, at most: a fraction of a millisecond."""
_BLANK: Final = re.compile(r"[ \t\n\r]*+")
_NEXT: Final = re.compile(r"[ \t\n\r]*+([,:\]}])[ \t\n\r]*+")
_ESCAPE: Final = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]|u(?P<half>[dD][89a-fA-F])|.)", re.DOTALL)
"""An escape in a text; `half`: of a character, without the other half."""
_read_step: Final = json.JSONDecoder().raw_decode


def read_json(text: str) -> Any:
    """Return what a JSON document holds. No step of a thread that reads it is long, but for a long text in it.

    Raises:
        ValueError: it is not JSON, or nested deeper than `MAX_DEPTH`.
    """
    reader = _Reader(text)
    value, end = reader.value(_BLANK.match(text).end(), 0)  # type: ignore[union-attr]  # it matches anything
    if (end := _BLANK.match(text, end).end()) != len(text):  # type: ignore[union-attr]
        raise json.JSONDecodeError("Extra data", text, end)
    if "\\ud" in text or "\\uD" in text:
        for escape in _ESCAPE.finditer(text):
            if escape["half"]:
                raise json.JSONDecodeError("Half of a character", text, escape.start())
    return value


class _Reader:
    """Reads small lists and objects in one step, and the elements of large ones one by one."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._window, self._start = text[:READ_CHARS], 0
        self._misses_left = 4 + 4 * len(text) // READ_CHARS
        """Steps that may be in vain, because what they read is not small: all of them together take linear time."""

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """Return the value at a place, and where it ends."""
        first = self._text[at : at + 1]
        if first != "{" and first != "[":
            return _read_step(self._text, at)
        if self._misses_left and (small := self._small(at)) is not None:
            return small
        if depth == MAX_DEPTH:
            raise json.JSONDecodeError(f"Nested deeper than {MAX_DEPTH} levels", self._text, at)
        return self._object(at + 1, depth + 1) if first == "{" else self._list(at + 1, depth + 1)

    def _small(self, at: int) -> tuple[Any, int] | None:
        """Return the list or object at a place if it ends soon."""
        if not 0 <= at - self._start < READ_CHARS // 2:
            self._window, self._start = self._text[at : at + READ_CHARS], at
        try:
            value, end = _read_step(self._window, at - self._start)
        except (ValueError, RecursionError):
            self._misses_left -= 1
            return None
        return value, self._start + end

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        if (end := _NEXT.match(self._text, at)) is not None and end[1] == "]":
            return found, end.end(1)
        at = _BLANK.match(self._text, at).end()  # type: ignore[union-attr]
        while True:
            value, at = self.value(at, depth)
            found.append(value)
            mark, at, end_at = self._next(at, ",]")
            if mark == "]":
                return found, end_at

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        if (end := _NEXT.match(self._text, at)) is not None and end[1] == "}":
            return found, end.end(1)
        at = _BLANK.match(self._text, at).end()  # type: ignore[union-attr]
        while True:
            if self._text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            name, at = _read_step(self._text, at)
            _, at, _ = self._next(at, ":")
            found[name], at = self.value(at, depth)
            mark, at, end_at = self._next(at, ",}")
            if mark == "}":
                return found, end_at

    def _next(self, at: int, wanted: str) -> tuple[str, int, int]:
        """Return the mark that comes next, where the blanks behind it end, and where it ends itself."""
        found = _NEXT.match(self._text, at)
        if found is None or found[1] not in wanted:
            raise json.JSONDecodeError(f"Expecting {' or '.join(map(repr, wanted))}", self._text, at)
        return found[1], found.end(), found.end(1)


SLICE_CHARS: Final = 65_536
"""Characters of a text that are written at once. A run of these letters may be six times as long in JSON."""
SMALL: Final = 16_384
"""Characters, bytes and elements of data that is written at once."""
CHUNK: Final = 256
"""Elements of a list that are looked at together."""


class TooLong(Exception):
    """A document would have more bytes than it may."""


def is_small(data: object, most: int = SMALL) -> bool:
    """Return True if data has at most so many characters, bytes and elements. Looks at no more than that."""
    left, rest = most, [data]
    while rest:
        value = rest.pop()
        left -= 1
        if type(value) in NUMBERS:
            pass
        elif isinstance(value, str | bytes | bytearray):
            left -= len(value)
        elif isinstance(value, Mapping):
            left -= len(value)
            if left >= 0:
                rest += value
                rest += value.values()
        elif isinstance(value, list | tuple):
            left -= len(value)
            if left >= 0:
                rest += value
        elif isinstance(value, Array | Table):
            left -= value.nbytes
        if left < 0:
            return False
    return True


def exact_json_pieces(data: object) -> Iterator[str]:
    """Yield the text of `exact_json_text` piece by piece, so that no step of a thread that writes it is long."""
    match data:
        case _ if is_small(data):
            yield exact_json_text(data)
        case str():
            yield '"'
            for at in range(0, len(data), SLICE_CHARS):
                yield exact_json_text(data[at : at + SLICE_CHARS])[1:-1]
            yield '"'
        case bytes() | bytearray() | memoryview():
            yield f'{{"{BYTES}": "'
            for at in range(0, len(data), 3 * SLICE_CHARS):
                yield base64.b64encode(data[at : at + 3 * SLICE_CHARS]).decode()
            yield '"}'
        case Mapping() if len(data) == 1 and FORMS & data.keys():
            yield f'{{"{DICT}": '
            yield from _object_pieces(data)
            yield "}"
        case Mapping():
            yield from _object_pieces(data)
        case list() | tuple():
            yield from _list_pieces(data)
        case _:
            yield exact_json_text(data)


def _object_pieces(data: Mapping[Any, Any]) -> Iterator[str]:
    before = "{"
    for name, value in {each if isinstance(each, str) else str(each): data[each] for each in data}.items():
        yield before
        yield from exact_json_pieces(name)
        yield ": "
        yield from exact_json_pieces(value)
        before = ", "
    yield "}"


def _list_pieces(data: list[Any] | tuple[Any, ...]) -> Iterator[str]:
    before = "["
    for at in range(0, len(data), CHUNK):
        chunk = data[at : at + CHUNK]
        yield before
        if is_small(chunk):
            yield exact_json_text(list(chunk))[1:-1]
        else:
            for number, value in enumerate(chunk):
                yield ", " if number else ""
                yield from exact_json_pieces(value)
        before = ", "
    yield "]"


def exact_json_bytes(data: object, most: int) -> bytes:
    """Return the document in UTF-8. What is not small belongs into a thread.

    Raises:
        TooLong: it has more bytes than `most`.
    """
    found, size = [], 0
    for piece in exact_json_pieces(data):
        found.append(piece.encode())
        size += len(found[-1])
        if size > most:
            raise TooLong(f"more than {most} bytes of JSON")
    return b"".join(found)


def json_start(data: object, chars: int) -> str:
    """Return the beginning of a document: all of it, or more than so many characters, and a mark."""
    found, size = [], 0
    for piece in exact_json_pieces(data):
        found.append(piece)
        size += len(piece)
        if size > chars:
            return f"{''.join(found)[:chars]} (cut: it has more than {chars} characters)"
    return "".join(found)


def json_size(data: object, most: int) -> int:
    """Return how many bytes a document has; where they are more than `most`, some number above it."""
    size = 0
    for piece in exact_json_pieces(data):
        size += len(piece.encode())
        if size > most:
            break
    return size


LEFT_OUT: Final = "$left_out"
"""Key of the object that stands for data that was too large for an answer: {"$left_out": {"reason": ...}}."""


def left_out(reason: str) -> dict[str, Any]:
    """Return what stands for data that was left out."""
    return {LEFT_OUT: {"reason": reason}}
