"""The SDKs of the providers, for tests that talk to their fake server."""

from __future__ import annotations

import pytest

UNFINISHED = "ignore:Exception ignored in. <async_generator:pytest.PytestUnraisableExceptionWarning"
"""Both SDKs leave generators unfinished after the last event of a stream. trio warns about that."""


@pytest.fixture(scope="session")
def sdks() -> None:
    """Import them where these tests run and not in every process that collects them: it takes seconds."""
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "sdks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings(UNFINISHED))
