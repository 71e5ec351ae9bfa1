"""Decide what a record may hold: no secrets, and nothing that is too large.

Secrets are registered values, well-known credentials, and values under sensitive names. Redaction has two steps,
because nearly every record holds no secret: a search of the encoded bytes for a few literals, and only where one is
found a walk over the values. Cutting comes after redaction. This module writes nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final

from toolcell.audit.config import SENSITIVE_NAMES
from toolcell.audit.credentials import CREDENTIALS, REDACTED, RedactionRule, hidden, hide_pattern
from toolcell.audit.literals import PIECE_BYTES, LiteralSearch
from toolcell.audit.spellings import forms_of
from toolcell.errors import UsageError
from toolcell.support.packing import Unrecordable
from toolcell_bridge.wire.columns import TEXTS, Column
from toolcell_bridge.wire.tables import TABLES, AnyTable, Table

MIN_SECRET_CHARS: Final = 4
"""A shorter value would be found in nearly every text."""

SMALL_BYTES: Final = 4096
"""In less, a search for each registered secret by itself takes no time that matters."""

_NUMBER: Final = re.compile(r"[+-]?\d*\.?\d+")

OVERLAP_BYTES: Final = 256
"""Longer than what the quick search of encoded data looks for."""

MIN_HALF_CHARS: Final = 8
"""So much of a registered secret is hidden where the rest of it was cut off."""

MIN_OVERLAP_CHARS: Final = 3
"""The same at the very place where a text was cut."""

MAX_RUN_CHARS: Final = 512
_RUN: Final = f"[A-Za-z0-9_+/=.~%-]{{8,{MAX_RUN_CHARS}}}"
_LAST_RUN: Final = re.compile(rf"{_RUN}\Z")
_FIRST_RUN: Final = re.compile(_RUN)
"""What may be half of a credential."""

_TABLE: Final = re.compile(rb"\xa5(?:array|table)[\xa0-\xbf](?:numpy|pandas|polars|pyarrow)").search
"""Finds a table in encoded data. The texts of its cells follow one another there with nothing in between."""

MAX_ROWS_BYTES: Final = 1 << 22
"""Most bytes of text in the rows that stand for a table."""

MAX_NAME_CHARS: Final = 100
"""A longer key is not a name and is not checked."""

_WORDS: Final = ("passw", "passphrase", "secret", "token", "api", "access", "private", "auth", "cred", "cookie")
"""Each of `SENSITIVE_NAMES` contains one of these, in every spelling."""

_SEPARATORS: Final = re.compile(r"[^A-Za-z]+")


def check_secret(secret: object) -> str:
    """Return a secret that is to be registered.

    Raises:
        UsageError: it is not text, or so short that it would be found in nearly every text.
    """
    if not isinstance(secret, str):
        raise UsageError(f"a registered secret is a str, not {type(secret).__name__}")
    if len(secret) < MIN_SECRET_CHARS:
        raise UsageError(f"a registered secret has at least {MIN_SECRET_CHARS} characters, not {len(secret)}")
    return str(secret)


def _beginning(form: str) -> str:
    """Return what is looked for of a secret: one that was cut off is found by its first half."""
    return form[: max(MIN_HALF_CHARS, (len(form) + 1) // 2)]


def _hide_first_halves(text: str, form: str, start: str) -> tuple[str, int]:
    """Hide the first halves of a secret, whose end was cut off."""
    pieces: list[str] = []
    end = 0
    while (at := text.find(start, end)) >= 0:
        stop = at + len(start)
        while stop < len(text) and stop - at < len(form) and text[stop] == form[stop - at]:
            stop += 1
        pieces += (text[end:at], hidden(text[at:stop]))
        end = stop
    return "".join((*pieces, text[end:])), len(pieces) // 2


def _overlap(text: str, following: str) -> int:
    """Return how many of the last characters of a text are the first of another, if there are enough."""
    most = min(len(text), len(following))
    return next((size for size in range(most, MIN_OVERLAP_CHARS - 1, -1) if text.endswith(following[:size])), 0)


class Redactor:
    """Removes secrets. Immutable; `with_secrets` makes a stricter redactor."""

    def __init__(
        self, secrets: Iterable[str] = (), names: Sequence[str] = SENSITIVE_NAMES, patterns: Sequence[str] = ()
    ) -> None:
        self._secrets = frozenset(map(check_secret, secrets))
        self._names = tuple(_SEPARATORS.sub("", name).lower() for name in names)
        self._custom = tuple(patterns)
        forms = {form for secret in self._secrets for form in forms_of(secret)}
        # A secret inside another goes with it. Each form comes with the beginning of it that is looked for.
        self._hidden = tuple((form, _beginning(form)) for form in sorted(forms, key=len, reverse=True))
        self._needles = tuple({start.encode("utf-8", "surrogatepass"): None for _, start in self._hidden})
        self._holds_needle = LiteralSearch(self._needles)
        self._overlap = OVERLAP_BYTES + max(map(len, self._needles), default=0)
        rules = (*CREDENTIALS, *(hide_pattern("", pattern) for pattern in patterns))
        anchors = {anchor for rule in rules for anchor in rule.anchors}
        self._rules_of = {anchor: [rule for rule in rules if anchor in rule.anchors] for anchor in anchors}
        self._always = tuple(rule for rule in rules if not rule.anchors and rule.occurs is None)
        self._occurring = tuple((rule.occurs, rule) for rule in rules if rule.occurs is not None)
        self._every = rules
        own = {name for name in self._names if not any(word in name for word in _WORDS)}
        self.words = (*_WORDS, *own)
        """Without one of these in its encoded data, a value has no key with a sensitive name."""
        self._anchors = {anchor: anchor.encode() for anchor in sorted(anchors)}
        self._has_anchor = _search_for(tuple(self._anchors.values()))
        self._has_word = _search_for(tuple(sorted(word.encode() for word in self.words)))
        ends = "|".join(re.escape(name) for name in self._names) or "(?!)"
        self._is_key = re.compile(rf"(?:{ends})[^a-z0-9]{{0,4}}[\x80-\xff]".encode()).search
        """A name at the end of a text, and a value behind it, in encoded data."""
        self.has_numbers = any(map(_NUMBER.fullmatch, self._secrets))
        """A registered secret is a number."""
        self.is_sensitive = functools.lru_cache(maxsize=4096)(self._names_a_secret)

    def with_secrets(self, secrets: Iterable[str]) -> Redactor:
        """Return a redactor that also removes these values.

        Raises:
            UsageError: one of them is not text, or too short.
        """
        added = frozenset(map(check_secret, secrets))
        return self if added <= self._secrets else Redactor(self._secrets | added, self._names, self._custom)

    def scan(self, packed: bytes) -> list[RedactionRule] | None:
        """Return the rules that may apply to encoded data; None when it holds nothing to redact."""
        low = packed.lower()
        rules = [*{rule: None for anchor in self._anchors_in(low) for rule in self._rules_of[anchor]}]
        has_table = _TABLE(packed) is not None
        rules += [rule for occurs, rule in self._occurring if has_table or occurs(packed) is not None]
        rules += self._always
        if rules or self.has_numbers or self._has_word(low):
            return rules
        if len(packed) > SMALL_BYTES:
            return rules if self._holds_needle(packed) else None
        return rules if any(needle in packed for needle in self._needles) else None

    def _anchors_in(self, low: bytes) -> Sequence[str]:
        """Return the literals of credentials that occur in data in lower case. Most data has none."""
        if not self._has_anchor(low):
            return ()
        return [anchor for anchor, literal in self._anchors.items() if literal in low]

    def clean(self, value: Any, rules: Sequence[RedactionRule], *, with_names: bool = True) -> tuple[Any, int]:
        """Return a copy of decoded data without secrets, and how many were removed."""
        walk = _Walk(self, rules, with_names)
        cleaned = walk.value(value)
        return (cleaned, walk.count) if walk.count else (value, 0)

    def clean_all(self, value: Any) -> Any:
        """Return a copy of decoded data without secrets, applying every rule."""
        return self.clean(value, self._every)[0]

    def holds_any(self, data: bytes, most_pieces: int | None = None) -> bool:
        """True when data holds something to redact, or may hold it in more pieces than are to be looked at closely.

        Data is looked through in pieces: in a thread, others can run in between.
        """
        looked_at = 0
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES + self._overlap]
            if (rules := self.scan(piece)) is None:
                continue
            looked_at += 1
            if most_pieces is not None and looked_at > most_pieces:
                return True
            if self._is_key(piece.lower()) is not None or self.clean(piece, rules)[1]:
                return True
        return False

    def hide_secrets(self, text: str) -> tuple[str, int]:
        """Return a text without the registered secrets and first halves of them, and how many were removed."""
        count = 0
        for form, start in self._hidden:
            if start not in text:
                continue
            if form in text:
                count += text.count(form)
                text = text.replace(form, hidden(form))
            if form != start and start in text:
                text, halves = _hide_first_halves(text, form, start)
                count += halves
        return text, count

    def holds_secret(self, data: bytes) -> bool:
        """True when data holds a registered secret."""
        return self._holds_needle(data) and any(
            form.encode("utf-8", "surrogatepass") in data for form, _ in self._hidden
        )

    def without_end(self, text: str) -> str:
        """Return a text that goes on elsewhere without what may be half of a secret at its end."""
        text = self.clean_all(text)
        longest = max((_overlap(text, form) for form, _ in self._hidden), default=0)
        run = _LAST_RUN.search(text, max(0, len(text) - MAX_RUN_CHARS))
        longest = max(longest, len(run[0]) if run is not None else 0)
        return text[: len(text) - longest] + hidden(text[len(text) - longest :]) if longest else text

    def without_start(self, text: str) -> str:
        """Return a text whose beginning is elsewhere without what may be half of a secret at its start."""
        key_end = text.find("-----END ")
        if key_end >= 0 and "-----BEGIN " not in text[:key_end]:
            text = hidden(text[:key_end]) + text[key_end:]
        longest = max((_overlap(form, text) for form, _ in self._hidden), default=0)
        run = _FIRST_RUN.match(text)
        longest = max(longest, len(run[0]) if run is not None else 0)
        return hidden(text[:longest]) + text[longest:] if longest else text

    def is_secret_number(self, number: float) -> bool:
        """True when its digits are a registered secret. A whole number is one also as a float."""
        if not self.has_numbers:
            return False
        is_whole = type(number) is float and number.is_integer()
        return str(number) in self._secrets or (is_whole and str(int(number)) in self._secrets)

    def _names_a_secret(self, key: str) -> bool:
        letters = _SEPARATORS.sub("", key).lower()
        return letters.endswith(self._names)


@functools.lru_cache(maxsize=8)
def _search_for(literals: tuple[bytes, ...]) -> LiteralSearch:
    """Return one search for the same literals, which are not secrets: an automaton takes long to make."""
    return LiteralSearch(literals)


_WITH_TEXT: Final = TEXTS | {"plain", "decimal"}
"""Kinds of columns in which a secret of text can be."""


class _Walk:
    """One pass over one value; counts what it removes."""

    def __init__(self, redactor: Redactor, rules: Sequence[RedactionRule], with_names: bool) -> None:
        self._redactor = redactor
        self._rules = rules
        self._with_names = with_names
        self.count = 0

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is str:
            return self.text(value)
        if kind is dict:
            return {self.value(key): self.entry(key, item) for key, item in value.items()}
        if kind is list or kind is tuple:
            return [self.value(item) for item in value]
        if kind is bytes:
            return self.text(value.decode("latin-1")).encode("latin-1", "replace")
        if kind is Unrecordable:
            return Unrecordable(self.text(value.type), self.text(value.text))
        if kind in TABLES:
            return self.table(value)
        if (kind is int or kind is float) and self._redactor.is_secret_number(value):
            self.count += 1
            return REDACTED
        if kind is Decimal:
            before, text = self.count, self.text(f"{value:f}")
            return value if self.count == before else text
        return value

    def entry(self, key: Any, item: Any) -> Any:
        if isinstance(key, str) and item is not None and type(item) is not bool and self._is_sensitive(key):
            self.count += item != REDACTED
            return REDACTED
        return self.value(item)

    def table(self, table: AnyTable) -> Any:
        """Return the table, or what stands for it where there are no tables if something is removed from it.

        Rows may have far more text than the table: each has that of its category.
        """
        before = self.count
        if isinstance(table, Table):
            for label in (*table.axis.names, *table.index.names):
                self.value(label)
            for name, column in table.named_columns().items():
                self.value(name)
                self.count += column.length if self._is_sensitive(name) else 0
            levels = table.index.levels if table.index.says_something else ()
            columns: tuple[Column, ...] = (*levels, *table.axis.levels, *table.columns)
        else:
            columns = (table.column,)
        for column in columns:
            self.column(column)
        if self.count == before:
            return table
        self.count = before
        if table.plain_bytes > MAX_ROWS_BYTES:
            self.count += 1
            return Unrecordable(type(table).__name__, repr(table))
        rows = self.value(table.plain())
        self.count = max(self.count, before + 1)  # what was found may be in none of the rows
        return rows

    def column(self, column: Column) -> None:
        """Count what is to be removed from a column: also where values are missing, and in categories without rows."""
        self.text(column.dtype)
        if column.kind in ("category", "list"):
            self.column(column.detail[0])
            return
        if column.kind in TEXTS:  # cells follow one another there with nothing in between
            self.count += self._redactor.holds_secret(bytes(column.data))
        if column.kind in _WITH_TEXT or self._redactor.has_numbers:
            self.value(replace(column, valid=None).values())

    def _is_sensitive(self, key: str) -> bool:
        return self._with_names and len(key) <= MAX_NAME_CHARS and self._redactor.is_sensitive(key)

    def text(self, text: str) -> str:
        text, count = self._redactor.hide_secrets(text)
        for rule in self._rules:
            text, found = rule.replace(text)
            count += found
        self.count += count
        return text
