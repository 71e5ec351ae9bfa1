"""Keep Python's garbage collector from looking through what a guest sent: one pass over a long message takes 100 ms.

What is decoded is plain data without cycles. It is freed when nobody uses it, without the collector.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final, TypeVar

from toolcell.support.collector import has_frozen_objects, make_all_old

Made = TypeVar("Made")

PAUSED_STEPS: Final = 1024
COLLECTED_STEPS: Final = 128
"""The collector is off for `PAUSED_STEPS` in a row, about eight of the largest messages, and then on for this many.
Otherwise the host's own garbage of that time would have become old, and would not be looked for."""

CHECKED_STEPS: Final = 64
"""After so many, look again whether the host has frozen its own objects: they would be thawed. Counting takes time."""


class Decoding:
    """Does the steps of long messages. One for the process, as the collector is."""

    def __init__(self) -> None:
        self.steps = 0
        self._is_host_frozen = False

    def do(self, step: Callable[[], Made]) -> Made:
        """Do a step. What it makes counts as old: it is looked at when the collector next goes through everything."""
        if self.steps % CHECKED_STEPS == 0:
            self._is_host_frozen = has_frozen_objects()
        self.steps = (self.steps + 1) % (PAUSED_STEPS + COLLECTED_STEPS)
        if self.steps >= PAUSED_STEPS or self._is_host_frozen or not gc.isenabled():
            return step()
        gc.disable()
        try:
            return step()
        finally:
            make_all_old()
            gc.enable()


DECODING: Final = Decoding()
