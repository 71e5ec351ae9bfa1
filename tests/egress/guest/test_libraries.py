"""HTTP libraries in a sandbox do what they do outside, against the same server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rows import each_row
from toolcell import Limits, PoolConfig, SyncRuntime
from toolcell.egress import Allow, Egress

from .http_server import Server, serving
from .library_uses import ALL_PACKAGES, DRIVER, LIBRARIES

pytestmark = pytest.mark.isolation

OUTSIDE = f"import json, sys\nglobals().update(json.load(sys.stdin))\n{DRIVER}\nprint(json.dumps(answers))"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def closed_port() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.fixture(scope="module")
def runtime(server: Server, closed_port: int) -> Iterator[SyncRuntime]:
    egress = Egress(
        Allow("http://127.0.0.1", ports=[server.server_port, closed_port], methods=["*"], headers=["X-Test"])
    )
    limits = Limits(wall_s=30, processes=64)
    with SyncRuntime(packages=ALL_PACKAGES, limits=limits, egress=egress, pool=PoolConfig(warm=0)) as runtime:
        yield runtime


@each_row("library", LIBRARIES)
def test_a_library_does_in_a_sandbox_what_it_does_outside(
    server: Server, closed_port: int, runtime: SyncRuntime, library: str
) -> None:
    uses = LIBRARIES[library]
    given = {"USES": uses, "BASE": server.url, "CLOSED": f"http://127.0.0.1:{closed_port}"}
    ran = subprocess.run(
        [sys.executable, "-c", OUTSIDE], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    result = runtime.execute_code(f"{DRIVER}\nset_result(json.dumps(answers))", inputs=given)

    assert isinstance(result.value, str), result.error
    outside, inside = json.loads(ran.stdout), json.loads(result.value)
    assert [feature for feature in uses if isinstance(outside[feature], dict) and "raised" in outside[feature]] == []
    assert {feature: inside[feature] for feature in uses if inside[feature] != outside[feature]} == {}
