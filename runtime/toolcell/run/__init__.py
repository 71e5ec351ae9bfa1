"""One run: from a validated request to an `ExecutionResult`."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "CallEnded", "CallOutput", "CallStarted", "CallUpdated", "Conversation", "FileReturned", "GuestConnection",
    "InputFiles", "LogPrinted", "OnApproval", "ProgressReported", "ResumeKwargs", "Run", "RunEvent", "RunFinished",
    "RunHandlers", "RunKwargs", "RunOptions", "RunStream", "Script", "SessionRunKwargs", "guest_files",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.run.connection import GuestConnection
    from toolcell.run.conversation import Conversation
    from toolcell.run.options import (
        InputFiles,
        OnApproval,
        ResumeKwargs,
        RunHandlers,
        RunKwargs,
        RunOptions,
        SessionRunKwargs,
        guest_files,
    )
    from toolcell.run.run import Run, Script
    from toolcell.run.streaming import (
        CallEnded,
        CallOutput,
        CallStarted,
        CallUpdated,
        FileReturned,
        LogPrinted,
        ProgressReported,
        RunEvent,
        RunFinished,
        RunStream,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.run.connection": "GuestConnection",
            "toolcell.run.conversation": "Conversation",
            "toolcell.run.options": (
                "InputFiles OnApproval ResumeKwargs RunHandlers RunKwargs RunOptions SessionRunKwargs guest_files"
            ),
            "toolcell.run.run": "Run Script",
            "toolcell.run.streaming": (
                "CallEnded CallOutput CallStarted CallUpdated FileReturned LogPrinted ProgressReported RunEvent "
                "RunFinished RunStream"
            ),
        },
    )
