"""The Docker backend meets the contract, also with gVisor where the daemon has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from toolcell.sandbox.backend import Backend
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.client import EngineClient
from toolcell.testing import BackendHarness, Case, contract_cases, contract_lacks

KINDS: dict[str, dict[str, Any]] = {
    "runc": {},
    "gvisor": {"runtime": "runsc"},
}

pytestmark = pytest.mark.docker


def has_gvisor(client: EngineClient) -> bool:
    return "runsc" in client.api.info().get("Runtimes", {})


@pytest.fixture(scope="module", params=KINDS)
def make_backend(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    """Makes backends of one kind of container; skips, with the reason, when there is none."""
    options = KINDS[request.param]
    client = EngineClient.connect_now()
    try:
        if options.get("runtime") and not has_gvisor(client):
            pytest.skip("the daemon has no runtime runsc; README says how to register it")
    finally:
        client.api.close()
    return lambda: DockerBackend(**options)


@pytest.fixture(scope="module")
async def harness(make_backend: Callable[[], Backend], anyio_backend: Any) -> AsyncIterator[BackendHarness]:
    async with BackendHarness(make_backend, warm=2) as harness:
        yield harness


ONLY = {"gvisor": ("limits", "isolation")}
"""What another kernel changes. The other groups test guest and host, which are the same."""

CASES = [
    pytest.param(kind, case, id=f"{kind}-{case}")
    for kind, options in KINDS.items()
    for case in contract_cases(DockerBackend(**options), only=ONLY.get(kind, ()))
]


@pytest.mark.anyio
@pytest.mark.conforms("Q29")
@pytest.mark.parametrize(("make_backend", "case"), CASES, indirect=["make_backend"])
async def test_the_docker_backend_meets(case: Case, harness: BackendHarness) -> None:
    await case.run(harness)


def test_only_gvisor_lacks_anything() -> None:
    lacking = {kind: sorted(contract_lacks(DockerBackend(**options))) for kind, options in KINDS.items()}

    assert lacking["runc"] == []
    assert lacking["gvisor"] == ["limits.inodes", "limits.lowered_for_one_run", "limits.processes"]
