"""Count the calls of each tool: how many, how many failed, and how long they took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def tool_table(rows: Iterable[tuple[str, str, int | None]]) -> list[dict[str, Any]]:
    """Shape: [{"tool", "calls", "failed", "p50_ms", "p95_ms", "total_s"}], most called first."""
    by_tool: dict[str, list[tuple[str, int | None]]] = {}
    for tool, status, duration_us in rows:
        by_tool.setdefault(tool, []).append((status, duration_us))
    table = []
    for tool, calls in by_tool.items():
        durations = [each for _, each in calls if each is not None] or [0]
        table.append(
            {
                "tool": tool,
                "calls": len(calls),
                "failed": sum(status not in ("ok", "pending") for status, _ in calls),
                "p50_ms": durations[len(durations) // 2] / 1000,
                "p95_ms": durations[min(len(durations) - 1, len(durations) * 95 // 100)] / 1000,
                "total_s": sum(durations) / 1e6,
            }
        )
    return sorted(table, key=lambda row: (-row["calls"], row["tool"]))
