"""One host process for all attacks. It is started again if an attack stopped it."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from escape.attack import BACKEND, IS_CONTAINED, IS_PROCESS, Victim

LEFT_OUT: pytest.StashKey[Counter[str]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "process_only(reason, also=()): about layers that other backends do not have")
    config.addinivalue_line("markers", "full_only(reason): not promised in the profile container")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests of layers that this backend or profile does not have."""
    left_out: list[pytest.Item] = []
    reasons = config.stash.setdefault(LEFT_OUT, Counter())
    for item in items:
        mark = item.get_closest_marker("process_only")
        if mark is None or BACKEND in mark.kwargs["also"]:
            mark = item.get_closest_marker("full_only") if IS_CONTAINED else None
        if mark is not None:
            left_out.append(item)
            reasons[mark.args[0]] += 1
    if left_out:
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in config.stash.get(LEFT_OUT, Counter()).items():
        terminalreporter.write_line(f"{count} attacks left out here: {reason}")


@pytest.fixture(scope="session", autouse=True)
def current_image() -> None:
    """Make sure that containers run this tree's guest. An image with an older one is rebuilt on its base, in seconds."""
    if IS_PROCESS:
        return
    from toolcell.sandbox.docker.client import EngineClient
    from toolcell.sandbox.docker.images import build, reference

    client = EngineClient.connect_now()
    try:
        found = reference.find_image(client, reference.DEFAULT_IMAGE)
        assert found is not None, reference.HOW_TO_BUILD
        if not found.is_current:
            build.build_python(client, found.base, tag=found.tag)
    finally:
        client.api.close()


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    """A Ray cluster of one node on this machine, if that is where the sandboxes are to be."""
    if BACKEND != "ray":
        yield
        return
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False},
    )
    os.environ["TOOLCELL_ESCAPE_RAY"] = found.address
    try:
        yield
    finally:
        found.shutdown()


@pytest.fixture(scope="session")
def victim(cluster: None) -> Iterator[Victim]:
    """A host with default limits and the default policy."""
    host = Victim()
    yield host
    host.close()


@pytest.fixture
def listener() -> Iterator[int]:
    """A TCP port on this machine's loopback that accepts connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]
