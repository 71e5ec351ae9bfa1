"""One open backend for all cases of a module, on the event loops that the module names."""

from __future__ import annotations

from typing import Any

import pytest

LOOPS = {
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}


@pytest.fixture(scope="module", params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """The event loop; a module that wants others parametrizes this indirectly."""
    return LOOPS[request.param]
