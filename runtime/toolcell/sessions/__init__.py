"""Sessions: a sandbox that stays, so that names, imports and files live from one script to the next."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "Session", "SessionKwargs", "SyncSession", "session_settings",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.sessions.blocking import SyncSession
    from toolcell.sessions.session import Session
    from toolcell.sessions.settings import SessionKwargs, session_settings
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.sessions.blocking": "SyncSession",
            "toolcell.sessions.session": "Session",
            "toolcell.sessions.settings": "SessionKwargs session_settings",
        },
    )
