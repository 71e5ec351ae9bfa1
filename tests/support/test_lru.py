"""`Lru`: what was put or used least recently goes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcell.support.lru import Lru

pytestmark = pytest.mark.quick


def test_the_entry_that_was_put_or_used_least_recently_goes_first() -> None:
    lru: Lru[str, int] = Lru(2)
    assert lru.put("a", 1) == lru.put("b", 2) == []
    assert lru.use("a") == 1 and lru.use("x") is None
    assert lru.get("b") == 2  # reading is no use
    assert lru.put("c", 3) == [2]
    assert lru.put("a", 4) == [] and list(lru.items()) == [("c", 3), ("a", 4)]
    assert lru.pop("c") == 3 and lru.pop("c") is None
    assert lru.pop("a") == 4 and len(lru) == 0


def test_sizes_add_up_to_the_limit_and_the_latest_entry_always_stays() -> None:
    lru: Lru[int, list[int]] = Lru(10, 5)
    first, second = [1, 2], [1, 2]
    assert lru.put(1, first, 2) == lru.put(2, second, 2) == []
    assert lru.put(1, first, 3) == []  # in place of the size that it had
    first += [3, 4, 5, 6]
    lru.measure(len)  # it has grown since it was put, and is the latest
    assert lru.put(3, []) == [second, first]
    assert lru.put(4, [0] * 100, 100) == [[]] and list(lru) == [4]
    assert lru.pop(4) is not None and lru.put(5, [], 5) == []
    assert lru.pop(5) == [] and lru.put(6, [], 5) == lru.put(7, []) == []


@given(st.lists(st.integers(0, 5)), st.integers(1, 4))
def test_it_holds_the_latest_different_keys(keys: list[int], most: int) -> None:
    lru: Lru[int, int] = Lru(most)
    for key in keys:
        lru.put(key, key)
    assert [*lru][::-1] == list(dict.fromkeys(keys[::-1]))[:most]
