"""Make untrusted text safe for a terminal or for a model's context.

The output of scripts and tools can contain anything. Escape sequences move the cursor and set the clipboard. Bidi marks
and invisible characters make text look like other text. Lone surrogates cannot be encoded.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and newline, DEL, C1
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # invisible, bidi, U+2028
    "\ud800-\udfff"  # lone surrogates
    "\U000e0000-\U000e007f"  # tag characters: they can hide whole sentences
    "]"
)
"""Zero-width joiners are not in it, because emoji and several writing systems need them."""

SHORT = reprlib.Repr()
"""Writes the beginning and the end of what is long, and looks at no more of it than that."""
SHORT.maxstring = SHORT.maxother = 200
SHORT.maxlist = SHORT.maxtuple = SHORT.maxdict = SHORT.maxset = 10
SHORT.maxlevel = 4

CUT_MARK = "\n[... {cut} characters cut ...]\n"

_TERMINAL_SEQUENCE = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    "|\x1b[\\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\\\)?"  # OSC, DCS, SOS, PM, APC, each with its text
    "|\x1b[ -/]*[0-~]"
)


def for_terminal(text: str) -> str:
    """Return `text` with every character visible. An escape replaces each one that a terminal obeys or hides."""
    return _UNSAFE.sub(_escape, text.replace("\r\n", "\n"))


def one_line(text: str, columns: int = 200) -> str:
    """Return `text` for a terminal, on one line of at most `columns` characters."""
    line = for_terminal(text[: columns + 1]).replace("\n", "\\n").replace("\t", " ")
    return line if len(line) <= columns else line[: columns - 1] + "…"


def clean(text: str) -> str:
    """Return `text` for a model: without colours and cursor movements, and otherwise as for a terminal."""
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
    point = ord(match[0])
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
