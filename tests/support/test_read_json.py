"""`read_json` reads what the standard library reads, in steps that are short."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell.support import exact_json
from toolcell.support.exact_json import MAX_DEPTH, read_json

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)
WRONG = (
    *("", "[", "[1", "[1,", "[1 2]", "[1,]", "[,1]", "[]]", "[1:2]", ":", "]", "1 2", "nul", "[01]", '"abc'),
    *("{", '{"a"', '{"a":', '{"a":1', '{"a":1,', '{"a":1,}', "{a:1}", '{"a",1}', "{1:2}", '{"a":1:2}'),
)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_json, "READ_CHARS", 12)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_every_document_is_read_as_the_standard_library_reads_it(
    value: Any, indent: int | None, is_ascii: bool
) -> None:
    assert read_json(json.dumps(value, indent=indent, ensure_ascii=is_ascii)) == value


@each_row("text", [*WRONG, *(f"[{'[1], ' * 9}{text}]" for text in WRONG if text not in ("", "[]]"))])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        json.loads(text)
    with pytest.raises(ValueError):
        read_json(text)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_document_is_nested_so_deep_and_no_deeper(opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    assert read_json(opening * MAX_DEPTH + "1" + closing * MAX_DEPTH)
    with pytest.raises(ValueError, match="deeper than 200"):
        read_json(opening * 100_000)
