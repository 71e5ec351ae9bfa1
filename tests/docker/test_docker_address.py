"""Errors for an address without a Docker daemon name the address and a remedy that helps. Needs no daemon."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rows import each_row
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker.client import START_DAEMON, EngineClient

pytestmark = pytest.mark.quick


class Refusing(http.server.BaseHTTPRequestHandler):
    """A web server that is not a Docker daemon."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def web_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"tcp://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def refusal(address: str | None = None) -> str:
    """Return the message of a failed connection."""
    with pytest.raises(SandboxUnavailable) as caught:
        EngineClient.connect_now(address)
    return str(caught.value)


def test_an_address_without_a_listener_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"unix://{tmp_path}/none.sock"
    monkeypatch.setenv("DOCKER_HOST", address)

    for message in (refusal(), refusal(address), refusal("tcp://127.0.0.1:1")):
        assert START_DAEMON in message
    assert f"no Docker daemon answers at {address} (" in refusal()
    assert "no Docker daemon answers at tcp://127.0.0.1:1 (" in refusal("tcp://127.0.0.1:1")


def test_a_socket_of_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def knock(address: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("toolcell.sandbox.docker.client.check_socket", knock)
    assert "may not talk to the Docker daemon at unix:///theirs.sock: join the group" in refusal("unix:///theirs.sock")


def test_a_server_that_is_no_daemon_is_named_as_such(web_server: str) -> None:
    message = refusal(web_server)

    assert message.startswith(
        f"what answers at {web_server} is not a Docker daemon (HTTP 404): set DOCKER_HOST to a daemon"
    )
    assert "start it" not in message


@each_row("address", ["garbage", "moon://here", "tcp://", "tcp://here:port", "fd://"])
def test_a_malformed_address_is_answered_with_the_legal_forms(address: str) -> None:
    message = refusal(address)

    assert f"'{address}' is not the address of a Docker daemon" in message
    assert "unix:///PATH, tcp://HOST:PORT or ssh://USER@HOST" in message
    assert "start it" not in message


def test_certificates_that_are_missing_are_no_reason_to_start_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")

    message = refusal()

    assert "cannot ask a Docker daemon at tcp://127.0.0.1:1 (" in message
    assert "see DOCKER_HOST, DOCKER_TLS_VERIFY and DOCKER_CERT_PATH" in message
    assert "start it" not in message


def test_ssh_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)

    message = refusal("ssh://me@there")

    assert message.startswith('ssh://me@there needs the "paramiko" package')
    assert message.endswith("pip install 'docker[ssh]'")


def test_a_host_that_ssh_does_not_reach_is_named_with_the_way_to_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class SSHException(Exception):
        """As paramiko's: not one of the SDK's, nor the system's."""

    def connect(**options: object) -> None:
        raise SSHException("Server 'there' not found in known_hosts")

    paramiko = ModuleType("paramiko")
    paramiko.SSHException = SSHException  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paramiko", paramiko)
    monkeypatch.setattr("docker.APIClient", connect)

    message = refusal("ssh://me@there")

    assert message.startswith("no Docker daemon answers at ssh://me@there (Server 'there' not found in known_hosts): ")
    assert "`ssh ssh://me@there docker version`" in message
