"""One run: from a validated request to an `ExecutionResult`."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "NO_HANDLERS", "CallEnded", "CallOutput", "CallStarted", "CallUpdated", "Conversation", "FileContent", "FileInput",
    "FileReturned", "GuestConnection", "LogPrinted", "OnApproval", "ProgressReported", "ResumeKwargs",
    "Run", "RunEvent", "RunFinished", "RunHandlers", "RunKwargs", "RunOptions", "RunStream", "Script",
    "SessionRunKwargs", "check_on_approval", "failure", "guest_files", "run_message",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.run.calls import failure
    from toolcell.run.connection import GuestConnection
    from toolcell.run.conversation import Conversation
    from toolcell.run.options import (
        NO_HANDLERS,
        FileContent,
        FileInput,
        OnApproval,
        ResumeKwargs,
        RunHandlers,
        RunKwargs,
        RunOptions,
        SessionRunKwargs,
        check_on_approval,
        guest_files,
    )
    from toolcell.run.run import Run, Script, run_message
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
            "toolcell.run.calls": "failure",
            "toolcell.run.connection": "GuestConnection",
            "toolcell.run.conversation": "Conversation",
            "toolcell.run.options": (
                "NO_HANDLERS FileContent FileInput OnApproval ResumeKwargs RunHandlers RunKwargs RunOptions "
                "SessionRunKwargs check_on_approval guest_files"
            ),
            "toolcell.run.run": "Run Script run_message",
            "toolcell.run.streaming": (
                "CallEnded CallOutput CallStarted CallUpdated FileReturned LogPrinted ProgressReported RunEvent "
                "RunFinished RunStream"
            ),
        },
    )
