"""Look a host up once, and check every address it has: exactly these are connected to.

A name that has another address a moment later (DNS rebinding) changes nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Protocol

import anyio
import anyio.from_thread
import anyio.lowlevel

from toolcell.egress.addresses import IPAddress, address_of
from toolcell.errors import ToolError
from toolcell.support import daemon_threads

MAX_ADDRESSES = 4
"""Most addresses of one host, that are tried one after the other."""

MAX_LOOKUPS: Final = 4
"""Look-ups of one resolver at once."""


class Resolver(Protocol):
    """Looks up the addresses of hosts."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return every address of `host`, of both families, as text.

        Raises:
            OSError: the host is not known, or nobody can be asked.
        """
        ...


CheckAddress = Callable[[str, IPAddress], None]
"""Raises a ToolError when nobody connects to this address of a host."""


class SystemResolver:
    """Asks the operating system, in threads of its own. Used in one event loop.

    A name whose servers do not answer takes a thread for half a minute, also when nobody waits any more. So each run
    has its own resolver, and all of a loop have `daemon_threads.THREADS`.
    """

    def __init__(self) -> None:
        self._slots = anyio.CapacityLimiter(MAX_LOOKUPS)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return every address of `host`.

        Cancellation: returns at once; the thread goes on, and counts.
        """
        found, done, token = Future[list[Any]](), anyio.Event(), anyio.lowlevel.current_token()
        taken = list[anyio.CapacityLimiter]()

        def end() -> None:
            while taken:
                taken.pop().release_on_behalf_of(found)
            done.set()

        def look_up() -> None:
            try:
                found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            except Exception as exc:
                found.set_exception(exc)
            with suppress(anyio.RunFinishedError):
                anyio.from_thread.run_sync(end, token=token)

        try:
            for slots in (self._slots, daemon_threads.limiter_of(__name__)):
                await slots.acquire_on_behalf_of(found)
                taken.append(slots)
            daemon_threads.start(look_up, name="toolcell resolver")
        except BaseException:
            end()
            raise
        await done.wait()
        return list(dict.fromkeys(str(entry[4][0]) for entry in found.result()))


async def checked_addresses(check: CheckAddress, resolver: Resolver, host: str, port: int) -> list[str]:
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
        check(host, address)
    return [str(address) for address in addresses][:MAX_ADDRESSES]
