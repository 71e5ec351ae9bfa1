"""Text from scripts and tools: everything that a terminal would obey or hide becomes visible."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell.support.text import as_one_line, clean, counted, for_terminal, one_line, with_line
from toolcell_bridge.wire.invisible import is_visible

pytestmark = pytest.mark.quick


@each_row(
    ("text", "shown"),
    [
        ("plain, é, 中文, 👩\u200d👩\u200d👧, a\tb\n", "plain, é, 中文, 👩\u200d👩\u200d👧, a\tb\n"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("a\rb", "a\\x0db"),
        ("a\r\nb", "a\nb"),
        ("\b\x7f\0", "\\x08\\x7f\\x00"),
        ("abc\u202egpj.exe", "abc\\u202egpj.exe"),
        ("\u2066x\u2069", "\\u2066x\\u2069"),
        ("a\u2028b\u2029c", "a\\u2028b\\u2029c"),
        ("in\u200bvisible\ufeff\u00ad", "in\\u200bvisible\\ufeff\\xad"),
        ("\U000e0068\U000e0069", "\\U000e0068\\U000e0069"),
        ("\ud800", "\\ud800"),
        ("a\u200db a\u200cb \u200d", "a\\u200db a\\u200cb \\u200d"),
        ("a\ufe0f", "a\\ufe0f"),
        ("❤\ufe0f ❤\ufe0f\u200d🔥 👩🏽\u200d🚀", "❤\ufe0f ❤\ufe0f\u200d🔥 👩🏽\u200d🚀"),
        ("❤\ufe0f\ufe0f👩\u200d", "❤\ufe0f\\ufe0f👩\\u200d"),
        ("می\u200cخواهم क्\u200dष", "می\u200cخواهم क्\u200dष"),
    ],
)
def test_what_a_terminal_would_obey_or_hide_is_written_as_its_escape(text: str, shown: str) -> None:
    assert for_terminal(text) == shown


@given(st.text(st.characters()))
def test_the_shown_text_can_be_written_and_shown_again_unchanged(text: str) -> None:
    shown = for_terminal(text)
    shown.encode("utf-8")
    assert for_terminal(shown) == shown
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t"]
    assert not [c for c in shown if unicodedata.bidirectional(c) in ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI")]


@each_row(
    ("text", "read"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;https://x\x07link\x1b]8;;\x07", "link"),
        ("\x1b]0;title\x1b\\text", "text"),
        ("\x1b(Btext\x1b7", "text"),
        ("\x1b", "\\x1b"),
        ("\x1b]0;title\nthe rest", "\\x1b]0;title\nthe rest"),
        ("\x1b]0;title\nthe rest\x07", "\\x1b]0;title\nthe rest\\x07"),
        ("\x1bPqx", "\\x1bPqx"),
        ("a\u202eb", "a\\u202eb"),
    ],
)
def test_a_model_reads_text_without_colours(text: str, read: str) -> None:
    assert clean(text) == read


INVISIBLE = [
    "\u034f", "\u115f", "\u1160", "\u17b4", "\u17b5", "\u180b", "\u2800", "\u3164", "\uffa0", "\ufe00", "\ufe0f", "\ufffc",
    "\U000e0100", "\U000e01ef", "\u0600", "\u070f", "\U0001d159", "\U000e0fff",
]  # fmt: skip


@each_row("sign", INVISIBLE)
def test_what_shows_nothing_is_written_as_its_escape_and_is_in_no_name(sign: str) -> None:
    assert for_terminal(f"a{sign}b").startswith("a\\") and not is_visible(f"a{sign}b")


def test_every_format_character_of_this_python_is_in_the_table() -> None:
    known = [chr(point) for point in range(0x110000) if unicodedata.category(chr(point)) == "Cf"]
    assert len(known) > 150 and not [each for each in known if for_terminal(each) == each or is_visible(each)]


@given(st.text(st.characters()), st.text(st.characters()))
def test_what_stands_on_the_next_line_is_never_removed(before: str, after: str) -> None:
    shown = as_one_line(after)
    assert clean(f"{before}\n{shown}").endswith(f"\n{shown}")
    assert as_one_line(before).splitlines() in ([], [as_one_line(before)])


def test_one_line_is_one_line_and_no_longer_than_asked() -> None:
    assert one_line("a\nb\tc") == "a\\nb c"
    assert one_line("x" * 300, 10) == "xxxxxxxxx…"


@each_row(
    ("message", "line", "shown"),
    [
        ("it failed", 3, "it failed (line 3)"),
        ("it failed", None, "it failed"),
        ("it waits for pay (line 1)", 1, "it waits for pay (line 1)"),
        ("line 1, column 2: eval() is blocked", 1, "line 1, column 2: eval() is blocked"),
        ("line 1 column 2 of the JSON", 3, "line 1 column 2 of the JSON (line 3)"),
    ],
)
def test_a_message_names_its_line_once(message: str, line: int | None, shown: str) -> None:
    assert with_line(message, line) == shown


def test_marks_that_are_stacked_high_cover_no_other_line() -> None:
    for kept in ("Việt Nam", "Vie\u0302\u0323t", "e\u0302\u0301\u0323\u0336 x\u0301"):
        assert for_terminal(kept) == kept
    assert for_terminal("x" + "\u0336" * 6 + "y\u0301") == "x" + "\u0336" * 4 + "\\u0336\\u0336y\u0301"


def test_a_count_agrees_with_its_noun() -> None:
    assert [counted(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
