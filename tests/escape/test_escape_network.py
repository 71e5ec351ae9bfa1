"""Every way to get a socket: PROMISES.md, "network"."""

from __future__ import annotations

import platform
import socket
from pathlib import Path

import pytest

from escape.attack import Victim, outside
from escape.prologues import RAW, raw

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

FAMILIES = list(range(48))
TYPES = [1, 2, 3, 4, 5]


def test_no_socket_of_any_family_and_type_can_be_made(victim: Victim) -> None:
    source = raw("""
import socket
def make(family, kind):
    socket.socket(family, kind).close()
set_result({f"{family}/{kind}": attempt(make, family, kind) for family in families for kind in kinds})
""")
    made = outside(source, families=FAMILIES, kinds=TYPES).value
    assert {"1/1", "1/2", "1/5", "2/1", "2/2", "10/1", "16/3"} <= {name for name, how in made.items() if how == "ok"}
    assert set(victim.run(source, families=FAMILIES, kinds=TYPES).value.values()) == {"EPERM"}


def test_socket_pairs_are_unix_streams_and_nothing_else(victim: Victim) -> None:
    source = raw("""
import socket
def make(family, kind, protocol):
    for each in socket.socketpair(family, kind, protocol):
        each.close()
tried = {f"{family}/{kind}/{protocol}": attempt(make, family, kind, protocol)
         for family in families for kind in kinds for protocol in (0, 1, 6)}
set_result([name for name, how in tried.items() if how == "ok"])
""")
    assert "1/2/0" in outside(source, families=FAMILIES, kinds=TYPES).value
    assert set(victim.run(source, families=FAMILIES, kinds=TYPES).value) <= {"1/1/0", "1/1/1", "1/5/0", "1/5/1"}


CONNECTIONS = {
    "tcp": "socket.create_connection(('127.0.0.1', port), 1).close()",
    "tcp on every address": "socket.create_connection((socket.gethostbyname('localhost'), port), 1).close()",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))",
    "name lookup": "socket.getaddrinfo('localhost', 80)",
    "named unix socket": "socket.socket(socket.AF_UNIX).connect(named)",
    "abstract unix socket": "socket.socket(socket.AF_UNIX).connect('\\0' + abstract)",
    "datagram from a pair": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', postbox)",
    "listening": "socket.create_server(('127.0.0.1', 0)).close()",
    "listening on a path": "socket.socket(socket.AF_UNIX).bind('here')",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0))",
    "asyncio": "asyncio.run(asyncio.wait_for(asyncio.open_connection('127.0.0.1', port), 1))",
    "urllib": "urllib.request.urlopen(f'http://127.0.0.1:{port}/', timeout=0.2)",
}


@pytest.mark.parametrize("way", CONNECTIONS)
def test_nothing_of_the_host_can_be_connected_to(way: str, victim: Victim, listener: int, tmp_path: Path) -> None:
    source = f"""{RAW}
import asyncio, socket, urllib.request
def connect():
    {CONNECTIONS[way]}
set_result(attempt(connect))
"""
    named, postbox = str(tmp_path / "named"), str(tmp_path / "postbox")
    abstract = f"toolcell-attack-{listener}"
    with (
        socket.socket(socket.AF_UNIX) as stream,
        socket.socket(socket.AF_UNIX) as hidden,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as letters,
    ):
        stream.bind(named)
        stream.listen()
        hidden.bind("\0" + abstract)
        hidden.listen()
        letters.bind(postbox)
        inputs = {"port": listener, "named": named, "postbox": postbox, "abstract": abstract}
        # A connection that is taken and never answered is as good as one that is.
        assert outside(source, **inputs).value in ("ok", "TimeoutError")
        assert victim.run(source, **inputs).value in ("EPERM", "gaierror", "URLError")


def test_a_pair_cannot_be_turned_towards_somebody_else(victim: Victim, tmp_path: Path) -> None:
    """Every call that takes an address, on a real socket."""
    source = raw("""
import _socket, socket
def letter(kind):
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    return one
def tried(kind):
    return {
        "sendto": attempt(letter(kind).sendto, b"x", postbox),
        "sendmsg": attempt(_socket.socket.sendmsg, letter(kind), [b"x"], [], 0, postbox),
        "connect": attempt(letter(kind).connect, postbox),
        "bind": attempt(letter(kind).bind, "here"),
        "listen": attempt(letter(kind).listen),
        "accept": attempt(letter(kind).accept),
    }
set_result(tried(socket.SOCK_SEQPACKET if isolated else socket.SOCK_DGRAM))
""")
    postbox = str(tmp_path / "postbox")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as letters:
        letters.bind(postbox)
        letters.setblocking(False)
        assert outside(source, postbox=postbox).value["sendmsg"] == "ok"
        assert letters.recv(10) == letters.recv(10) == b"x"

        told = victim.run(source, postbox=postbox).value
        assert set(told.values()) == {"EPERM"}
        with pytest.raises(BlockingIOError):
            letters.recv(10)


def test_there_is_no_interface_but_a_loopback_that_is_down(victim: Victim) -> None:
    source = raw("""
import socket
set_result({"names": [name for _, name in socket.if_nameindex()] if attempt(socket.if_nameindex) == "ok" else [],
            "host": attempt(socket.gethostbyname, "localhost")})
""")
    assert "lo" in outside(source).value["names"]
    assert victim.run(source).value["names"] in ([], ["lo"])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are x86-64's")
def test_rings_and_kernel_aio_do_not_open_another_way_to_a_socket(victim: Victim) -> None:
    """io_uring can create and connect sockets without a system call that a filter sees."""
    source = f"""{RAW}
parameters = ctypes.create_string_buffer(120)
ring = call(425, 4, ctypes.addressof(parameters))
context = ctypes.c_ulong(0)
set_result([ring if isinstance(ring, str) else "made", call(206, 1, ctypes.addressof(context))])
"""
    made = outside(source).value
    assert made[1] == 0
    assert made[0] in ("made", "ENOSYS", "EPERM")  # some machines have switched rings off for everybody
    assert victim.run(source).value == ["EPERM", "EPERM"]
