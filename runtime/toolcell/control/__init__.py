"""Control over runs: their journal, suspension for approval, repair, dry runs. Knows no one backend."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "Draft", "PlanRows", "Replay", "TurnApprovals", "check_scripts", "replay", "revert_calls",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.control.agent_turns import TurnApprovals
    from toolcell.control.draft import Draft
    from toolcell.control.plans import PlanRows
    from toolcell.control.replays import Replay, replay
    from toolcell.control.revert import revert_calls
    from toolcell.control.saved_script_check import check_scripts
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.control.agent_turns": "TurnApprovals",
            "toolcell.control.draft": "Draft",
            "toolcell.control.plans": "PlanRows",
            "toolcell.control.replays": "Replay replay",
            "toolcell.control.revert": "revert_calls",
            "toolcell.control.saved_script_check": "check_scripts",
        },
    )
