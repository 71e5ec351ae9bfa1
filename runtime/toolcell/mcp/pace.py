"""`Pace`: how fast an MCP server is read, as far as it sends what answers no request of ours.

Nothing else bounds the number of notifications, pings, questions, blank lines and answers to nothing. A server that
sends more of them waits: its pipe or connection is not read meanwhile, and nothing is dropped.
"""

from __future__ import annotations

import anyio

from toolcell.support.log import logger_of
from toolcell.support.token_bucket import TokenBucket

MESSAGES_PER_S = 500.0
BURST = 1000
"""Messages that may come at once."""
LINES_PER_S = 5_000.0
LINE_BURST = 20_000
"""Lines of a stream of events: each message takes some, and there are some without a message."""

logger = logger_of("toolcell.mcp")


class Pace:
    """The pace of one connection."""

    def __init__(
        self,
        name: str,
        what: str = "messages a second that answer no request",
        rate: tuple[float, int] | None = None,
    ) -> None:
        """`name`: what is connected with, for the log. `rate`: how many may come in a second, and at once."""
        self._name, self._what = name, what
        self._per_s, burst = rate or (MESSAGES_PER_S, BURST)
        self._bucket = TokenBucket(1 / self._per_s, burst)
        self.is_slowed = False
        """It has had to wait."""

    def pause_after(self, now: float, count: int = 1) -> float:
        return self._bucket.take(now, count)

    async def wait(self, count: int = 1) -> None:
        """Wait before more is read, if there was too much."""
        pause_s = self.pause_after(anyio.current_time(), count)
        if not pause_s:
            return
        if not self.is_slowed:
            self.is_slowed = True
            logger.warning(
                "MCP server %s: it sends more than %g %s; it is read no faster", self._name, self._per_s, self._what
            )
        await anyio.sleep(pause_s)
