"""What a run needs to go on: the calls that it made, how they are kept, and answers from them.

Each public name is imported when it is first used, so a runtime loads what it uses.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "JournalStore", "RequestKeys",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.journal.request_keys import RequestKeys
    from toolcell.journal.store import JournalStore
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.journal.request_keys": "RequestKeys",
            "toolcell.journal.store": "JournalStore",
        },
    )
