"""How the service is reached: TLS, proxies, and which settings of access go together."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.testclient import TestClient
from typer.testing import CliRunner

from rows import each_row
from toolcell.cli import build
from toolcell.errors import UsageError
from toolcell.service import ServiceConfig, TenantConfig, create_app
from toolcell.service.authentication import FORWARDED
from toolcell.service.principal import Scope
from toolcell.service.service import Service
from toolcell.service.tokens import TokenDatabase


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(1))
        .add_extension(address, critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_file, key_file


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """Run `toolcell serve` and yield its URL."""
    command = [sys.executable, "-m", "toolcell", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            match = re.fullmatch(r"serving (\S+)\n", line)
            assert match is not None, line + process.stderr.read()
            yield match[1]
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def tokens(tmp_path: Path) -> tuple[Path, str]:
    store = TokenDatabase(tmp_path / "tokens.db")
    text = store.create("acme", [Scope.READ]).text
    store.close()
    return store.path, text


@pytest.mark.isolation
def test_with_a_certificate_it_speaks_tls_and_nothing_else(
    certificate: tuple[Path, Path], tokens: tuple[Path, str], tmp_path: Path
) -> None:
    cert, key = certificate
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--tokens", str(tokens[0]), "--state", str(tmp_path / "s"))
    headers = {"Authorization": f"Bearer {tokens[1]}"}
    with served("--host", "127.0.0.1", *flags) as url:
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=ssl.create_default_context(cafile=cert), timeout=60) as client:
            assert client.get(f"{url}/v1/tools", headers=headers).status_code == 200
            assert client.get(f"{url}/v1/tools").status_code == 401
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/healthz")


def refusal(*flags: str) -> str:
    done = CliRunner().invoke(build(["serve"]), ["serve", "--port", "0", *flags])
    assert done.exit_code == 2, done
    return done.stderr


@pytest.mark.slow
def test_settings_of_access_that_cannot_work_are_refused_at_the_start(
    certificate: tuple[Path, Path], tokens: tuple[Path, str], tmp_path: Path
) -> None:
    cert, key = map(str, certificate)
    state = ("--state", str(tmp_path / "state"))

    assert "tls_cert and tls_key belong together" in refusal("--tls-cert", cert, *state)
    assert "cannot be used" in refusal("--tls-cert", key, "--tls-key", key, *state)
    assert "could run code" in refusal("--host", "0.0.0.0", *state)
    assert "toolcell tokens create" in refusal("--tokens", str(tmp_path / "missing.db"), *state)
    assert "belong together" in refusal("--oidc", "https://issuer.example", *state)
    assert "https" in refusal("--oidc", "http://issuer.example", "--audience", "a", *state)
    assert "not an address" in refusal("--trusted-proxies", "*", "--tokens", str(tokens[0]), *state)


@each_row("proxies", [["*"], ["0.0.0.0/33"], ["proxy.example"], [""], ["10.0.0.1/8"]], ids=str)
def test_a_proxy_is_named_by_address_or_network(proxies: list[str]) -> None:
    with pytest.raises((UsageError, ValueError), match="trusted_proxies"):
        ServiceConfig(trusted_proxies=tuple(proxies))


def attempts_from(service: Service) -> set[str]:
    """Return the addresses from which wrong tokens were counted."""
    return set(service.authenticator._attempts._wrong)  # type: ignore[attr-defined]


@each_row(
    ("client", "forwarded", "counted"),
    [
        ("192.0.2.9", ["198.51.100.7"], "192.0.2.9"),  # nobody whom we believe
        ("10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["1.1.1.1, 198.51.100.7"], "198.51.100.7"),  # the client wrote the first one itself
        ("10.0.0.1", ["1.1.1.1", "198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["198.51.100.7, 10.0.0.2"], "198.51.100.7"),
        ("10.0.0.1", ["127.0.0.1, 198.51.100.7, 10.0.0.2"], "198.51.100.7"),
        ("10.0.0.1", [], "10.0.0.1"),
    ],
)
def test_only_named_proxies_say_where_a_request_comes_from(
    tokens: tuple[Path, str], tmp_path: Path, client: str, forwarded: list[str], counted: str
) -> None:
    config = ServiceConfig(state=tmp_path / "state", tokens=tokens[0], trusted_proxies=("10.0.0.0/24",))
    service = Service(config)
    with TestClient(create_app(service), client=(client, 1)) as http:
        headers = [("X-Forwarded-For", each) for each in forwarded]
        headers += [("Authorization", "Bearer wrong"), ("Forwarded", "for=127.0.0.1"), ("X-Real-IP", "127.0.0.1")]
        assert http.get("/v1/tools", headers=headers).status_code == 401  # type: ignore[arg-type]
        assert attempts_from(service) == {counted}


def test_without_tokens_a_proxy_lets_nobody_in(tmp_path: Path) -> None:
    config = ServiceConfig(state=tmp_path / "state", trusted_proxies=("127.0.0.1",))
    with TestClient(create_app(config), base_url="http://localhost", client=("127.0.0.1", 1)) as http:
        for value in ("127.0.0.1", "198.51.100.7"):
            assert http.get("/v1/tools", headers={"X-Forwarded-For": value}).status_code == 401


def test_the_commands_of_tokens_make_list_rotate_and_revoke(tmp_path: Path) -> None:
    def tokens_(*words: str) -> str:
        command = [sys.executable, "-m", "toolcell", "tokens", *words, "--tokens", str(tmp_path / "t.db")]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    text = tokens_("create", "acme", "--name", "ci", "--scope", "read").strip()
    ident = text.split("_")[1]
    assert text not in tokens_("list") and ident in tokens_("list", "acme")
    new = tokens_("rotate", ident, "--overlap", "1h").strip()
    tokens_("revoke", ident)
    store = TokenDatabase(tmp_path / "t.db")
    states = [each.state(store.now()) for each in (store.find(text), store.find(new)) if each is not None]
    store.close()
    assert states == ["revoked", "active"]


@each_row("name", FORWARDED)
def test_without_tokens_nothing_that_a_proxy_forwarded_is_let_in(tmp_path: Path, name: str) -> None:
    app = create_app(ServiceConfig(state=tmp_path / "state"))
    client = TestClient(app, base_url="http://localhost", client=("127.0.0.1", 50_000))

    assert client.get("/metrics").status_code == 200
    assert client.get("/metrics", headers={name: "192.0.2.1"}).status_code == 401


@each_row("host", ["somebody@127.0.0.1", "127.0.0.1/x", "localhost?x", "localhost#x", "localhost:x"])
def test_without_tokens_a_host_is_a_name_and_a_port(tmp_path: Path, host: str) -> None:
    app = create_app(ServiceConfig(state=tmp_path / "state"))
    client = TestClient(app, base_url="http://localhost", client=("127.0.0.1", 50_000))

    assert client.get("/metrics", headers={"Host": host}).status_code == 401


SCOPES = {
    "POST /v1/execute": "execute",
    "POST /v1/plan": "execute",
    "GET /v1/runs": "read",
    "GET /v1/runs/x": "read",
    "POST /v1/runs/x/replay": "execute read",
    "GET /v1/suspended": "read",
    "GET /v1/suspended/x": "read",
    "POST /v1/suspended/x/decide": "approve",
    "POST /v1/drafts/x/commit": "approve",
    "POST /v1/runs/x/revert": "approve",
    "POST /v1/sessions": "execute",
    "GET /v1/sessions": "read",
    "GET /v1/sessions/x": "read",
    "DELETE /v1/sessions/x": "execute",
    "POST /v1/sessions/x/execute": "execute",
    "POST /v1/sessions/x/files": "execute",
    "GET /v1/sessions/x/files": "execute",
    "PUT /v1/sessions/x/files/x": "execute",
    "GET /v1/sessions/x/files/x": "execute",
    "POST /v1/sessions/x/interrupt": "execute",
    "POST /v1/sessions/x/reset": "execute",
    "POST /v1/sessions/x/abandon": "execute",
    "POST /v1/sessions/x/fork": "execute",
    "GET /v1/tools": "read",
    "GET /v1/stubs": "read",
    "GET /v1/tools/x": "read",
}
"""What each route needs. A session's files are what its scripts are: they are read and written by who may run some."""


