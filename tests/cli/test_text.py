"""Text from scripts and tools: everything that a terminal would obey or hide becomes visible."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcell.text import clean, for_terminal, one_line


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;https://x\x07link\x1b]8;;\x07", "link"),
        ("\x1b]0;title\x1b\\text", "text"),
        ("\x1b(Btext\x1b7", "text"),
        ("\x1b", "\\x1b"),
        ("a\u202eb", "a\\u202eb"),
    ],
)
def test_a_model_reads_text_without_colours(text: str, read: str) -> None:
    assert clean(text) == read


def test_one_line_is_one_line_and_no_longer_than_asked() -> None:
    assert one_line("a\nb\tc") == "a\\nb c"
    assert one_line("x" * 300, 10) == "xxxxxxxxx…"
