"""Look a host up once, and check every address it has: exactly these are connected to.

A name that has another address a moment later (DNS rebinding) changes nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

import anyio

from toolcell.egress.addresses import IPAddress, address_of
from toolcell.errors import ToolError

MAX_ADDRESSES = 4
"""Most addresses of one host, that are tried one after the other."""


class Resolver(Protocol):
    """Looks up the addresses of hosts."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return every address of `host`, of both families, as text.

        Raises:
            OSError: the host is not known, or nobody can be asked.
        """
        ...


class AddressRules(Protocol):
    """Decides about the addresses of hosts."""

    def check_address(self, host: str, address: IPAddress) -> None:
        """Check an address of `host`.

        Raises:
            ToolError: nobody connects to it.
        """
        ...


class SystemResolver:
    """Asks the operating system."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return every address of `host`."""
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def checked_addresses(rules: AddressRules, resolver: Resolver, host: str, port: int) -> list[str]:
    """Return the addresses to try. One refused address refuses the host: it is what an attacker would add.

    Raises:
        ToolError: an address is refused, or the host is not known.
    """
    try:
        found = [host] if address_of(host) is not None else await resolver.resolve(host, port)
    except (OSError, UnicodeError) as exc:
        raise ToolError(f"the host {host} was not found: {exc}", code="unavailable", retryable=True) from exc
    addresses = [address_of(text) for text in found]
    if not addresses or None in addresses:
        raise ToolError(f"the host {host} has no address", code="unavailable", retryable=True)
    for address in addresses:
        assert address is not None
        rules.check_address(host, address)
    return [str(address) for address in addresses][:MAX_ADDRESSES]
