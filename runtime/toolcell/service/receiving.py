"""A budget in bytes for what is being received: of each tenant, and of all of them together.

A request holds its bytes from when they come until it has its place among the runs. Otherwise very many that never end,
or that wait for a place, would take the memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

FLOOR_BYTES: Final = 1 << 20
"""What each tenant may send however much others do: several of them cannot keep it out."""


class Receiving:
    """What all requests hold that are being received or wait for their place."""

    def __init__(self, most: int, most_of: Callable[[str], int]) -> None:
        """`most`: bytes of all. `most_of`: bytes of one tenant."""
        self._most, self._most_of = most, most_of
        self._held: dict[str, int] = {}

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def reservation(self, tenant: str) -> Reservation:
        """Return the share of one request, or of one client, which holds nothing yet."""
        return Reservation(self, tenant)

    def take(self, tenant: str, size: int) -> str:
        """Hold so many bytes more, and return an empty text; or hold none, and return why."""
        own, most = self._held.get(tenant, 0), self._most_of(tenant)
        if own + size > most:
            return f"this tenant may send {most} bytes at once, and {own} are on their way or wait for a place"
        if self.held_bytes + size > self._most and own + size > FLOOR_BYTES:
            return f"the service takes {self._most} bytes at once, and so many are on their way"
        self._held[tenant] = own + size
        return ""

    def give_back(self, tenant: str, size: int) -> None:
        """Hold so many bytes less."""
        left = self._held.get(tenant, 0) - size
        if left > 0:
            self._held[tenant] = left
        else:
            self._held.pop(tenant, None)


class Reservation:
    """What one request or one client holds."""

    def __init__(self, receiving: Receiving, tenant: str) -> None:
        self._receiving, self._tenant = receiving, tenant
        self.held_bytes = 0

    def take(self, size: int) -> str:
        """Hold so many bytes more, and return an empty text; or hold none, and return why."""
        why = self._receiving.take(self._tenant, size)
        self.held_bytes += 0 if why else size
        return why

    def give_back(self, size: int | None = None) -> None:
        """Hold so many bytes less; none at all with None. Safe to call twice."""
        size = self.held_bytes if size is None else min(size, self.held_bytes)
        self.held_bytes -= size
        if size:
            self._receiving.give_back(self._tenant, size)
