"""The guest cuts a script's text into statements that are certainly complete, wherever its parts were cut."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcell_bridge.guest.statements import Statements

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "tests" / "wire").glob("*.py")])


def split(text: str, edges: list[int]) -> list[str]:
    """Return the statements, with the part of the text in which each was found left out."""
    statements, found = Statements(), list[str]()
    for start, end in zip([0, *edges], [*edges, len(text)], strict=True):
        statements.add(start, text[start:end])
        statements.is_whole = end == len(text)
        while (statement := statements.next()) is not None:
            found.append(statement.source.removeprefix("\n" * (statement.line - 1)))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_real_script_is_cut_into_its_statements_whatever_its_parts_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    whole = split(text, [])

    assert "".join(whole) == text
    assert len(whole) == len({node.lineno for node in ast.parse(text).body})
    for size in (13, 400):
        assert split(text, list(range(size, len(text), size))) == whole


SIGNS = [*"x=1:()[]#@e\n\r\t \f\x27\x22\x5c", "if x:\n", "else:\n", "def f():\n  ", "\x22" * 3]


@given(st.lists(st.sampled_from(SIGNS), max_size=40).map("".join), st.data())
def test_any_text_is_cut_in_one_way_and_nothing_of_it_gets_lost(text: str, data: st.DataObject) -> None:
    edges = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=5))) if len(text) > 1 else []
    whole = split(text, [])

    assert split(text, edges) == whole
    for each in whole[:-1]:
        compile(each, "cut", "exec")


def test_a_long_text_in_quotes_is_not_parsed_once_for_each_of_its_lines() -> None:
    text = "x = '''\n" + "line of text\n" * 20_000 + "'''\ny = 1\n"

    assert len(split(text, list(range(1000, len(text), 1000)))) == 2


def test_many_lines_that_are_no_python_are_tried_only_now_and_then() -> None:
    text = "x = (\n" + "1 2\n" * 20_000

    assert len(split(text, [])) == 1
