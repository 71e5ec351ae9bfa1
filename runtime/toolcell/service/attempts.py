"""Count wrong credentials by the address that they come from, and say when an address has to wait.

Memory is bounded: the addresses that were quiet for longest are forgotten first.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable
from typing import Final

from toolcell.support.lru import Lru
from toolcell.support.token_bucket import TokenBucket

MAX_ADDRESSES: Final = 20_000
MAX_PROVED: Final = 20_000
PROVED_S: Final = 3600.0


class Attempts:
    """`allowed` wrong credentials at once from an address, and one more every `refill_s`.

    A credential that was right from an address lately is looked at even while that address has to wait: otherwise a
    client behind the same proxy could lock the others out.
    """

    def __init__(
        self, allowed: int = 10, refill_s: float = 6.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._allowed, self._refill_s, self._clock = allowed, refill_s, clock
        self._wrong: Lru[str, TokenBucket] = Lru(MAX_ADDRESSES)
        """The wrong credentials of each address."""
        self._proved: Lru[tuple[str, bytes], float] = Lru(MAX_PROVED)
        """When a credential was right last, by address and digest."""

    def wait_s(self, address: str, digest: bytes) -> int:
        """Return 0 if a credential may be looked at, or how many seconds its sender has to wait."""
        place, now = network_of(address), self._clock()
        bucket = self._wrong.get(place)
        wait_s = bucket.wait_s(now) if bucket is not None else 0.0
        if not wait_s or now - self._proved.get((place, digest), -math.inf) < PROVED_S:
            return 0
        return max(1, math.ceil(wait_s))

    def note_wrong(self, address: str) -> None:
        """Count a wrong credential."""
        place, now = network_of(address), self._clock()
        bucket = self._wrong.get(place) or TokenBucket(self._refill_s, self._allowed)
        bucket.take(now)
        self._wrong.put(place, bucket)

    def note_right(self, address: str, digest: bytes) -> None:
        """Remember a credential that was right."""
        pair = (network_of(address), digest)
        self._proved.put(pair, self._clock())


def network_of(address: str) -> str:
    """Return what counts as one address: of IPv6 the first 64 bits, because one host has all of the rest."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
