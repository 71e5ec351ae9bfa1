"""Make untrusted text safe for a terminal or for a model's context.

The output of scripts and tools can contain anything. Escape sequences move the cursor and set the clipboard. Bidi marks
and invisible characters make text look like other text. Lone surrogates cannot be encoded.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from toolcell_bridge.wire.invisible import INVISIBLE

_EMOJI = (
    "\u00a9\u00ae\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u23ff\u25a0-\u27bf\u2900-\u297f\u2b00-\u2bff"
    "\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
)
_VIRAMAS = "\u094d\u09cd\u0a4d\u0acd\u0b4d\u0bcd\u0c4d\u0ccd\u0d4d\u0dca\u1039\u17d2"
_JOINED_ARABIC = (
    "\u0620\u0626\u0628\u062a-\u062e\u0633-\u063f\u0641-\u0647\u0649-\u064a\u066e-\u066f\u0678-\u0687\u069a-\u06bf"
    "\u06c1-\u06c2\u06cc\u06ce\u06d0-\u06d1\u06fa-\u06fc\u06ff"
)

_MARKS = "[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
"""The blocks of marks that go with letters of any writing system."""
_STACK = re.compile(f"({_MARKS}{{4}})({_MARKS}+)")
"""More marks than letters have, which is up to three. A high stack covers the lines above and below."""

_UNSAFE = re.compile(
    f"([{_EMOJI}]\ufe0f?(?:\u200d[{_EMOJI}]\ufe0f?)*"  # kept: emoji, their variants, and what is joined of several
    f"|(?<=[{_VIRAMAS}])[\u200c\u200d]"  # kept: RFC 5892, appendix A: joiners where a writing system needs them
    f"|(?<=[{_JOINED_ARABIC}])\u200c(?=[\u0620-\u06ff]))"
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and newline, DEL, C1
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # lone surrogates
    f"{INVISIBLE}]"
)
"""Also what is kept, in a group of its own: there a joiner changes what is seen, so it hides nothing."""

SHORT = reprlib.Repr()
"""Writes the beginning and the end of what is long, and looks at no more of it than that."""
SHORT.maxstring = SHORT.maxother = 200
SHORT.maxlist = SHORT.maxtuple = SHORT.maxdict = SHORT.maxset = 10
SHORT.maxlevel = 4

CUT_MARK = "\n[... {cut} characters cut ...]\n"

_TERMINAL_SEQUENCE = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    "|\x1b[\\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\\\)"  # OSC, DCS, SOS, PM, APC, each with its text and its end
    "|\x1b(?:[ -/]+[0-~]|[0-OQ-WYZ\\\\`-~])"  # the short ones
)


def whole_characters(value: Any) -> Any:
    """Return texts, also in dicts and lists, in which halves of characters are joined; a mark stands for any other."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if isinstance(value, Mapping):
        return {whole_characters(name): whole_characters(each) for name, each in value.items()}
    return [whole_characters(each) for each in value] if isinstance(value, list) else value


def visible(value: object) -> object:
    """Spell out what a browser hides, reorders or cannot encode, for a template."""
    return value if hasattr(value, "__html__") else for_terminal(str(value))


def for_terminal(text: str) -> str:
    """Return `text` with every character visible. An escape replaces each one that a terminal obeys or hides."""
    stacked = _STACK.sub(
        lambda match: match[1] + "".join(f"\\u{ord(mark):04x}" for mark in match[2]), text.replace("\r\n", "\n")
    )
    return _UNSAFE.sub(_escape, stacked)


def one_line(text: str, columns: int = 200) -> str:
    """Return `text` for a terminal, on one line of at most `columns` characters."""
    line = for_terminal(text[: columns + 1]).replace("\n", "\\n").replace("\t", " ")
    return line if len(line) <= columns else line[: columns - 1] + "…"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 call`, `2 calls`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def as_one_line(text: str) -> str:
    """Return the whole of `text` for a terminal, on one line: nothing of it is removed, cut or able to begin a line."""
    return for_terminal(text).replace("\n", "\\n").replace("\t", "\\t")


def clean(text: str) -> str:
    """Return `text` for a model: without colours and cursor movements, and otherwise as for a terminal.

    A sequence without its end stays, visible: what follows it may be somebody else's text. For the same reason, texts
    of several origins are cleaned one by one, before they are joined.
    """
    return for_terminal(_TERMINAL_SEQUENCE.sub("", text))


def cut_text(text: str, max_chars: int) -> tuple[str, bool]:
    """Keep the beginning and the end, `max_chars` in all, and tell whether anything was cut."""
    if len(text) <= max_chars:
        return text, False
    mark = CUT_MARK.format(cut=len(text) - max_chars)
    room = max_chars - len(mark)
    if room < len(mark):  # too little to say anything about it
        return text[:max_chars], True
    head = room - room // 3
    return text[:head] + mark + text[head - room :], True


def cut_bytes(text: str, max_bytes: int) -> tuple[str, bool]:
    """Do the same for so many bytes of UTF-8. No character is split."""
    if len(text) * 4 <= max_bytes or len(data := text.encode("utf-8", "replace")) <= max_bytes:
        return text, False
    mark = CUT_MARK.format(cut=len(text))  # as long as any that is needed
    room = max_bytes - len(mark)
    if room < len(mark):
        return data[:max_bytes].decode("utf-8", "ignore"), True
    head = data[: room - room // 3].decode("utf-8", "ignore")
    tail = data[len(data) - room // 3 :].decode("utf-8", "ignore")
    return head + CUT_MARK.format(cut=len(text) - len(head) - len(tail)) + tail, True


def shown_findings(findings: Sequence[Mapping[str, Any]]) -> str:
    """Return the first findings with their lines, and how many more there are."""
    said = "; ".join(f"line {each['line']}: {each['message']}" for each in findings[:5])
    return said + (f" (and {len(findings) - 5} more)" if len(findings) > 5 else "")


def _escape(match: re.Match[str]) -> str:
    if match[1] is not None:
        return match[1]
    point = ord(match[0])
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def with_line(message: str, line: int | None) -> str:
    """Return a message with the line of the script that it is about, unless it names that line itself."""
    is_named = line is None or f"(line {line})" in message or message.startswith(f"line {line},")
    return message if is_named else f"{message} (line {line})"


def size(bytes_count: int) -> str:
    """Return a number of bytes for a person to read, in binary units."""
    amount, units = float(bytes_count), iter(("bytes", "KiB", "MiB", "GiB"))
    unit = next(units)
    while amount >= 1024 and unit != "GiB":
        amount, unit = amount / 1024, next(units)
    return f"{amount:.0f} {unit}" if amount >= 1000 else f"{amount:.3g} {unit}"


def duration(seconds: float) -> str:
    """Return seconds for a person to read, in the unit that suits them."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1, 1e3, "ms"), (120, 1, "s"), (7200, 1 / 60, "min")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"
