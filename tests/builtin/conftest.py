"""One PostgreSQL server for all tests of a process that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from builtin_stores import running_server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with running_server() as address:
        yield address
