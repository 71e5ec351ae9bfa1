"""`TokenBucket`: some at once, one more after each interval."""

from __future__ import annotations

import pytest

from toolcell.support.token_bucket import TokenBucket

pytestmark = pytest.mark.quick


def test_a_clock_that_goes_back_gives_and_takes_nothing() -> None:
    bucket = TokenBucket(1.0, 1)
    assert [bucket.take(10.0), bucket.wait_s(5.0), bucket.wait_s(-1000.0), bucket.take(5.0)] == [0.0, 1.0, 1.0, 1.0]
    assert bucket.wait_s(6.0) == 1.0
