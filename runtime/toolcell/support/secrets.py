"""Decide what is a secret in a value, for all who hide some: runs, the audit log, and what servers send back.

A secret is found in every form (`forms_of`) in text and bytes, as a number if it consists of digits, and in every part
of a table. This module writes nothing.
"""

from __future__ import annotations

import base64
import functools
import html
import itertools
import json
import math
import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final
from urllib.parse import quote, quote_plus

from toolcell.errors import UsageError
from toolcell.support.packing import Unrecordable
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.columns import Column
from toolcell_bridge.wire.tables import AnyTable, Array, Table

# The forms of a secret: as it is, escaped, quoted or encoded, as it may stand in a script, an answer or a log.

MIN_BASE64_CHARS: Final = 5
MIN_NUMBER_CHARS: Final = 4
"""Fewer characters would be found in many values."""

LONGEST_FORM: Final = 8
"""Most characters of a form for each byte of a secret: a quotation mark, escaped three times."""

_KEPT_IN_URLS: Final = ("!'()*", "!'()*;,/?:@&=+$#")
"""What JavaScript's `encodeURIComponent` and `encodeURI` leave as it is."""

_NUMBER: Final = re.compile(r"[+-]?(?:\d++(?:\.\d++)?|\.\d++)", re.ASCII)
MOST_FLOAT32: Final = 3.4e38
_BREAK: Final = re.compile(r"\r?\n|\\r\\n|\\n")
_LINE: Final = re.compile(r"[A-Za-z0-9+/]{64}")
"""The end of a line of base64, as mail (76 characters) and PEM (64) have them."""

LINE_CHARS: Final = 64
LINES_OF_BASE64: Final = r"[A-Za-z0-9+/]{64}(?:\r?\n|\\)"
"""Occurs in a text with such lines, and in few others."""

_ESCAPE: Final = re.compile("%[0-9A-F]{2}")


_NAMED: Final = {ord(each): html.escape(each) for each in "&<>"}
_IN_HTML: Final = (
    _NAMED,
    _NAMED | {ord(each): html.escape(each) for each in "\"'"},
    *(
        _NAMED | {ord(each): form.format(ord(each)) for each in letters}
        for letters in ("'", "\"'", "\"'+", "\"'+/", "\"'`=/")
        for form in ("&#{};", "&#x{:x};", "&#x{:X};")
    ),
)
_IN_JSON: Final = (
    {ord("/"): "\\/"},
    *(
        {ord(each): form.format(ord(each)) for each in letters}
        for letters in ("&<>", "&<>'", "&<>'+", "&<>'+/")
        for form in ("\\u{:04x}", "\\u{:04X}")
    ),
)
"""What programs write in place of letters, which differs between them."""


def forms_of(secret: str) -> set[str]:
    """Return the forms of a secret. Those of bytes that are not UTF-8 are read as Latin-1, one character for a byte."""
    raw = secret.encode("utf-8", "surrogatepass")
    texts = {secret, *_escaped(secret), *_by_numbers(secret, raw), *_in_urls(raw), *_in_hex(raw)}
    texts |= {*(secret.replace("\n", between) for between in ("\r\n", " ", "")), *_in_base64(raw)}
    as_bytes = [form.encode("utf-8", "surrogatepass") for form in texts if not form.isascii()]
    as_bytes += [secret.encode(coding, "surrogatepass") for coding in ("utf-16-le", "utf-16-be")]
    return texts.union(form.decode("latin-1") for form in as_bytes)


def _escaped(secret: str) -> Iterator[str]:
    """Yield the secret as HTML, JSON and Python write it, the last two up to three times: errors quote JSON in JSON."""
    in_json = json.dumps(secret)[1:-1]
    once = {secret, in_json, json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1], ascii(secret)[1:-1]}
    twice = {json.dumps(form)[1:-1] for form in once} | {repr(form)[1:-1] for form in once}
    yield from (*once, *twice, *(json.dumps(form)[1:-1] for form in twice))
    yield from (*map(in_json.translate, _IN_JSON), *map(secret.translate, _IN_HTML))


def _by_numbers(secret: str, raw: bytes) -> Iterator[str]:
    """Yield every character as its number, as JSON (of UTF-16), HTML and shells (of bytes) write it."""
    units = secret.encode("utf-16-be", "surrogatepass").hex()
    for digits in (units, units.upper()):
        yield "".join(f"\\u{digits[at : at + 4]}" for at in range(0, len(digits), 4))
    for form in ("&#{};", "&#x{:x};", "&#x{:X};"):
        yield "".join(form.format(ord(each)) for each in secret)
    yield "".join(f"\\{byte:03o}" for byte in raw)


