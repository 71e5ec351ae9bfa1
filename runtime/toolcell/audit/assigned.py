"""Find literals that are assigned to names of secrets, in source code, JSON inside a text, and log lines.

    password = "..."            os.environ["API_KEY"] = "..."       token: str = f"..."        {"secret": "..."}
    user, password = "...", "..."      token = ("..." "...")           password=... (in a log)     putenv("TOKEN", ...)

Text that looks like code is not changed: a name, a call, an f-string's expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from toolcell.audit.credentials import REDACTED, RedactionRule, hidden

MIN_LITERAL_CHARS: Final = 6
"""A shorter literal is hardly a secret, and often a mode or a unit."""

MAX_LITERALS: Final = 1000
"""In one list or tuple."""

MAX_HIDDEN: Final = 2000
"""In one text. From there on it is hidden whole."""

_KEYS: Final = ("api", "access", "private", "secret", "account", "signing", "encryption")
_NAMES: Final = (
    "password", "passwords", "passwd", "passwds", "passphrase", "secret", "secrets", "token", "authorization",
    "credential", "credentials", "cookie", "cookies", "auth",
    *(f"{kind}{between}key" for kind in _KEYS for between in ("_", "-", "")),
)  # fmt: skip
"""What an assigned name ends with."""

_BARE_NAMES: Final = tuple(
    name for name in _NAMES if name.startswith(("password", "passwd", "secret", "token")) or name.endswith("key")
)

COMMON: Final = " etaoinsrhldcumfpgy.0123456789:=/"
_ORDER: Final = COMMON + "bwvkxjqz-_~"
"""The characters of texts, JSON and code that literals here consist of, about the most frequent first."""


def any_of(literals: Iterable[str]) -> str:
    """Build a pattern that looks for the rarest letter of each literal, and only there for the rest of the literal.

    It is three times as fast as a plain alternation, because the literals' first letters occur in every word.
    """
    by_letter: dict[str, list[str]] = {}
    for literal in sorted(literals, key=lambda each: (-len(each), each)):
        at = literal.index(rarest(literal))
        before, after = re.escape(literal[: at + 1]), re.escape(literal[at + 1 :])
        by_letter.setdefault(literal[at], []).append(f"(?<={before}){after}" if at else after)
    return "|".join(f"{re.escape(letter)}(?:{'|'.join(rest)})" for letter, rest in by_letter.items())


def rarest(literal: str) -> str:
    """Return the character of a literal that is rarest in texts."""
    return max(literal, key=_ORDER.find)


# All patterns are for a text in lower case. Repetitions are bounded or possessive, so no text takes quadratic time.

_LITERAL_AHEAD: Final = r"""(?= [bruf]{0,2} \\{0,3} ['"])"""

_ASSIGNED: Final = re.compile(
    rf"""(?x) (?: {any_of(_NAMES)} ) (?: \\{{0,3}} ['"] )? [^\S\n]{{0,8}} \]? \s{{0,20}}
    (?: (?: : \s{{0,8}} [a-z_] [\w.\[\]|,\x20'"]{{0,60}}? )? = (?! =) | : (?! :) =? ) \s{{0,80}}
    (?P<open> [(\[{{] \s{{0,80}} )? {_LITERAL_AHEAD}"""
)
"""The beginning of an assignment to such a name, up to the first literal."""

_TARGETS: Final = re.compile(
    rf"""(?xm) ^ [ \t]{{0,80}} \(?
    (?P<names> [a-z_] [\w.]{{0,60}} (?: [ \t]{{0,4}} , [ \t]{{0,4}} [a-z_] [\w.\[\]'"]{{0,60}} ){{1,8}} )
    \)? [ \t]{{0,8}} = (?! =) \s{{0,8}} \(? \s{{0,8}} {_LITERAL_AHEAD}"""
)
"""An assignment to several names."""

_SET: Final = re.compile(
    rf"""(?x) (?: setdefault | putenv | setenv ) \( \s{{0,20}}
    (?P<names> ['"] [^'"\n]{{1,80}} ['"] ) \s{{0,20}} , \s{{0,20}} {_LITERAL_AHEAD}"""
)
"""A call that puts a value under a name."""

_IS_NAMED: Final = re.compile(rf"(?:{'|'.join(_NAMES)})(?=\W|$)").search

_LITERAL: Final = re.compile(
    r"""(?x) (?P<kind> [bruf]{0,2} ) (?:
        (?P<triple> \"{3} | '{3} )
      | (?P<escaped> \\{1,3} ['"] ) (?P<inside> [^'"\\\n]*+ )
      | " (?P<double> (?: [^\\\n"] | \\ . )*+ ) (?: " | \Z )
      | ' (?P<single> (?: [^\\\n'] | \\ . )*+ ) (?: ' | \Z )
    )"""
)

_NEXT: Final = re.compile(r"\s{0,80}(?P<separator>[,+:]?)\s{0,80}")

_EXPRESSION: Final = re.compile(r"(\{[^{}\n]{0,200}\})")
_SCHEMES: Final = ("bearer", "basic", "token", "bot", "digest", "apikey")

_BARE: Final = re.compile(
    rf"""(?x) (?: {any_of(_BARE_NAMES)} ) = (?P<value> [^\s'"(),;&\[\]{{}}.<>]{{8,200}}+ ) (?! [(.\[] )"""
)
"""`password=...` in a log line or a message."""

_HAS_DIGIT: Final = re.compile(r"\d").search
_DIGIT_CHARS: Final = 64
"""A value without a digit in its beginning is a word."""

OCCURS: Final = re.compile(
    rb"""(?x) (?: password | passwd | passphrase | secret | token | authorization | credential | cookie | auth
      | (?: api | access | private | secret | account | signing | encryption ) [_-]? key )
    s? (?: \\{0,3} ['"] )? [\s\x80-\xff]{0,30} \]? [\s\x80-\xff]{0,30} (?: [:=,] )"""
)
"""Whether encoded data in lower case may hold any of this. Most texts with such a word assign nothing."""


def hide_assigned(text: str) -> tuple[str, int]:
    """Return a text without the literals that are assigned to names of secrets, and how many there were."""
    low = text.lower()
    if not text.isascii():  # neither the letter whose lower case is two nor the one whose lower case is a k
        low = text.replace("\u0130", "?").replace("\u212a", "?").lower()
    spans = sorted({*islice(_quoted(low), MAX_HIDDEN), *islice(_bare(low), MAX_HIDDEN)})
    if len(spans) >= MAX_HIDDEN:  # a text that is made to be slow
        spans[MAX_HIDDEN - 1 :] = [(spans[MAX_HIDDEN - 1][0], len(text))]
    pieces: list[str] = []
    end = 0
    for start, stop in spans:
        if start < end or start == stop or text[start:stop] == REDACTED:
            continue
        pieces += (text[end:start], hidden(text[start:stop]))
        end = stop
    return ("".join((*pieces, text[end:])), len(pieces) // 2) if pieces else (text, 0)


ASSIGNED: Final = RedactionRule((), hide_assigned, OCCURS.search)


def _quoted(low: str) -> Iterator[tuple[int, int]]:
    for found in _ASSIGNED.finditer(low):
        yield from _literals(low, found.end(), found["open"] or "")
    if "," in low:
        for found in _TARGETS.finditer(low):
            if _IS_NAMED(found["names"]):
                yield from _literals(low, found.end(), "(")
    if "setdefault(" in low or "tenv(" in low:
        for found in _SET.finditer(low):
            if _IS_NAMED(found["names"]):
                yield from _literals(low, found.end(), "")


def _bare(low: str) -> Iterator[tuple[int, int]]:
    for found in _BARE.finditer(low):
        start, stop = found.span("value")
        if _HAS_DIGIT(low, start, min(stop, start + _DIGIT_CHARS)):
            yield start, stop


def _literals(low: str, at: int, opened: str) -> Iterator[tuple[int, int]]:
    """Yield where the contents are of a literal and of those that belong to it: a list's, or a long text's pieces."""
    separators = {"": "+", "(": ",+", "[": ",+", "{": ",+:"}[opened[:1]]
    for _ in range(MAX_LITERALS):
        found = _LITERAL.match(low, at)
        if found is None:
            return
        start, stop, at = _content(low, found)
        following = _NEXT.match(low, at)
        separator = following["separator"] if following is not None else ""
        if separator != ":" or not opened:  # else it is a key
            yield from _worth_hiding(low, start, stop, "f" in found["kind"])
        if following is None or separator not in separators:
            return
        at = following.end()


def _content(low: str, found: re.Match[str]) -> tuple[int, int, int]:
    """Return where the content of a literal begins and ends, and where the literal ends."""
    for name in ("double", "single"):
        if found[name] is not None:
            return found.start(name), found.end(name), found.end()
    if found["escaped"] is not None:
        stop = found.end("inside")
        return found.start("inside"), stop, stop + len(found["escaped"])
    stop = low.find(found["triple"], found.end())
    stop = len(low) if stop < 0 else stop
    return found.end(), stop, stop + len(found["triple"])


def _worth_hiding(low: str, start: int, stop: int, is_formatted: bool) -> Iterator[tuple[int, int]]:
    if not is_formatted:
        if stop - start >= MIN_LITERAL_CHARS:
            yield start, stop
        return
    for index, part in enumerate(_EXPRESSION.split(low[start:stop])):
        is_fixed = index % 2 == 0 and part.strip() not in _SCHEMES
        if is_fixed and len(part) >= MIN_LITERAL_CHARS:
            yield start, start + len(part)
        start += len(part)
