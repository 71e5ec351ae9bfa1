"""`TokenBucket`: how often something may happen. Some at once, and one more after each interval."""

from __future__ import annotations


class TokenBucket:
    """Has `burst` tokens at most, and gets one more every `interval_s`. The caller says what time it is."""

    __slots__ = ("_at", "_burst", "_interval_s", "_used")

    def __init__(self, interval_s: float, burst: float) -> None:
        self._interval_s, self._burst = interval_s, burst
        self._used, self._at = 0.0, 0.0
        """Tokens that were taken and have not come back, at that time."""

    def wait_s(self, now: float, count: float = 1) -> float:
        """Return how long it takes until there are `count` tokens; 0 if there are."""
        return max(0.0, (self._used_at(now) + count - self._burst) * self._interval_s)

    def take(self, now: float, count: float = 1) -> float:
        """Take `count` tokens, also before they are there; return how long it takes until they are."""
        wait_s = self.wait_s(now, count)
        self._used, self._at = self._used_at(now) + count, now
        return wait_s

    def give_back(self, now: float, count: float = 1) -> None:
        """Give back tokens that were taken and not used."""
        self._used, self._at = max(0.0, self._used_at(now) - count), now

    def _used_at(self, now: float) -> float:
        return max(0.0, self._used - max(0.0, now - self._at) / self._interval_s) if self._interval_s else 0.0
