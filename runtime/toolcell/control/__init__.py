"""Control over runs: their journal, suspension for approval, repair, dry runs. Knows no one backend."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "WAITS", "AlreadyMade", "Approve", "Denial", "Deny", "Draft", "Edit",
    "PlanRows", "RepairingScripts", "Replay", "ResumeDecision", "ScriptReport", "SuspendingScripts", "Turn",
    "TurnApprovals", "check_scripts", "replay", "revert_calls", "revert_spec",
    "runtime_options", "script_calls",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.calls.call import Approve, Deny, Edit
    from toolcell.control.agent_turns import WAITS, SuspendingScripts, Turn, TurnApprovals
    from toolcell.control.draft import Draft
    from toolcell.control.plans import PlanRows
    from toolcell.control.repair import RepairingScripts
    from toolcell.control.replays import Replay, replay, runtime_options, script_calls
    from toolcell.control.revert import revert_calls, revert_spec
    from toolcell.control.saved_script_check import ScriptReport, check_scripts
    from toolcell.control.suspension import AlreadyMade, Denial, ResumeDecision
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.control.suspension": "AlreadyMade Denial ResumeDecision",
            "toolcell.control.draft": "Draft",
            "toolcell.control.repair": "RepairingScripts",
            "toolcell.control.replays": "Replay replay runtime_options script_calls",
            "toolcell.control.revert": "revert_calls revert_spec",
            "toolcell.control.saved_script_check": "ScriptReport check_scripts",
            "toolcell.control.plans": "PlanRows",
            "toolcell.control.agent_turns": "WAITS SuspendingScripts Turn TurnApprovals",
            "toolcell.calls.call": "Approve Deny Edit",
        },
    )
