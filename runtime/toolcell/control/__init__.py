"""Control over runs: their journal, suspension for approval, repair, dry runs. Knows no one backend."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "AlreadyMade", "Approve", "Denial", "Deny", "Draft", "Edit", "PlanRows", "Replay", "ResumeDecision",
    "ScriptReport", "Turn", "TurnApprovals", "check_scripts", "replay", "revert_calls", "revert_spec",
    "runtime_options",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.calls.call import Approve, Deny, Edit
    from toolcell.control.agent_turns import Turn, TurnApprovals
    from toolcell.control.draft import Draft
    from toolcell.control.plans import PlanRows
    from toolcell.control.replays import Replay, replay, runtime_options
    from toolcell.control.revert import revert_calls, revert_spec
    from toolcell.control.saved_script_check import ScriptReport, check_scripts
    from toolcell.control.suspension import AlreadyMade, Denial, ResumeDecision
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.calls.call": "Approve Deny Edit",
            "toolcell.control.agent_turns": "Turn TurnApprovals",
            "toolcell.control.draft": "Draft",
            "toolcell.control.plans": "PlanRows",
            "toolcell.control.replays": "Replay replay runtime_options",
            "toolcell.control.revert": "revert_calls revert_spec",
            "toolcell.control.saved_script_check": "ScriptReport check_scripts",
            "toolcell.control.suspension": "AlreadyMade Denial ResumeDecision",
        },
    )
