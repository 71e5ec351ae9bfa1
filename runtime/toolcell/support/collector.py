"""What the program has told Python's garbage collector."""

from __future__ import annotations

import gc
from typing import Final

INTERPRETERS_OWN: Final = 1000
"""Python 3.12 freezes about 400 objects of its own at each full collection; a program that freezes, 5,000 and more."""


def has_frozen_objects() -> bool:
    """Return True if the program froze objects, which `gc.unfreeze` would thaw. Counts them: not for every message."""
    return gc.get_freeze_count() > INTERPRETERS_OWN


def make_all_old() -> None:
    """Count what is young as old: only a pass through everything looks at it. Thaws what was frozen."""
    gc.freeze()  # moves what is young to a place of its own, and forgets how much that was,
    gc.unfreeze()  # and then to what is old
