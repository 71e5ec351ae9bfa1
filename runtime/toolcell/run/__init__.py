"""One run: from a validated request to an `ExecutionResult`."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "CallEnded", "CallOutput", "CallStarted", "CallUpdated", "FileReturned", "InputFiles", "LogPrinted",
    "ProgressReported", "ResumeKwargs", "RunEvent", "RunFinished", "RunKwargs", "RunOptions", "RunStream",
    "SandboxRunner", "Script", "SessionRunKwargs",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.run.conversation import SandboxRunner
    from toolcell.run.options import InputFiles, ResumeKwargs, RunKwargs, RunOptions, SessionRunKwargs
    from toolcell.run.run import Script
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
            "toolcell.run.conversation": "SandboxRunner",
            "toolcell.run.options": "InputFiles ResumeKwargs RunKwargs RunOptions SessionRunKwargs",
            "toolcell.run.run": "Script",
            "toolcell.run.streaming": (
                "CallEnded CallOutput CallStarted CallUpdated FileReturned LogPrinted ProgressReported RunEvent "
                "RunFinished RunStream"
            ),
        },
    )
