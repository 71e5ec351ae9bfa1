"""`SecureChannel`: TLS 1.3 for the bytes of one connection between a caller and a node, without a socket of its own.

Each node makes a certificate when it starts. Ray, or the API server of Kubernetes, passes it to the caller, who takes
that one and no other.
Who the caller is, the proof of the key tells, inside.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

from toolcell.errors import MissingPackage

VALID: Final = timedelta(days=3650)
"""Longer than any actor lives. Clocks of nodes differ, so it begins a day ago."""


class SecureChannel:
    """One end. It needs `context`, and the bytes that arrive; it gives the bytes to send."""

    def __init__(self, context: ssl.SSLContext, *, is_node: bool) -> None:
        self._arrived, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._to_send, server_side=is_node)
        self.is_ready = False
        """Both ends have shaken hands."""

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Take what has arrived. Shape: (bytes to send, what the other end said).

        Raises:
            ssl.SSLError: it is not from the other end, or not the other end that is wanted.
        """
        self._arrived.write(data)
        opened = bytearray()
        try:
            if not self.is_ready:
                self._tls.do_handshake()
                self.is_ready = True
            while piece := self._tls.read(1 << 18):
                opened += piece
        except ssl.SSLWantReadError:
            pass
        return self._to_send.read(), bytes(opened)

    def seal(self, data: bytes) -> bytes:
        """Return the bytes to send for `data`. What was sealed has to be sent, and in this order."""
        remaining = memoryview(data)
        while remaining:  # it may take one record at a time
            remaining = remaining[self._tls.write(remaining) :]
        return self._to_send.read()


@lru_cache(maxsize=1024)
def context_of_caller(certificate: str) -> ssl.SSLContext:
    """Return what accepts the node with this certificate (PEM), and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is known
    context.load_verify_locations(cadata=certificate)
    return context


def context_of_node() -> tuple[ssl.SSLContext, str]:
    """Make a certificate. Shape: (context, certificate as PEM). Its key is in this process's memory only.

    Raises:
        MissingPackage: the package cryptography is not there.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as exc:
        raise MissingPackage("TLS to a node needs cryptography: pip install cryptography") from exc
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "toolcell node")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # each connection shakes hands anew
    with open(os.memfd_create("node.pem"), "wb", buffering=0) as file:  # ssl reads files only
        file.write(pem + secret)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context, pem.decode()
