"""TLS of the connections to nodes, without a socket."""

from __future__ import annotations

import ssl

import pytest

pytest.importorskip("cryptography")

from rows import each_row
from toolcell.sandbox.node.connection import SecureChannel, context_of_caller, context_of_node

NODE = context_of_node()


def both() -> tuple[SecureChannel, SecureChannel]:
    """A caller and a node that have shaken hands."""
    caller, node = SecureChannel(context_of_caller(NODE[1]), is_node=False), SecureChannel(NODE[0], is_node=True)
    said = caller.take(b"")[0]
    while not (caller.is_ready and node.is_ready):
        said = node.take(said)[0]
        said = caller.take(said)[0]
    return caller, node


@each_row("size", [0, 1, 16_384, 16_385, 1_000_000])
@each_row("piece", [1_000, 1 << 30])
def test_all_of_a_message_arrives_both_ways(size: int, piece: int) -> None:
    for one, other in (both(), both()[::-1]):
        data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        sealed = one.seal(data) + one.seal(b"end")
        got = b"".join(other.take(sealed[at : at + piece])[1] for at in range(0, len(sealed), piece))
        assert got == data + b"end"
        assert size < 16 or data not in sealed


def test_what_was_changed_repeated_or_left_out_on_the_way_is_refused() -> None:
    for change in (lambda a, b: a[:-1] + bytes([a[-1] ^ 1]), lambda a, b: a + a, lambda a, b: b):
        caller, node = both()
        with pytest.raises(ssl.SSLError):
            node.take(change(caller.seal(b"one"), caller.seal(b"two")))


def test_another_nodes_certificate_is_refused_and_so_is_a_stranger() -> None:
    caller = SecureChannel(context_of_caller(context_of_node()[1]), is_node=False)
    answer = SecureChannel(NODE[0], is_node=True).take(caller.take(b"")[0])[0]
    with pytest.raises(ssl.SSLCertVerificationError):
        caller.take(answer)
    with pytest.raises(ssl.SSLError):
        SecureChannel(NODE[0], is_node=True).take(b"GET / HTTP/1.1\r\n\r\n")


def test_nothing_older_than_tls_1_3_is_spoken() -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        SecureChannel(NODE[0], is_node=True).take(SecureChannel(old, is_node=False).take(b"")[0])
