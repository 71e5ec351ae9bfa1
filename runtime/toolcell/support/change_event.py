"""`ChangeEvent`: an event that happens again and again. Each time, everybody who waits then goes on."""

from __future__ import annotations

import anyio


class ChangeEvent:
    """What some tasks wait for and others report, in one event loop. Look at what may have changed, then wait."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None
        """Of those who wait now. Made by the first: without one, a report costs nothing and needs no event loop."""

    def notify(self) -> None:
        """Wake everybody who waits now."""
        event, self._event = self._event, None
        if event is not None:
            event.set()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        event = self._event = self._event or anyio.Event()
        try:
            await event.wait()
        finally:
            # The last one to be cancelled leaves none: whoever waits next may be in another event loop.
            if self._event is event and not event.statistics().tasks_waiting:
                self._event = None
