"""Sessions: a sandbox that stays, so that names, imports and files live from one script to the next."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "Session",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.sessions.session import Session
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.sessions.session": "Session",
        },
    )