def _in_urls(raw: bytes) -> Iterator[str]:
    everything = "".join(f"%{byte:02X}" for byte in raw)
    forms = {quote(raw), quote(raw, safe=""), quote_plus(raw), everything, quote(quote(raw, safe=""))}
    forms |= {quote(raw, safe=kept) for kept in _KEPT_IN_URLS}
    forms.add(quote_plus(raw, safe="*").replace("~", "%7E"))  # Java, and forms of browsers
    for form in forms:
        yield from (form, _ESCAPE.sub(lambda match: match[0].lower(), form))


def _in_hex(raw: bytes) -> Iterator[str]:
    """Yield the bytes as digits, together or one by one, as dumps and logs write them."""
    for digits in ("{:02x}", "{:02X}"):
        each = [digits.format(byte) for byte in raw]
        yield from (between.join(each) for between in ("", ":", " ", "-", ", ", " 0x", ", 0x", "\\x", "\\\\x"))


def _in_base64(raw: bytes) -> Iterator[str]:
    """Yield what base64 of any data that contains the secret contains, at each of the three alignments.

    Characters at both ends that also depend on what is beside the secret are left out, unless nothing is.
    """
    yield base64.b64encode(raw).decode().rstrip("=")
    yield base64.urlsafe_b64encode(raw).decode().rstrip("=")
    for before in range(3):
        start, end = (before * 8 + 5) // 6, (before + len(raw)) * 8 // 6
        if end - start >= MIN_BASE64_CHARS:
            form = base64.b64encode(bytes(before) + raw).decode()[start:end]
            yield from (form, form.replace("+", "-").replace("/", "_"), form.replace("/", "\\/"))
            yield from (form.replace("+", escaped) for escaped in ("\\u002b", "\\u002B"))


def numbers_of(secret: str) -> set[Decimal | float]:
    """Return the numbers that a secret of digits can become. A short one would be found among many numbers."""
    if _NUMBER.fullmatch(secret) is None:
        return set()
    exact = Decimal(secret)
    found: set[Decimal | float] = {exact, float(exact)}
    if abs(exact) < MOST_FLOAT32:
        found.add(float(struct.unpack("f", struct.pack("f", exact))[0]))
    signed = {sign * number for number in found for sign in (1, -1) if math.isfinite(number)}
    return {number for number in signed if len(f"{Decimal(number).normalize():f}".strip("-")) >= MIN_NUMBER_CHARS}


def has_lines(text: str | bytes) -> bool:
    """Return False for most texts that have no lines of base64, and for none that has some, also inside JSON."""
    if len(text) <= LINE_CHARS:
        return False
    return ("\n" in text or "\\n" in text) if isinstance(text, str) else (b"\n" in text or b"\\n" in text)


def unwrapped(text: str) -> tuple[str, list[int]]:
    """Join lines of base64. Return the text, and in turn its place and its length for each break that is gone."""
    pieces, gone, end, length = list[str](), list[int](), 0, 0
    for found in _BREAK.finditer(text):
        start, stop = found.span()
        if start - end >= LINE_CHARS and _LINE.fullmatch(text, start - LINE_CHARS, start):
            pieces.append(text[end:start])
            length += start - end
            gone += (length, stop - start)
            end = stop
    return ("".join((*pieces, text[end:])), gone) if gone else (text, gone)


# Search encoded data for many literals at once, in a time that hardly depends on the data.

PIECE_BYTES: Final = 64 * 1024

MAX_TOGETHER_BYTES: Final = 64 * 1024
"""Most bytes of literals that one automaton looks for."""


