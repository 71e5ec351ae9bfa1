"""Decide what a record may hold: no secrets, and nothing that is too large.

Secrets are registered values, well-known credentials, and values under sensitive names. Redaction has two steps,
because nearly every record holds no secret: a search of the encoded bytes for a few literals, and only where one is
found a walk over the values. Cutting comes after redaction. This module writes nothing.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Final

from toolcell.audit.config import SENSITIVE_NAMES
from toolcell.audit.credentials import CREDENTIALS, RedactionRule, hide_pattern
from toolcell.support.secrets import PIECE_BYTES, LiteralSearch, SecretWalk, check_secret, hidden, search_for

OVERLAP_BYTES: Final = 256
"""Longer than what the quick search of encoded data looks for."""

MIN_OVERLAP_CHARS: Final = 3
"""So much of a secret is hidden at the very place where a text was cut."""

MAX_RUN_CHARS: Final = 512
_RUN: Final = f"[A-Za-z0-9_+/=.~%-]{{8,{MAX_RUN_CHARS}}}"
_LAST_RUN: Final = re.compile(rf"{_RUN}\Z")
_FIRST_RUN: Final = re.compile(_RUN)
"""What may be half of a credential."""

_TABLE: Final = re.compile(rb"\xa5(?:array|table)[\xa0-\xbf](?:numpy|pandas|polars|pyarrow)").search
"""Finds a table in encoded data. The texts of its cells follow one another there with nothing in between."""

MAX_NAME_CHARS: Final = 100
"""A longer key is not a name and is not checked."""

_WORDS: Final = ("passw", "passphrase", "secret", "token", "api", "access", "private", "auth", "cred", "cookie")
"""Each of `SENSITIVE_NAMES` contains one of these, in every spelling."""

_SEPARATORS: Final = re.compile(r"[^A-Za-z]+")


def _overlap(text: str, forms: Sequence[str], longest: int) -> int:
    """Return how many of the last characters of a text are the first of one of the sorted forms; 0 if too few."""
    for size in range(min(len(text), longest), MIN_OVERLAP_CHARS - 1, -1):
        end = text[-size:]
        place = bisect_left(forms, end)
        if place < len(forms) and forms[place].startswith(end):
            return size
    return 0


class Redactor:
    """Removes secrets. Immutable; `with_secrets` makes a stricter redactor."""

    def __init__(
        self, secrets: Iterable[str] = (), names: Sequence[str] = SENSITIVE_NAMES, patterns: Sequence[str] = ()
    ) -> None:
        self._secrets = _checked(secrets)
        self._names = tuple(_SEPARATORS.sub("", name).lower() for name in names)
        self._custom = tuple(patterns)
        self._search = search_for(self._secrets, with_halves=True)
        self._overlap = OVERLAP_BYTES + self._search.longest
        rules = (*CREDENTIALS, *(hide_pattern("", pattern) for pattern in patterns))
        anchors = {anchor for rule in rules for anchor in rule.anchors}
        self._rules_of = {anchor: [rule for rule in rules if anchor in rule.anchors] for anchor in anchors}
        self._always = tuple(rule for rule in rules if not rule.anchors and rule.occurs is None)
        self._occurring = tuple((rule.occurs, rule) for rule in rules if rule.occurs is not None)
        self._every = rules
        self.words = (*_WORDS, *{name for name in self._names if not any(word in name for word in _WORDS)})
        """Without one of these in its encoded data, a value has no key with a sensitive name."""
        self._anchors = {anchor: anchor.encode() for anchor in sorted(anchors)}
        self._has_any = _search_for(tuple(sorted({*self._anchors.values(), *(word.encode() for word in self.words)})))
        self._has_word = _search_for(tuple(sorted(word.encode() for word in self.words)))
        ends = "|".join(re.escape(name) for name in self._names) or "(?!)"
        self._is_key = re.compile(rf"(?:{ends})[^a-z0-9]{{0,4}}[\x80-\xff]".encode()).search
        """A name at the end of a text, and a value behind it, in encoded data."""
        self.is_sensitive = functools.lru_cache(maxsize=4096)(self._names_a_secret)

    def with_secrets(self, secrets: Iterable[str]) -> Redactor:
        """Return a redactor that also removes these values.

        Raises:
            UsageError: one of them is not text, or too short.
        """
        added = _checked(secrets)
        return self if added <= self._secrets else Redactor(self._secrets | added, self._names, self._custom)

    def scan(self, packed: bytes) -> list[RedactionRule] | None:
        """Return the rules that may apply to encoded data; None when it holds nothing to redact."""
        low = packed.lower()
        has_any = self._has_any(low)  # most data has neither a literal of a credential nor a sensitive word
        rules = [*self._always]
        if has_any:
            anchors = (anchor for anchor, literal in self._anchors.items() if literal in low)
            rules += {rule: None for anchor in anchors for rule in self._rules_of[anchor]}
        has_table = _TABLE(packed) is not None
        for occurs, rule in self._occurring:
            if has_table or occurs(packed) is not None:
                rules.append(rule)
        if rules or self._search.numbers or (has_any and self._has_word(low)) or self._search.may_be_in(packed):
            return rules
        return None

    def clean(self, value: Any, rules: Sequence[RedactionRule], *, with_names: bool = True) -> tuple[Any, int]:
        """Return a copy of decoded data without secrets, and how many were removed."""
        walk = SecretWalk(
            self._search,
            hide_more=functools.partial(_apply, rules) if rules else None,
            names_a_secret=self._is_name if with_names else None,
        )
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

    def without_end(self, text: str) -> str:
        """Return a text that goes on elsewhere without what may be half of a secret at its end."""
        text = self.clean_all(text)
        longest = _overlap(text, self._search.forms, self._search.longest)
        run = _LAST_RUN.search(text, max(0, len(text) - MAX_RUN_CHARS))
        longest = max(longest, len(run[0]) if run is not None else 0)
        return text[: len(text) - longest] + hidden(text[len(text) - longest :]) if longest else text

    def without_start(self, text: str) -> str:
        """Return a text whose beginning is elsewhere without what may be half of a secret at its start."""
        key_end = text.find("-----END ")
        if key_end >= 0 and "-----BEGIN " not in text[:key_end]:
            text = hidden(text[:key_end]) + text[key_end:]
        longest = _overlap(text[: self._search.longest][::-1], self._search.reversed_forms, self._search.longest)
        run = _FIRST_RUN.match(text)
        longest = max(longest, len(run[0]) if run is not None else 0)
        return hidden(text[:longest]) + text[longest:] if longest else text

    def _is_name(self, key: object) -> bool:
        return isinstance(key, str) and len(key) <= MAX_NAME_CHARS and self.is_sensitive(key)

    def _names_a_secret(self, key: str) -> bool:
        return _SEPARATORS.sub("", key).lower().endswith(self._names)


@functools.lru_cache(maxsize=8)
def _search_for(literals: tuple[bytes, ...]) -> LiteralSearch:
    """Return one search for the same literals, which are not secrets: an automaton takes long to make."""
    return LiteralSearch(literals)


def _checked(secrets: Iterable[object]) -> frozenset[str]:
    return frozenset(check_secret("a registered secret", secret) for secret in secrets)


def _apply(rules: Sequence[RedactionRule], text: str) -> tuple[str, int]:
    count = 0
    for rule in rules:
        text, found = rule.replace(text)
        count += found
    return text, count
