"""HTTPS of scripts: the host verifies certificates, and each library raises what it raises outside."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from toolcell import PoolConfig, SyncRuntime
from toolcell.egress import Allow, Egress, connector

from .http_server import serving
from .library_uses import ALL_PACKAGES, DRIVER

pytestmark = pytest.mark.isolation

OUTSIDE = f"import json, sys\nglobals().update(json.load(sys.stdin))\n{DRIVER}\nprint(json.dumps(answers))"

USES = {
    "urllib": """
        from urllib.request import urlopen
        return [urlopen(GOOD).read().decode(), *(failure(lambda: urlopen(each)) for each in BAD)]
    """,
    "http.client": """
        from http.client import HTTPSConnection
        def get(url):
            connection = HTTPSConnection(url.split("/")[2])
            connection.request("GET", "/plain")
            return connection.getresponse().read().decode()
        return [get(GOOD), *(failure(lambda: get(each)) for each in BAD)]
    """,
    "requests": """
        import requests
        return [requests.get(GOOD).text, *(failure(lambda: requests.get(each)) for each in BAD)]
    """,
    "urllib3": """
        import urllib3
        def get(url):
            return urllib3.request("GET", url, retries=False)
        return [get(GOOD).data.decode(), *(failure(lambda: get(each)) for each in BAD)]
    """,
    "httpx": """
        import httpx
        return [httpx.get(GOOD).text, *(failure(lambda: httpx.get(each)) for each in BAD)]
    """,
    "async httpx": """
        import httpx
        async with httpx.AsyncClient() as client:
            return [(await client.get(GOOD)).text, *[await failure_of(client.get(each)) for each in BAD]]
    """,
    "aiohttp": """
        import aiohttp
        async with aiohttp.ClientSession() as session:
            async def get(url):
                async with session.get(url) as answer:
                    return await answer.text()
            return [await get(GOOD), *[await failure_of(get(each)) for each in BAD]]
    """,
}


class Authority:
    """Signs certificates of servers on loopback."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _name("authority of this test")
        self.file = folder / "authority.pem"
        made = (
            _builder(self._name, self._name, self._key, signer=self._key, days=1)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**{**dict.fromkeys(USAGES, False), "key_cert_sign": True}), critical=True)
        )
        self.file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def context(self, *, host: str = "127.0.0.1", days: int = 1, is_signed: bool = True) -> ssl.SSLContext:
        """Return the settings of a server. `days`: from now, until its certificate expires."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("server")
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        issuer, signer = (self._name, self._key) if is_signed else (name, key)
        made = _builder(name, issuer, key, signer=signer, days=days).add_extension(names, critical=False)
        file = self._folder / f"{host}{days}{is_signed}.pem"
        certificate = made.sign(signer, hashes.SHA256())
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        pem = serialization.Encoding.PEM
        file.write_bytes(certificate.public_bytes(pem) + key.private_bytes(pem, *form))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign",
    "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.CertificateBuilder:
    """Begin a certificate with what Python 3.13 and newer ask for."""
    now, number = datetime.datetime.now(datetime.UTC), x509.random_serial_number()
    start, end = now - datetime.timedelta(days=3), now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), number, start, end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A good server and bad ones, and where their authority stands."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    contexts = [
        authority.context(),
        authority.context(days=-1),
        authority.context(host="127.0.0.2"),
        authority.context(is_signed=False),
    ]
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(tls=each)) for each in contexts]
        good, *bad = [f"{server.url}/plain" for server in servers]
        yield {"GOOD": good, "BAD": bad, "file": str(authority.file), "ports": [each.server_port for each in servers]}


@pytest.fixture
def egress(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Egress]:
    """Rules of a host whose environment names the authority."""
    monkeypatch.setenv("SSL_CERT_FILE", given["file"])
    connector.tls_context.cache_clear()
    yield Egress(Allow("127.0.0.1", ports=given["ports"]))
    connector.tls_context.cache_clear()


def test_certificates_fail_in_each_library_as_they_do_outside(given: dict[str, Any], egress: Egress) -> None:
    values = {"USES": USES, "GOOD": given["GOOD"], "BAD": given["BAD"]}
    env = {**os.environ, "REQUESTS_CA_BUNDLE": given["file"]}

    ran = subprocess.run(
        [sys.executable, "-c", OUTSIDE], input=json.dumps(values), capture_output=True, text=True, check=True, env=env
    )
    with SyncRuntime(packages=ALL_PACKAGES, egress=egress, pool=PoolConfig(warm=0)) as runtime:
        result = runtime.execute_code(f"{DRIVER}\nset_result(json.dumps(answers))", inputs=values)

    assert isinstance(result.value, str), result.error
    outside, inside = json.loads(ran.stdout), json.loads(result.value)
    assert [each[0] for each in outside.values()] == ["plain text"] * len(USES)
    assert {name: inside[name] for name in USES if inside[name] != outside[name]} == {}


def test_the_error_says_what_is_wrong_with_the_certificate(given: dict[str, Any], egress: Egress) -> None:
    script = """
import ssl, urllib.error, urllib.request
said = []
for url in BAD:
    try:
        urllib.request.urlopen(url, context=ssl._create_unverified_context())
    except urllib.error.URLError as error:
        said.append(str(error.reason))
set_result(said)
"""
    with SyncRuntime(egress=egress, pool=PoolConfig(warm=0)) as runtime:
        result = runtime.execute_code(script, inputs={"BAD": given["BAD"]})

    expired, other, unknown = result.value
    assert "certificate has expired" in expired
    assert "IP address mismatch" in other
    assert "self-signed certificate" in unknown


def test_without_the_authority_its_servers_are_not_trusted(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    connector.tls_context.cache_clear()
    with SyncRuntime(egress=Egress(Allow("127.0.0.1", ports=given["ports"]))) as runtime:
        result = runtime.execute_code(
            "import urllib.request\nurllib.request.urlopen(GOOD)", inputs={"GOOD": given["GOOD"]}
        )

    assert result.error is not None and "CERTIFICATE_VERIFY_FAILED" in result.error.message
