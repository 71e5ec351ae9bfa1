"""Decide what a record may hold: no secrets, and nothing that is too large.

Secrets are registered values, well-known credentials, and values under sensitive names. Redaction has two steps,
because nearly every record holds no secret: a search of the encoded bytes for a few literals, and only where one is
found a walk over the values. Cutting comes after redaction. This module writes nothing.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.config import SENSITIVE_NAMES, AuditConfig, Keep
from toolcell.audit.records import Unrecordable, bytes_digest, text_digest, value_digest

REDACTED: Final = "[redacted]"
MIN_SECRET_CHARS: Final = 4
"""A shorter value would be found in nearly every text."""

MAX_NAME_CHARS: Final = 100
"""A longer key is not a name and is not checked."""

_Replace = Callable[[str], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class _Rule:
    """How to replace something in a text, and a lower-case literal that the text must contain for it."""

    anchor: str
    replace: _Replace


def _pattern(anchor: str, pattern: str, flags: int = 0) -> _Rule:
    compiled = re.compile(pattern, flags)
    return _Rule(anchor, lambda text: compiled.subn(_hide, text))


def _hide(match: re.Match[str]) -> str:
    """Replace the last group that matched, or the whole match; keep the number of lines."""
    whole = match[0]
    if match.re.groups and match.lastindex:
        start, end = match.start(match.lastindex) - match.start(), match.end(match.lastindex) - match.start()
    else:
        start, end = 0, len(whole)
    return f"{whole[:start]}{REDACTED}{_line_ends(whole[start:end])}{whole[end:]}"


def _line_ends(hidden: str) -> str:
    return "\n" * hidden.count("\n")


PATTERNS: Final[tuple[_Rule, ...]] = (
    _pattern("sk-", r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,}"),  # OpenAI, Anthropic
    _pattern("_live_", r"\b[rsp]k_live_[A-Za-z0-9]{10,}"),  # Stripe
    _pattern("ghp_", r"(?<![A-Za-z0-9])ghp_[A-Za-z0-9]{30,}"),  # GitHub, as are the next three
    _pattern("gho_", r"(?<![A-Za-z0-9])gho_[A-Za-z0-9]{30,}"),
    _pattern("ghs_", r"(?<![A-Za-z0-9])ghs_[A-Za-z0-9]{30,}"),
    _pattern("github_pat_", r"github_pat_[A-Za-z0-9_]{30,}"),
    _pattern("glpat-", r"glpat-[A-Za-z0-9_-]{16,}"),  # GitLab
    _pattern("akia", r"(?<![A-Za-z0-9])AKIA[A-Z0-9]{16}"),  # AWS, long-lived and temporary
    _pattern("asia", r"(?<![A-Za-z0-9])ASIA[A-Z0-9]{16}"),
    _pattern("aiza", r"AIza[A-Za-z0-9_-]{35}"),  # Google
    _pattern("xox", r"xox[abeoprs]-[A-Za-z0-9-]{10,}"),  # Slack
    _pattern("eyj", r"(?<![\w.-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),  # JSON Web Tokens
    _pattern("private", r"-----BEGIN [A-Z ]*PRIVATE KEY-----([\s\S]*?)(?:-----END|\Z)"),
    _pattern("bearer ", r"\bbearer +([A-Za-z0-9._~+/=-]{12,})", re.IGNORECASE),
    _pattern("basic ", r"\bbasic +([A-Za-z0-9+/]{12,}=*)", re.IGNORECASE),
    _pattern("://", r"://[^/\s:@'\"]*:([^@/\s'\"]+)@"),  # a password in a URL
)

_WORDS: Final = ("passw", "passphrase", "secret", "token", "api", "access", "private", "auth", "cred", "cookie")
"""Each of `SENSITIVE_NAMES` contains one of these, in every spelling."""

_ASSIGNABLE: Final = r"""
    (?: passw(?:or)?ds? | passphrase | secrets? | token | api[_-]?key | access[_-]?key | private[_-]?key
        | authorization | credentials? | cookies? )
