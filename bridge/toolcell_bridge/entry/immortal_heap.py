"""Make the objects of a zygote immortal, so that its children do not write reference counts to the pages they share.

Since Python 3.12 an object with a certain count is immortal: the count no longer changes, and the object is never
freed (PEP 683). A zygote never frees what its children use, so for them all of its objects may be that. It saves
a child 300 page faults, and a third of the memory of one that waits.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import types
from typing import Any

COUNTS = {(3, 12): 0xFFFFFFFF, (3, 13): 0xFFFFFFFF}
"""Version to the reference count that its macros take for immortal, on 64 bits, for a build with the GIL.

Source: Include/object.h, _Py_IMMORTAL_REFCNT. Python 3.14 has another one, and also other macros.
"""

WORD_BYTES = 8

ADDRESSES = 1 << 47
"""Address space of a process, on every 64-bit machine that Linux runs on without being asked for more."""

STEP_OBJECTS = 500
"""Objects per step. A step takes less than a millisecond, and a request may have to wait for it."""

REFERENCES = 1000
"""Made and dropped by the probe."""


def why_mortal() -> str:
    """Try the immortal count on an object; return why objects cannot be made immortal here, or an empty text."""
    version = sys.version_info[:2]
    count = COUNTS.get(version)
    if sys.implementation.name != "cpython" or count is None:
        names = " and ".join(f"{major}.{minor}" for major, minor in COUNTS)
        return f"Python {version[0]}.{version[1]}; with {names} sandboxes copy fewer pages"
    if (
        hasattr(sys, "gettotalrefcount")
        or "t" in getattr(sys, "abiflags", "")
        or ctypes.sizeof(ctypes.c_void_p) != WORD_BYTES
    ):
        return "it is known for builds with the GIL, without debugging, on 64 bits"
    counts, probe = _reference_counts(), [object()]
    before = counts[id(probe[0]) // WORD_BYTES]
    if counts[id(None) // WORD_BYTES] != count or before != sys.getrefcount(probe[0]) - 1:
        return "reference counts are not where this build should have them"
    counts[id(probe[0]) // WORD_BYTES] = count
    more = probe * REFERENCES
    is_kept = counts[id(probe[0]) // WORD_BYTES] == count and len(more) == REFERENCES
    del more
    is_kept = is_kept and counts[id(probe[0]) // WORD_BYTES] == count == sys.getrefcount(probe[0])
    counts[id(probe[0]) // WORD_BYTES] = before
    return "" if is_kept else "an immortal reference count changes in this build"


def _reference_counts() -> Any:
    """Return all memory as an array of words: the first word of each object is its reference count."""
    return (ctypes.c_uint64 * (ADDRESSES // WORD_BYTES)).from_address(0)


def begin() -> ImmortalHeap | None:
    """Begin to make every object that there is immortal; None where that cannot be done."""
    return None if why_mortal() else ImmortalHeap()


class ImmortalHeap:
    """Makes every object that there is immortal, in steps."""

    def __init__(self) -> None:
        self._counts = _reference_counts()
        self._count = COUNTS[sys.version_info[:2]]
        gc.unfreeze()  # frozen objects are in no list
        self._left: list[Any] = gc.get_objects()
        gc.freeze()

    def step(self) -> bool:
        """Make some more objects immortal; return True when there are no more."""
        counts, count, left = self._counts, self._count, self._left
        for _ in range(STEP_OBJECTS):
            if not left:
                return True
            value = left.pop()
            place = id(value) // WORD_BYTES
            if counts[place] == count or value is left:  # done before, or immortal from the start
                continue
            counts[place] = count
            # The collector knows neither what code refers to nor the keys of most dicts.
            if type(value) is types.CodeType:
                left += (value.co_consts, value.co_names, value.co_filename, value.co_name, value.co_qualname)
                left += (value.co_linetable, value.co_exceptiontable)
            else:
                left += gc.get_referents(value)
                if isinstance(value, dict):
                    left += dict.keys(value)
        return not left
