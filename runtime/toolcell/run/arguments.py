"""Check the options of one run before anything of it begins."""

from __future__ import annotations

import inspect
from typing import get_args

from toolcell.config import LintProfile
from toolcell.errors import UsageError
from toolcell.tools.call import RunContext
from toolcell.tools.checks import check_one_of, shown


def check_run_arguments(
    lint: object = None,
    seed: object = None,
    clock: object = None,
    cancel: object = None,
    context: object = None,
    **callbacks: object,
) -> None:
    """Check the options of one run that have no check of their own. None is always right.

    Raises:
        UsageError: names the option, its value and what it may be.
    """
    if lint is not None:
        check_one_of("lint=", lint, get_args(LintProfile))
    if seed is not None and (type(seed) is not int or not -(1 << 63) <= seed < 1 << 63):
        raise UsageError(f"seed= must be a whole number of 64 bits, not {shown(seed)}")
    if clock is not None and (type(clock) not in (int, float) or not -1e15 < clock < 1e15):  # type: ignore[operator]
        raise UsageError(f"clock= must be a number of seconds since 1970, not {shown(clock)}; write time.time()")
    if cancel is not None and not _is_async_event(cancel):
        raise UsageError(f"cancel= takes an anyio.Event, which does not block the event loop, not {shown(cancel)}")
    if context is not None and not isinstance(context, RunContext):
        raise UsageError(f"context= takes a RunContext, not {shown(context)}; write RunContext(user_id=...)")
    for name, function in callbacks.items():
        if function is not None and not callable(function):
            raise UsageError(f"{name}= takes a function, not {shown(function)}")


def _is_async_event(event: object) -> bool:
    return callable(getattr(event, "is_set", None)) and inspect.iscoroutinefunction(getattr(event, "wait", None))
