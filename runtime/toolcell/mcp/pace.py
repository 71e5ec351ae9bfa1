"""`Pace`: how fast notifications of an MCP server are read.

They need no request, so nothing else bounds their number. A server that sends more of them waits: its pipe or
connection is not read meanwhile, and nothing is dropped.
"""

from __future__ import annotations

import logging

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification

NOTIFICATIONS_PER_S = 500.0
BURST = 1000
"""Notifications that may come at once."""

logger = logging.getLogger("toolcell.mcp")


class Pace:
    """The pace of one connection."""

    def __init__(self, name: str) -> None:
        """`name`: what is connected with, for the log."""
        self._name = name
        self._due = 0.0
        """When the notifications so far would have come, had they come at the rate."""
        self.is_slowed = False
        """It has had to wait."""

    def pause_after(self, now: float) -> float:
        """Return the seconds to wait after one more notification."""
        self._due = max(self._due, now - BURST / NOTIFICATIONS_PER_S) + 1 / NOTIFICATIONS_PER_S
        return max(0.0, self._due - now)

    async def wait(self, message: object) -> None:
        """Wait before the next message is read, if this is a notification and there were too many."""
        if not isinstance(message, SessionMessage) or not isinstance(message.message, JSONRPCNotification):
            return
        pause_s = self.pause_after(anyio.current_time())
        if not pause_s:
            return
        if not self.is_slowed:
            self.is_slowed = True
            logger.warning(
                "MCP server %s: it sends more than %g notifications a second; it is read no faster",
                self._name, NOTIFICATIONS_PER_S,
            )  # fmt: skip
        await anyio.sleep(pause_s)
