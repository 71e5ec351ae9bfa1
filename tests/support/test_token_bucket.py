"""`TokenBucket`: some at once, one more after each interval."""

from __future__ import annotations

import pytest

from toolcell.support.token_bucket import TokenBucket

pytestmark = pytest.mark.quick


def test_some_are_there_at_once_and_one_more_after_each_interval() -> None:
    bucket = TokenBucket(2.0, 3)
    assert [bucket.take(100.0) for _ in range(5)] == [0, 0, 0, 2.0, 4.0]
    assert bucket.wait_s(101.0) == 5.0 and bucket.wait_s(101.0) == 5.0  # asking takes nothing
    assert bucket.wait_s(106.0) == 0.0
    assert bucket.wait_s(1000.0, 3) == 0.0 and bucket.wait_s(1000.0, 4) == 2.0  # no more than the burst come back


def test_a_clock_that_goes_back_gives_and_takes_nothing() -> None:
    bucket = TokenBucket(1.0, 1)
    assert bucket.take(10.0) == 0.0
    assert bucket.take(5.0) == 1.0


def test_without_an_interval_nobody_waits() -> None:
    bucket = TokenBucket(0.0, 1)
    assert [bucket.take(0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
