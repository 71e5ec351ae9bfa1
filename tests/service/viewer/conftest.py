"""One browser for all tests of the viewer that a process runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from service.viewer.watching import Chromium


@pytest.fixture(scope="package")
def chromium() -> Iterator[Chromium]:
    from service.viewer.watching import Chromium  # only tests with a browser need its packages

    with Chromium() as browser:
        yield browser