class LiteralSearch:
    """Whether one of many literals occurs in data. Each byte costs about the same, whatever the data is.

    The automaton is that of pydantic's patterns, which are linear in the text. Python's own patterns stop wherever a
    literal may begin, and a text can consist of such places.
    """

    def __init__(self, literals: Iterable[bytes]) -> None:
        self._literals = sorted(set(literals))
        self._overlap = max(map(len, self._literals), default=1) - 1

    def __call__(self, data: bytes) -> bool:
        """True when one of the literals occurs."""
        if len(data) <= PIECE_BYTES:
            text = data.decode("latin-1")
            for occurs in self._automata:  # noqa: SIM110 - each tool call waits for this twice
                if occurs(text):
                    return True
            return False
        return any(
            occurs(piece)
            for start in range(0, len(data), PIECE_BYTES)
            for piece in (data[start : start + PIECE_BYTES + self._overlap].decode("latin-1"),)
            for occurs in self._automata
        )

    @functools.cached_property
    def _automata(self) -> list[Callable[[str], bool]]:
        """Made when they are first needed: most data is small."""
        groups: list[list[str]] = []
        room = 0
        for literal in self._literals:
            if room < len(literal):
                groups.append([])
                room = max(MAX_TOGETHER_BYTES, len(literal))
            groups[-1].append("".join(f"\\x{{{byte:x}}}" for byte in literal))
            room -= len(literal)
        return [automaton("|".join(group)) for group in groups]


@functools.lru_cache(maxsize=32)
def automaton(pattern: str) -> Callable[[str], bool]:
    """Return what says whether a pattern occurs in a text."""
    from pydantic_core import SchemaValidator, core_schema  # only large data needs it

    return SchemaValidator(core_schema.str_schema(pattern=pattern)).isinstance_python


REDACTED: Final = "[redacted]"

MIN_SECRET_CHARS: Final = 4
"""A shorter value would be found in nearly every text."""

LINE_BREAKS: Final = "\r\n"
"""Not looked for around a secret: the last one of a file is often lost."""

MIN_HALF_CHARS: Final = 8
"""So much of a secret is hidden where the rest of it was cut off."""

MAX_ROWS_BYTES: Final = 1 << 22
"""Most bytes of text in the rows that stand for a table with a secret."""

LITERAL_BYTES: Final = 12
"""Bytes of each form that are looked for in all data. Where they occur, the rest of the form is compared."""

LITERAL_WORK: Final = 256
"""What it costs to begin a search for one literal, in bytes."""

DIRECT_WORK: Final = 1 << 18
"""Bytes times literals. Less is searched for each literal by itself: to make an automaton takes longer."""

PIECE_CHARS: Final = 1 << 16
_KEY_CHARS: Final = MIN_SECRET_CHARS


def check_secret(what: str, secret: object) -> str:
    """Return a secret that is to be hidden.

    Raises:
        UsageError: it is not text, or has fewer than `MIN_SECRET_CHARS` characters, without line breaks around it.
    """
    if not isinstance(secret, str):
        raise UsageError(f"{what} must be a str, not {type(secret).__name__}")
    if (size := len(secret.strip(LINE_BREAKS))) < MIN_SECRET_CHARS:
        many = f"at least {MIN_SECRET_CHARS} characters, and has {size}"
        raise UsageError(f"{what} needs {many}: it would be found in nearly every text")
    return str(secret)


def hidden(text: str, mark: str = REDACTED) -> str:
    """Return what stands for a hidden text, on as many lines."""
    return mark + "\n" * text.count("\n")


