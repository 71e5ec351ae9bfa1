"""One event loop will do for tools: anyio hides which. Files about cancellation, which differs, ask for two."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
