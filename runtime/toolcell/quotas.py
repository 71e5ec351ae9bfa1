"""Quotas: how many calls and runs, and how much CPU time, a user, a tenant or an agent may use in a time.

A quota counts over a window that slides: what was used is free again `per_s` seconds later. Several Runtimes of one
process may share a `Quotas`; nothing outlives the process.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, Literal

from toolcell.calls.call import Call, Meter
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.errors import QuotaExceeded, UsageError
from toolcell.support.checks import fields_known, keywords_known

SLOTS: Final = 60
"""Parts of a window. What was used in one is free again when the whole slot is `per_s` old."""

ROUNDING: Final = 1e-6
"""Part of a slot that is waited longer, so that rounding does not end the wait too early."""

MAX_KEYS: Final = 10_000
"""Keys after which those that use nothing are forgotten."""

Resource = Literal["runs", "calls", "cpu_s"]


@fields_known
@dataclass(frozen=True, slots=True)
class Quota:
    """What one key may use in any `per_s` seconds. None means no limit."""

    runs: int | None = None
    """Scripts and plans."""
    calls: int | None = None
    """Tool calls, wherever they come from."""
    cpu_s: float | None = None
    """CPU seconds of sandboxes. A run that has begun is not cut: its own limit is `Limits.cpu_s`."""
    per_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("runs", "calls"):
            value: object = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise UsageError(f"Quota({name}) must be a whole number of at least 0, not {value!r:.80}")
        for name, least in (("cpu_s", 0.0), ("per_s", 0.001)):
            value = getattr(self, name)
            if value is None and name == "cpu_s":
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < least:  # type: ignore[operator]
                raise UsageError(f"Quota({name}) must be a number of seconds of at least {least:g}, not {value!r:.80}")


class Window:
    """What was used of one thing in the last `per_s` seconds."""

    __slots__ = ("_slot_s", "_slots", "_total")

    def __init__(self, per_s: float) -> None:
        self._slot_s = per_s / SLOTS
        self._slots: deque[tuple[int, float]] = deque()
        self._total = 0.0

    def _forget(self, now: float) -> None:
        oldest = math.floor(now / self._slot_s) - SLOTS
        while self._slots and self._slots[0][0] < oldest:
            self._total -= self._slots.popleft()[1]
        if not self._slots:
            self._total = 0.0

    def used(self, now: float) -> float:
        """Return what was used."""
        self._forget(now)
        return self._total

    def add(self, now: float, amount: float) -> None:
        """Count what is used now."""
        self._forget(now)
        slot = math.floor(now / self._slot_s)
        if self._slots and self._slots[-1][0] >= slot:
            last, before = self._slots.pop()
            self._slots.append((last, before + amount))
        else:
            self._slots.append((slot, amount))
        self._total += amount

    def free_in_s(self, now: float, limit: float) -> float:
        """Return the seconds until less than `limit` is used; infinite when that never happens."""
        self._forget(now)
        left = self._total
        if left < limit:
            return 0.0
        for slot, amount in self._slots:
            left -= amount
            if left < limit - ROUNDING:
                return max(0.0, (slot + SLOTS + 1 + ROUNDING) * self._slot_s - now)
        return math.inf


class Quotas(Meter):
    """Counts what each key uses, and refuses what exceeds its quota. Safe in several threads."""

    @keywords_known
    def __init__(
        self,
        quota: Quota | Callable[[Any], Quota],
        *,
        by: str | Callable[[Any], Hashable] = "user_id",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`quota`: of every key, or a function of the key. `by`: the field of a `RunContext` that is the key, or a
        function of the context, such as `lambda run: run.custom["tenant"]`. Runs without a user share one key."""
        given: object = quota
        if not isinstance(given, Quota) and not callable(given):
            raise UsageError(f"Quotas takes a Quota, or a function from a key to one, not {given!r:.80}")
        if not callable(by) and by not in ("user_id", "thread_id", "channel", "chat_id"):
            raise UsageError(
                f"Quotas(by) is a field of RunContext (user_id, thread_id, ...) or a function, not {by!r:.80}"
            )
        self._quota, self._by, self._clock = quota, by, clock
        self._lock = threading.Lock()
        self._windows: dict[tuple[Hashable, Resource], Window] = {}

    def _find_quota(self, run: Any) -> tuple[Hashable, Quota]:
        try:
            key = self._by(run) if callable(self._by) else getattr(run, self._by)
            hash(key)
            quota = self._quota if isinstance(self._quota, Quota) else self._quota(key)
        except Exception as exc:
            raise UsageError(f"the quota of run {run.run_id} cannot be found: {type(exc).__name__}: {exc}") from exc
        if not isinstance(quota, Quota):
            raise UsageError(f"the quota of {key!r:.80} must be a Quota, not {quota!r:.80}")
        return key, quota

    def _window(self, key: Hashable, resource: Resource, per_s: float) -> Window:
        window = self._windows.get((key, resource))
        if window is None:
            if len(self._windows) >= MAX_KEYS:
                now = self._clock()
                self._windows = {each: window for each, window in self._windows.items() if window.used(now)}
            window = self._windows[key, resource] = Window(per_s)
        return window

    def begin_run(self, run: Any, /) -> None:
        """Count a run that is about to begin.

        Raises:
            QuotaExceeded: the key has used up its runs or its CPU time.
        """
        key, quota = self._find_quota(run)
        with self._lock:
            for resource in ("cpu_s", "runs"):
                self._check(key, quota, resource)
            if quota.runs is not None:
                self._window(key, "runs", quota.per_s).add(self._clock(), 1)

    def count_call(self, call: Call, /) -> ToolResult | None:
        """Count a tool call; return why it is refused instead, or None.

        A call that waited for a decision, or is an effect of a dry run that is made now, was counted before.
        """
        if any(waited(call) for waited in call.features.waited):
            return None
        try:
            key, quota = self._find_quota(call.run)
            if quota.calls is None:
                return None
            with self._lock:
                self._check(key, quota, "calls")
                self._window(key, "calls", quota.per_s).add(self._clock(), 1)
        except (QuotaExceeded, UsageError) as exc:
            facts = {"retry_after_s": exc.retry_after_s if isinstance(exc, QuotaExceeded) else None}
            message = f"{call.name} was not called: {exc}"
            return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, status=Status.BLOCKED, facts=facts)
        return None

    def end_run(self, run: Any, cpu_s: float, /) -> None:
        """Count the CPU time of a finished run."""
        key, quota = self._find_quota(run)
        if quota.cpu_s is not None:
            with self._lock:
                self._window(key, "cpu_s", quota.per_s).add(self._clock(), cpu_s)

    def used(self, key: Hashable) -> dict[Resource, float]:
        """Return how much of its quota a key has used."""
        now = self._clock()
        with self._lock:
            return {what: window.used(now) for (owner, what), window in self._windows.items() if owner == key}

    def _check(self, key: Hashable, quota: Quota, resource: Resource) -> None:
        limit: float | None = getattr(quota, resource)
        if limit is None:
            return
        now = self._clock()
        window = self._window(key, resource, quota.per_s)
        if window.used(now) < limit:
            return
        wait_s = window.free_in_s(now, limit)
        when = f"free again in {wait_s:.1f} s" if math.isfinite(wait_s) else "none is allowed"
        raise QuotaExceeded(
            f"the quota of {key!r:.80} is used up: {resource}={limit:g} in {quota.per_s:g} s; {when}", wait_s
        )
