"""One argument of a tool call can be read while its JSON is still coming."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcell import ArgumentText

simple = st.none() | st.integers() | st.text()
values = simple | st.lists(simple, max_size=3) | st.dictionaries(st.text(), simple, max_size=3)


@pytest.mark.slow
@given(
    code=st.text(),
    others=st.dictionaries(st.text(), values, max_size=3),
    size=st.integers(1, 9),
    is_ascii=st.booleans(),
    is_first=st.booleans(),
)
def test_an_argument_is_what_json_says_wherever_its_text_is_cut(
    code: str, others: dict[str, object], size: int, is_ascii: bool, is_first: bool
) -> None:
    others.pop("code", None)
    given_args = {"code": code, **others} if is_first else {**others, "code": code}
    text = json.dumps(given_args, ensure_ascii=is_ascii, indent=1 if size % 2 else None)
    argument = ArgumentText()

    said = "".join(argument.feed(text[at : at + size]) for at in range(0, len(text), size))

    assert (said, argument.is_whole) == (code, True)


def test_an_argument_comes_as_soon_as_its_characters_do() -> None:
    argument = ArgumentText("source")

    assert [argument.feed(each) for each in ('{"x": {"source": "no"}, "source": "a\\', "nb", "\\u00", 'e9"', "}")] == [
        *("a", "\nb", "", "é", "")
    ]
    assert argument.is_whole


@pytest.mark.parametrize("text", ['{"code": 5, "x": "code"}', '["code", "a"]', '{"a": {"code": "x"}}', ""])
def test_what_is_no_text_argument_of_the_call_is_left_out(text: str) -> None:
    argument = ArgumentText()

    assert (argument.feed(text), argument.is_whole) == ("", False)