@pytest.mark.quick
def test_each_route_needs_its_scopes_and_no_others(tmp_path: Path) -> None:
    """A token that has them is let in, and one that has all others is not; `admin` has all of its tenant."""
    grantable = {Scope.EXECUTE, Scope.READ, Scope.APPROVE, Scope.OPERATOR}
    store = TokenDatabase(tmp_path / "tokens.db")
    tokens = {
        frozenset(chosen): store.create("acme", list(chosen)).text
        for size in range(1, len(grantable) + 1)
        for chosen in itertools.combinations(sorted(grantable), size)
    }
    admin = store.create("acme", [Scope.ADMIN]).text
    store.close()
    config = ServiceConfig(state=tmp_path / "state", tokens=store.path, tenants={"acme": TenantConfig()})
    found = dict[str, str]()
    with TestClient(create_app(config), base_url="http://localhost") as http:

        def is_let_in(route: str, token: str) -> bool:
            method, _, path = route.partition(" ")
            answer = http.request(method, path, headers={"Authorization": f"Bearer {token}"} if token else {})
            assert answer.status_code not in (405, 500), answer.text
            return answer.status_code not in (401, 403)

        document = http.get("/v1/openapi.json").json()
        for path, methods in document["paths"].items():
            for method in methods if path.startswith("/v1/") else ():
                route = f"{method.upper()} {re.sub('{.*?}', 'x', path)}"
                if is_let_in(route, ""):
                    continue  # what says how to ask
                needed = [each for each in grantable if not is_let_in(route, tokens[frozenset(grantable - {each})])]
                assert is_let_in(route, tokens[frozenset(needed)]) and is_let_in(route, admin), route
                found[route] = " ".join(sorted(needed))

    assert found == SCOPES
