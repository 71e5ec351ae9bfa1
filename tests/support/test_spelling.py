"""The name that was probably meant."""

from __future__ import annotations

import time

import pytest

from toolcell.support.checks import closest, did_you_mean, suggestion

pytestmark = pytest.mark.quick


def test_the_name_that_is_most_alike_is_meant() -> None:
    assert closest("serch", ["find", "search", "searches"]) == "search"
    assert closest("zzz", ["find", "search"]) is None
    assert closest("abcd", ["abce", "xbcd"], alike=0.9) is None
    assert suggestion("serch", ["search"], "there are: x") == "did you mean search?"
    assert suggestion("zzz", ["search"], "there are: x") == "there are: x"
    assert did_you_mean("serch", ["search"], quote="") == " (did you mean search?)"
    assert did_you_mean("zzz", ["search"]) == ""


def test_work_is_bounded_whatever_the_name_is() -> None:
    began = time.process_time()
    closest("a" * 1_000_000, [f"{'a' * 60}{number}" for number in range(100_000)])
    assert time.process_time() - began < 10
