"""Control over runs: their journal, suspension for approval, repair, dry runs. Knows no one backend."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = ["AlreadyMade", "Approve", "CommitResult", "Deny", "Draft", "Edit", "Effect", "JournalConfig", "PlanRows"]

if TYPE_CHECKING:
    from toolcell.control.decisions import AlreadyMade, Deny, Edit
    from toolcell.control.draft import Draft
    from toolcell.control.steps_of_plans import PlanRows
    from toolcell.journal.config import JournalConfig
    from toolcell.results.effects import CommitResult, Effect
    from toolcell.tools.hooks import Approve
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        "toolcell.control.decisions",
        "toolcell.control.draft",
        "toolcell.control.steps_of_plans",
        "toolcell.journal.config",
        "toolcell.results.effects",
        "toolcell.tools.hooks",
    )
