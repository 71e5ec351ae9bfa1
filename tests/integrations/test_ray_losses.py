"""A Ray cluster whose head goes away, with and without a place where Ray keeps its state, and a network that is cut."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integrations.conftest import needs

needs("ray")

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("ray_losses.py")


def told(what: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def redis() -> Iterator[str]:
    """Where Ray keeps the state of its head."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("Redis is not installed: apt-get install redis-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([program, "--port", str(port), "--save", ""], stdout=subprocess.DEVNULL) as server:
        until = time.monotonic() + 30
        while not is_open(port):
            assert time.monotonic() < until
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
        server.terminate()


def test_runs_go_on_and_begin_while_the_head_is_away() -> None:
    result = told("head")

    assert result["long"] == ["ok", 7] and result["nodes"] == 2
    assert len(result["meanwhile"]) >= 3 and set(result["meanwhile"]) == {2}


def test_a_head_that_comes_back_with_its_state_is_not_missed(redis: str) -> None:
    result = told("head", RAY_REDIS_ADDRESS=redis)

    assert result["long"] == ["ok", 7] and result["nodes"] == 2
    assert result["after"] == [2] * 10


def test_a_program_whose_cluster_is_gone_closes_and_goes_on() -> None:
    result = told("cluster")

    assert result["before"] == 2
    assert result["closed_after_s"] < 30  # Ray ends a process that still waits for it after a minute


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for a network")
def test_a_node_whose_network_is_cut_loses_its_runs_ends_them_and_is_used_again() -> None:
    result = told("network")

    assert [outcome for outcome, _ in result["lost"]] == ["lost"] * 2 and result["before"] == 2
    assert all(after_s < 45 for _, after_s in result["lost"]), result
    assert result["empty_after_s"] < 45 and result["after"] == 2
