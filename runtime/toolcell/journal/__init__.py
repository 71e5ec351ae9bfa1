"""The durable record of calls: one file format, what its records mean, and answers from a record.

Each public name is imported when it is first used, so a runtime loads what it uses.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "JournalConfig", "JournalStore", "make_private", "options_of",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.journal.config import JournalConfig
    from toolcell.journal.database import make_private
    from toolcell.journal.identity import options_of
    from toolcell.journal.store import JournalStore
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.journal.config": "JournalConfig",
            "toolcell.journal.database": "make_private",
            "toolcell.journal.identity": "options_of",
            "toolcell.journal.store": "JournalStore",
        },
    )
