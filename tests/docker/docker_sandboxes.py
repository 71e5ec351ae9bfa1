"""Single containers for tests: with a guest, or with a plain program instead of a guest."""

from __future__ import annotations

import datetime
import ipaddress
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from toolcell import Limits
from toolcell.run.connection import GuestConnection
from toolcell.sandbox.docker.backend import DockerBackend
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.container import DockerSandbox, Engine
from toolcell.sandbox.docker.hardening import Blueprint, container_config

MIB = 1 << 20
DATA_PACKAGES = ["joblib", "numpy", "pandas"]
"""One image for all tests that need some of these."""

LIMITS = Limits(memory_bytes=128 * MIB, processes=40, disk_bytes=8 * MIB, inodes=64, open_files=64, wall_s=20)


@asynccontextmanager
async def opened(image: str, **options: Any) -> AsyncIterator[DockerBackend]:
    """Open a backend."""
    backend = DockerBackend(image, **options)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def greeted(
    backend: DockerBackend, limits: Limits = LIMITS
) -> AsyncIterator[tuple[GuestConnection, DockerSandbox]]:
    """Start a sandbox and wait for its Hello."""
    sandbox = await backend.start(limits)
    assert isinstance(sandbox, DockerSandbox)
    connection = GuestConnection(sandbox)
    await connection.hello()
    try:
        yield connection, sandbox
    finally:
        await sandbox.destroy()


async def containers_of(client: EngineClient, label: str, value: str | None = None) -> list[str]:
    """Return the ids of the containers with a label."""
    return [each["Id"] for each in await client.list({label: value})]


PROLOGUE = """\
import ctypes, errno, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return result if result >= 0 else errno.errorcode[ctypes.get_errno()]
def refused(action):
    try:
        return repr(action())
    except OSError as error:
        return errno.errorcode[error.errno]
def status(name):
    return next((l.split(None, 1)[1].strip() for l in open('/proc/self/status') if l.startswith(name + ':')), None)
"""


async def bare(engine: Engine, source: str, limits: Limits = LIMITS, runtime: str | None = None) -> Any:
    """Run `source` instead of a guest, so that only the container's own layers isolate it; return its JSON output."""
    blueprint = Blueprint(engine.image.id, runtime=runtime, labels=engine.labels)
    config = container_config(blueprint, limits) | {"Entrypoint": ["python3", "-I", "-B", "-c", PROLOGUE + source]}
    container = await engine.launch(config, blueprint, limits)
    try:
        pieces = []
        with anyio.fail_after(60):
            while piece := await container.stream.receive():
                pieces.append(piece)
        text = b"".join(pieces).decode()
        assert text, container.stream.take_output().decode()
        return json.loads(text)
    finally:
        await container.destroy()


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for 127.0.0.1; return the paths of certificate and key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"