"""
"""Names to which secrets are assigned; a part of verbose patterns."""

_LITERAL: Final = re.compile(
    rf"""(?ix) {_ASSIGNABLE}
    ['"]? \s* [:=] \s* [bru]{{0,2}} (?P<quote>['"]) (?!\[redacted\]) ([^'"\n]{{6,}}) (?=(?P=quote))"""
)
"""`password = "..."` in source code or JSON inside a text."""

_BARE: Final = re.compile(
    r"""(?ix) (?: passw(?:or)?d | secret | token | api[_-]?key | access[_-]?key )
    = (?= \S{0,64}? \d) ([^\s'"(),;&\[\]{}.<>]{8,200}+) (?! [(.\[] )"""
)
"""`password=...` in a log line or a message. Text that looks like code is not changed."""

_ASSIGNED: Final = re.compile(
    rf"""(?x) {_ASSIGNABLE}
    ['"]? [\s\x80-\xff]* [:=]
    | \xc4[\xb0\xb1] | \xc5\xbf | \xe2\x84\xaa"""
)
"""The beginning of both patterns above, in encoded and lower-cased data. Most texts with such a word assign nothing.
Four non-ASCII letters match i, s and k when case is ignored."""

# Texts come from guests, so no pattern here may take quadratic time. Each pattern starts at a literal that its own
# repetition cannot contain, or cannot fail once it has begun to repeat.

_SEPARATORS: Final = re.compile(r"[^A-Za-z]+")


_FREQUENT: Final = " etaoinsrhldcumfpgyw"
"""The most frequent characters of texts, JSON and code, in order."""


def _any_of(literals: Iterable[str]) -> str:
    """Build a pattern that looks for the rarest letter of each literal, and only there for the rest of the literal.

    It is three times as fast as a plain alternation, because the literals' first letters occur in every word.
    """
    by_letter: dict[str, list[str]] = {}
    for literal in sorted(literals):
        at = max(range(len(literal)), key=lambda index: _FREQUENT.find(literal[index]) % 100, default=0)
        before, after = re.escape(literal[: at + 1]), re.escape(literal[at + 1 :])
        by_letter.setdefault(literal[at : at + 1], []).append(f"(?<={before}){after}" if at else after)
    return "|".join(f"{re.escape(letter)}(?:{'|'.join(rest)})" for letter, rest in by_letter.items())


class Redactor:
    """Removes secrets. Immutable; `with_secrets` makes a stricter redactor."""

    def __init__(
        self, secrets: Iterable[str] = (), names: Sequence[str] = SENSITIVE_NAMES, patterns: Sequence[str] = ()
    ) -> None:
        self._secrets = frozenset(secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS)
        self._names = tuple(_SEPARATORS.sub("", name).lower() for name in names)
        self._custom = tuple(patterns)
        forms = {form for secret in self._secrets for form in forms_of(secret)}
        self._hidden = tuple(sorted(forms, key=len, reverse=True))  # a secret inside another goes with it
        self._needles = tuple(form.encode("utf-8", "surrogatepass") for form in self._hidden)
        rules = (*PATTERNS, *(_pattern("", pattern) for pattern in patterns))
        self._rules = tuple((rule.anchor, rule) for rule in rules)
        own = {name for name in self._names if not any(word in name for word in _WORDS)}
        self.words = (*_WORDS, *own)
        """Without one of these in its encoded data, a value has no key with a sensitive name."""
        anchors = {rule.anchor for rule in rules} | set(self.words)
        self._find_anchor = re.compile(_any_of(anchors).encode()).search
        self._is_numeric = any(secret.isdecimal() for secret in self._secrets)
        self.is_sensitive = functools.lru_cache(maxsize=4096)(self._names_a_secret)

    def with_secrets(self, secrets: Iterable[str]) -> Redactor:
        """Return a redactor that also removes these values."""
        added = frozenset(secrets)
        return self if added <= self._secrets else Redactor(self._secrets | added, self._names, self._custom)

    def scan(self, packed: bytes) -> list[_Rule] | None:
        """Return the rules that may apply to encoded data; None when it holds nothing to redact."""
        if self._find_anchor(packed.lower()) is None and not self._is_numeric:
            for needle in self._needles:
                if needle in packed:
                    break
            else:
                return None
        low = packed.lower().decode("latin-1")
        rules = [rule for anchor, rule in self._rules if anchor in low]
        if _ASSIGNED.search(low) is not None:
            rules.append(_Rule("", self._hide_literals))
        return rules

    def clean(self, value: Any, rules: Sequence[_Rule], *, with_names: bool = True) -> tuple[Any, int]:
        """Return a copy of decoded data without secrets, and how many were removed."""
        walk = _Walk(self, rules, with_names)
        cleaned = walk.value(value)
        return (cleaned, walk.count) if walk.count else (value, 0)

    def clean_all(self, value: Any) -> Any:
        """Return a copy of decoded data without secrets, applying every rule."""
        return self.clean(value, (*(rule for _, rule in self._rules), _Rule("", self._hide_literals)))[0]

    def hide_secrets(self, text: str) -> tuple[str, int]:
        """Return a text without the registered secrets, and how many were removed."""
        count = 0
        for form in self._hidden:
            if form in text:
                count += text.count(form)
                text = text.replace(form, REDACTED + _line_ends(form))
        return text, count

    def is_secret_number(self, number: int) -> bool:
        """True when its digits are a registered secret."""
        return self._is_numeric and str(number) in self._secrets

    def _names_a_secret(self, key: str) -> bool:
        letters = _SEPARATORS.sub("", key).lower()
        return letters.endswith(self._names)

    @staticmethod
    def _hide_literals(text: str) -> tuple[str, int]:
        text, quoted = _LITERAL.subn(_hide, text)
        text, bare = _BARE.subn(_hide, text)
        return text, quoted + bare


class _Walk:
    """One pass over one value; counts what it removes."""

    def __init__(self, redactor: Redactor, rules: Sequence[_Rule], with_names: bool) -> None:
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
        if kind is int and self._redactor.is_secret_number(value):
            self.count += 1
            return REDACTED
        return value

    def entry(self, key: Any, item: Any) -> Any:
        if isinstance(key, str) and item is not None and type(item) is not bool and self._is_sensitive(key):
            self.count += item != REDACTED
            return REDACTED
        return self.value(item)

    def _is_sensitive(self, key: str) -> bool:
        return self._with_names and len(key) <= MAX_NAME_CHARS and self._redactor.is_sensitive(key)

    def text(self, text: str) -> str:
        text, count = self._redactor.hide_secrets(text)
        for rule in self._rules:
            text, found = rule.replace(text)
            count += found
        self.count += count
        return text


def forms_of(secret: str) -> set[str]:
    """Return the spellings of a secret: as it is, escaped for JSON, Python or a URL, in base64."""
    raw = secret.encode("utf-8", "surrogatepass")
    encoded = base64.b64encode(raw).decode()
    return {
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
        urllib.parse.quote(raw),
        urllib.parse.quote_plus(raw),
        encoded.rstrip("="),
        base64.urlsafe_b64encode(raw).decode().rstrip("="),
        raw.decode("latin-1"),
    }


# What is too large, or configured not to be kept

HEAD_CHARS: Final = 1024
"""Kept of a text that is too large."""


def summarize(value: Any, why: str) -> dict[str, Any]:
    """Return what is recorded in place of a value: its size and digest, and the beginning of a text."""
    packed = records.pack(value)
    summary: dict[str, Any] = {"why": why, "bytes": len(packed), "sha256": bytes_digest(packed)}
    if why == "size" and isinstance(value, str):
        summary["head"] = value[:HEAD_CHARS]
    return summary


def keep_as(keep: Keep, value: Any, extra: dict[str, Any], name: str, clean: Callable[[Any], Any]) -> Any:
    """Return the value, or None with a note in `extra` of what is missing. Digests are made of the cleaned value."""
    if keep == "full" or value is None:
        return value
    extra[f"{name}_cut"] = {"why": "omit"} if keep == "omit" else summarize(clean(value), "digest")
    return None


def with_digests(kind: str, fields: list[Any]) -> list[Any]:
    """Compute the fields' digests again after a secret was removed from them.

    The digest of a text that held a secret would confirm a right guess of that secret.
    """
    named = dict(zip(records.FIELDS[kind], fields, strict=False))
    if kind == records.RUN_STARTED and named["source"] is not None:
        named["sha256"] = text_digest(named["source"])
        named["inputs_sha256"] = value_digest(named["inputs"]) if named["inputs"] else None
    elif kind == records.RUN_ENDED and named["has_value"]:
        named["value_sha256"] = value_digest(named["value"])
    return list(named.values())


_Limit = Callable[[AuditConfig], int]

LARGE_FIELDS: Final[dict[str, tuple[tuple[str, _Limit], ...]]] = {
    records.CALL_STARTED: (("args", lambda config: config.value_bytes),),
    records.CALL_ENDED: (("value", lambda config: config.value_bytes),),
    records.RUN_STARTED: (
        ("source", lambda config: config.source_bytes),
        ("inputs", lambda config: config.value_bytes),
    ),
    records.RUN_ENDED: (("value", lambda config: config.value_bytes), ("logs", lambda config: config.logs_bytes)),
}
"""Fields that may be too large to keep, and the limit of each."""

LARGE_EXTRAS: Final = ("effective_args", "coerced", "message", "details", "text", "trace")
"""Extras that only some calls have. Each may be as large as a value."""


def cut_large(kind: str, fields: list[Any], config: AuditConfig) -> list[Any]:
    """Replace the fields of a record that are too large. The last field, `more`, notes each one."""
    names = records.FIELDS[kind]
    extra = dict(fields[-1])
    for name, limit in LARGE_FIELDS.get(kind, ()):
        index = names.index(name)
        if len(records.pack(fields[index])) > limit(config):
            extra[f"{name}_cut"] = summarize(fields[index], "size")
            fields[index] = None
    for name in LARGE_EXTRAS:
        if name in extra and len(records.pack(extra[name])) > config.value_bytes:
            extra[f"{name}_cut"] = summarize(extra.pop(name), "size")
    return [*fields[:-1], extra]
