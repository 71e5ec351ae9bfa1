"""One browser for all tests of the viewer that a process runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.viewer.watching import Chromium


@pytest.fixture(scope="package")
def chromium() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser
