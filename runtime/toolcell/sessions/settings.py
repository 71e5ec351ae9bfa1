"""What a session may use, and what its scripts may change of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypedDict, TypeGuard

from toolcell.calls.call import CallableTools, RunContext
from toolcell.config import OF_SANDBOX, Limits
from toolcell.errors import UsageError
from toolcell.settings import SettingsModel, setting

TIMES: Final = 10
"""A session may use so many times what one script may, unless it is told otherwise."""

Restores = Literal["never", "if_kept", "always"]
"""Whether a session goes on from what is on disk: never, if there is something, or it is not opened without."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class SessionSettings(SettingsModel):
    """How long a session lives, what all its scripts may use together, and how it goes on without its sandbox."""

    idle_s: float = setting(default=600.0, gt=0, le=7 * 86_400)
    """Seconds without a script after which the sandbox is destroyed. The next script gets a new one."""

    cpu_s: float = setting(default=300.0, gt=0, le=7 * 86_400)
    """CPU seconds of all scripts."""

    tool_calls: int = setting(default=10_000, ge=0)
    """Tool calls of all scripts."""

    restore: Literal["journal", "empty"] = "journal"
    """What the next script finds when the sandbox is gone: the state, rebuilt by running the scripts again on their
    recorded answers, or nothing."""


class SessionKwargs(TypedDict, total=False):
    """What a session may be given besides its name, as keywords. None is as good as leaving it out."""

    limits: Limits | None
    idle_s: float | None
    cpu_s: float | None
    tool_calls: int | None
    restore: Literal["journal", "empty", "if_kept"] | bool | None
    tools: CallableTools | Iterable[Any] | None
    context: RunContext | None


def session_settings(limits: Limits, options: Mapping[str, Any]) -> SessionSettings:
    """Return the settings of a session. `options`: as `SessionKwargs`.

    Raises:
        UsageError: one of them is wrong; names it.
    """
    defaults = {"cpu_s": TIMES * limits.cpu_s, "tool_calls": TIMES * limits.tool_calls}
    given = {name: options.get(name) for name in SessionSettings.model_fields}
    if isinstance(restore := given["restore"], bool) or restore == "if_kept":
        given["restore"] = "journal" if restore else None
    return SessionSettings(**(defaults | {name: value for name, value in given.items() if value is not None}))


def is_name(name: object) -> TypeGuard[str]:
    """Return whether this is a session's name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(name: object) -> str:
    """Return a session's name.

    Raises:
        UsageError: it is none.
    """
    if not is_name(name):
        raise UsageError(f"a session's name has 1 to 64 letters, digits, _ and -, and {name!r:.80} has not")
    return name


def check_script_limits(wanted: Limits, session: Limits) -> None:
    """Check that a script asks for nothing that belongs to its sandbox.

    Raises:
        UsageError: names the limit.
    """
    if wanted is session:
        return
    for name in OF_SANDBOX.keys() - {"cpu_s"}:  # which a session has for all its scripts together
        asked, has = getattr(wanted, name), getattr(session, name)
        if asked != has:
            raise UsageError(
                f"limits= asks for {name}={asked}, and the session's sandbox has {has}; give it to "
                f"runtime.session(limits=...): a script can change times, calls and sizes of what it returns"
            )