class SecretSearch:
    """Finds secrets in text, bytes and numbers. Takes time that is linear in the text, however many secrets there are.

    Immutable; made once for the same secrets by `search_for`.
    """

    def __init__(self, marks: Mapping[str, str], *, with_halves: bool = False) -> None:
        """`marks`: for each secret what stands in its place. `with_halves`: find also the first half of a secret, for
        texts that were cut. Where a script sees what is hidden, it could guess a secret by halves.
        """

        self._marks: dict[str, str] = {}
        self.numbers: set[Decimal | float] = set()
        for secret, mark in marks.items():
            bare = secret.strip(LINE_BREAKS)
            self._marks |= {form: mark for form in forms_of(bare) if len(form) >= MIN_SECRET_CHARS}
            self.numbers |= numbers_of(bare)
        self.forms = sorted(self._marks)
        half = (lambda form: form[: max(MIN_HALF_CHARS, (len(form) + 1) // 2)]) if with_halves else str
        self._starts = sorted({half(form) for form in self.forms})
        self._shorter = _longest_prefixes(self._starts)
        self._keys = {start[:_KEY_CHARS] for start in self._starts}
        self.longest = max(map(len, self.forms), default=0)
        starts = {start.encode("utf-8", "surrogatepass") for start in self._starts}
        starts |= {start.encode("latin-1") for start in self._starts if not start.isascii() and max(start) <= "\xff"}
        self._literals = tuple(sorted({start[:LITERAL_BYTES] for start in starts}))
        self._occurs = LiteralSearch(self._literals)

    def __bool__(self) -> bool:
        return bool(self._marks)

    @functools.cached_property
    def reversed_forms(self) -> list[str]:
        """The forms read backwards, from last character to first, sorted as such."""
        return sorted(form[::-1] for form in self.forms)

    def may_be_in(self, data: bytes) -> bool:
        """True when data, or text as UTF-8, holds the beginning of a form. False: it holds no secret."""
        if (len(data) + LITERAL_WORK) * len(self._literals) > DIRECT_WORK:
            return self._occurs(data)
        for literal in self._literals:  # noqa: SIM110 - each tool call waits for this twice
            if literal in data:
                return True
        return False

    def _unwrapped(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield what is to be hidden once lines of base64 are joined, by its places in the text."""

        if not has_lines(text) or (len(text) > PIECE_CHARS and not automaton(LINES_OF_BASE64)(text)):
            return
        joined, gone = unwrapped(text)
        if not gone or not self.may_be_in(joined.encode("utf-8", "surrogatepass")):
            return
        places, before = gone[::2], [0, *itertools.accumulate(gone[1::2])]
        for start, stop, mark in self._found(joined):
            yield start + before[bisect_right(places, start)], stop + before[bisect_left(places, stop)], mark

    def hide(self, text: str) -> tuple[str, int]:
        """Return a text without secrets, and how many were removed."""
        if not self._marks:
            return text, 0
        found = list(self._unwrapped(text))
        if self.may_be_in(text.encode("utf-8", "surrogatepass")):
            found = sorted([*found, *self._found(text)])
        pieces: list[str] = []
        end = 0
        for start, stop, mark in found:
            if start < end:
                end = max(end, stop)
                continue
            pieces += (text[end:start], hidden(text[start:stop], mark))
            end = stop
        return "".join((*pieces, text[end:])), len(pieces) // 2

    def hide_in_bytes(self, data: bytes) -> tuple[bytes, int]:
        """Do the same in bytes."""

        if not self._marks or not (has_lines(data) or self.may_be_in(data)):
            return data, 0
        text, count = self.hide(data.decode("latin-1"))
        if not count:
            return data, 0
        return text.encode("latin-1", "replace"), count

    def _found(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield start, end and mark of what is to be hidden. Secrets that overlap are one."""
        first = end = 0
        mark = ""
        for at in self._candidates(text):
            stop, its_mark = self._match(text, at)
            if stop <= end:
                continue
            if at < end:
                end = stop
                continue
            if end:
                yield first, end, mark
            first, end, mark = at, stop, its_mark
        if end:
            yield first, end, mark

    def _candidates(self, text: str) -> Iterator[int]:
        keys = self._keys
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS + LITERAL_BYTES]
            if self.may_be_in(piece.encode("utf-8", "surrogatepass")):
                stop = min(len(text), start + PIECE_CHARS)
                yield from [at for at in range(start, stop) if text[at : at + _KEY_CHARS] in keys]

    def _match(self, text: str, at: int) -> tuple[int, str]:
        """Return where the longest secret that begins at a place ends, and its mark; 0 if none does."""
        here = text[at : at + self.longest]
        index = bisect_right(self._starts, here) - 1
        while index >= 0 and not here.startswith(self._starts[index]):
            index = self._shorter[index]
        if index < 0:
            return 0, ""
        start = self._starts[index]
        if (mark := self._marks.get(start)) is not None:
            return at + len(start), mark
        place = bisect_right(self.forms, here)
        size, form = max((_common(here, form), form) for form in self.forms[max(0, place - 1) : place + 1])
        return at + max(size, len(start)), self._marks[form]

    def is_number(self, number: complex | Decimal) -> bool:
        """True when a secret of digits is this number."""
        if type(number) is complex:
            return number.real in self.numbers or number.imag in self.numbers
        return number in self.numbers


def _longest_prefixes(sorted_texts: list[str]) -> list[int]:
    """Return for each text the index of the longest other one that it begins with; -1 if there is none."""
    found: list[int] = []
    for index, text in enumerate(sorted_texts):
        above = index - 1
        while above >= 0 and not text.startswith(sorted_texts[above]):
            above = found[above]
        found.append(above)
    return found


def _common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((size for size, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@functools.lru_cache(maxsize=32)
def search_for(secrets: frozenset[str], *, with_halves: bool = False) -> SecretSearch:
    """Return the search for secrets in whose place `REDACTED` stands."""
    return SecretSearch(dict.fromkeys(secrets, REDACTED), with_halves=with_halves)


class SecretWalk:
    """One pass over one value; counts what it removes."""

    def __init__(
        self,
        secrets: SecretSearch,
        *,
        hide_more: Callable[[str], tuple[str, int]] | None = None,
        names_a_secret: Callable[[Any], bool] | None = None,
    ) -> None:
        """`hide_more`: in each text and cell, too. `names_a_secret`: of a key whose value is hidden whatever it is."""
        self._secrets, self._hide_more = secrets, hide_more
        self._names_a_secret = names_a_secret or (lambda key: False)
        self.count = 0

    def value(self, value: Any) -> Any:
        """Return plain data without secrets."""
        match value:
            case str():
                return self.text(value)
            case None | bool():
                return value
            case int() | float() | complex() | Decimal():
                is_secret = self._secrets.is_number(value)
                self.count += is_secret
                return REDACTED if is_secret else value
            case Mapping():
                return {self.value(key): self._entry(key, item) for key, item in value.items()}
            case list() | tuple() | set() | frozenset():
                return [self.value(item) for item in value]
            case bytes() | bytearray() | memoryview():
                return self._bytes(bytes(value))
            case Array() | Table():
                return self._table(value)
            case Unrecordable():
                return Unrecordable(self.text(value.type), self.text(value.text))
        return self._object(value)

    def _object(self, value: Any) -> Any:
        """Return anything else as it is, or what a reader would see of it if a secret is there."""
        before = self.count
        try:
            plain = to_plain(value)
        except (ValueError, TypeError):
            plain = value
        cleaned = self.text(str(value)) if plain is value else self.value(plain)
        return value if self.count == before else cleaned

    def _entry(self, key: Any, item: Any) -> Any:
        if item is not None and type(item) is not bool and self._names_a_secret(key):
            self.count += item != REDACTED
            return REDACTED
        return self.value(item)

    def _bytes(self, data: bytes) -> bytes:
        data, count = self._secrets.hide_in_bytes(data)
        self.count += count
        return data if self._hide_more is None else self.text(data.decode("latin-1")).encode("latin-1", "replace")

    def _table(self, table: AnyTable) -> Any:
        """Return the table, or what stands for it where there are no tables if something is removed from it.

        Rows may have far more text than the table: each has that of its category.
        """
        before = self.count
        if isinstance(table, Table):
            for label in (*table.axis.names, *table.index.names):
                self.value(label)
            for name, column in table.named_columns().items():
                self.value(name)
                self.count += column.length if self._names_a_secret(name) else 0
            levels = table.index.levels if table.index.says_something else ()
            columns: tuple[Column, ...] = (*levels, *table.axis.levels, *table.columns)
        else:
            columns = (table.column,)
        for column in columns:
            self._column(column)
        if self.count == before:
            return table
        self.count = before
        if table.plain_bytes > MAX_ROWS_BYTES:
            self.count += 1
            return f"{self.text(repr(table))}: a secret is in it, so it is not shown"
        rows = self.value(table.plain())
        self.count = max(self.count, before + 1)  # what was found may be in none of the rows
        return rows

    def _column(self, column: Column) -> None:
        """Count what is to be removed from a column: also where values are missing, and in categories without rows."""
        self.text(column.dtype)
        match column.kind:
            case "category" | "list":
                self._column(column.detail[0])
            case "text" | "bytes":  # cells follow one another there with nothing in between
                self.count += self._secrets.hide_in_bytes(bytes(column.data))[1]
                if self._hide_more is not None:
                    self.value(replace(column, valid=None).values())
            case "plain":
                self.value(column.detail)
            case kind if self._secrets.numbers and kind not in ("null", "bool"):
                values = replace(column, valid=None).values()
                if kind == "range" or kind.startswith(("int", "uint", "float")):
                    self.count += not self._secrets.numbers.isdisjoint(values)
                else:
                    self.value(values)

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        text, count = self._secrets.hide(text)
        self.count += count
        if self._hide_more is not None:
            text, count = self._hide_more(text)
            self.count += count
        return text
