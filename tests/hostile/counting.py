"""Count the work that a function makes, in a measure that does not depend on the machine's speed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any


def calls(work: Callable[[], object], *refusals: type[Exception], of: str | None = None) -> int:
    """Python and C functions that `work` calls, also when it ends with one of `refusals`. `of`: C functions so named."""
    count = 0

    def event(frame: FrameType, kind: str, arg: Any) -> None:
        nonlocal count
        count += kind in ("call", "c_call") if of is None else kind == "c_call" and arg.__name__ == of

    with suppress(*refusals):
        sys.setprofile(event)
        try:
            work()
        finally:
            sys.setprofile(None)
    return count
