"""What a run returns, as frozen data: result, calls, files, usage, effects and reports.

Each public name is imported when it is first used, so a run loads what it uses.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "LIMIT_OUTCOMES", "AbandonedThread", "Array", "CommitResult", "Divergence",
    "Effect", "EffectResult", "ErrorFrame", "ErrorInfo", "ExecutionResult", "Isolation", "LogEntry", "Logs", "Outcome",
    "OutputFile", "PendingCall", "PlannedCall", "Preflight", "Repair", "RepairedCall", "RevertResult",
    "RevertedCall", "SessionFile", "SessionReport", "Suspension", "Table", "ToolCallRecord", "Usage",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.results.effects import (
        CommitResult,
        Effect,
        EffectResult,
        PlannedCall,
        Preflight,
        RevertedCall,
        RevertResult,
    )
    from toolcell.results.result import (
        LIMIT_OUTCOMES,
        AbandonedThread,
        Divergence,
        ErrorFrame,
        ErrorInfo,
        ExecutionResult,
        Isolation,
        LogEntry,
        Logs,
        Outcome,
        OutputFile,
        PendingCall,
        Repair,
        RepairedCall,
        SessionFile,
        SessionReport,
        Suspension,
        ToolCallRecord,
        Usage,
    )
    from toolcell_bridge.wire.tables import Array, Table
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.results.effects": (
                "CommitResult Effect EffectResult PlannedCall Preflight RevertResult RevertedCall"
            ),
            "toolcell.results.result": (
                "LIMIT_OUTCOMES AbandonedThread Divergence ErrorFrame ErrorInfo ExecutionResult Isolation LogEntry "
                "Logs Outcome OutputFile PendingCall Repair RepairedCall SessionFile SessionReport Suspension "
                "ToolCallRecord Usage"
            ),
            "toolcell_bridge.wire.tables": "Array Table",
        },
    )
