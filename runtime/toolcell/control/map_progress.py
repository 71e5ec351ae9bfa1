"""`MapProgress`: the progress bar of `Runtime.map`, on stderr and only on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from toolcell.control.map_item import MapItem

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESHES: Final = 5
"""In a second."""


class MapProgress:
    """Counts the items that have ended, and those that failed."""

    def __init__(self, name: str, total: int | None) -> None:
        """`total`: None when nobody knows."""
        from rich.console import Console

        self.failed = 0
        self._name = name
        self._total = total
        self._console = Console(stderr=True)
        self._bar: Progress | None = None

    def start(self) -> None:
        """Show the bar, if this is a terminal."""
        if not self._console.is_terminal:
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed", style="red"),
            TextColumn("{task.fields[rate]}", style="dim"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=REFRESHES,
        )
        self._task = self._bar.add_task(self._name, total=self._total, failed=0, rate="")
        self._bar.start()

    def count(self, item: MapItem) -> None:
        """Count an item that has ended."""
        self.failed += not item.ok
        if self._bar is not None:
            speed = self._bar.tasks[0].speed
            rate = f"{speed:.0f}/s" if speed else ""
            self._bar.update(self._task, advance=1, failed=self.failed, rate=rate)

    def stop(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
