"""Exit statuses and their meanings. `--help` and docs/cli.md quote this table."""

from __future__ import annotations

from toolcell.errors import (
    AuditError,
    McpServerError,
    PackageError,
    RegistrationError,
    SandboxUnavailable,
    ToolcellError,
    UsageError,
)
from toolcell.results import Outcome

OK, FAILED, USAGE, UNAVAILABLE, LIMIT, BROKEN, INTERRUPTED, READER_GONE = 0, 1, 2, 3, 4, 5, 130, 141

MEANINGS: dict[int, str] = {
    OK: "the script reached its end",
    FAILED: "the script failed: an exception, sys.exit(n), a syntax error, or refused by the lint profile; or one "
    "of its files was not saved, or the output was not written",
    USAGE: "the command line, an input or the tools file is wrong; nothing ran",
    UNAVAILABLE: "no sandbox could be started: an isolation layer, a package or an MCP server is missing; nothing ran",
    LIMIT: "a limit ended the script: time, CPU, memory, output, processes or tool calls",
    BROKEN: "the sandbox died or was lost, or broke the bridge protocol",
    INTERRUPTED: "interrupted by Ctrl-C, or a tool ended the run",
    READER_GONE: "the reader of the output closed its pipe, as `head` does",
}

BY_OUTCOME: dict[Outcome, int] = {
    Outcome.OK: OK,
    Outcome.ERROR: FAILED,
    Outcome.DENIED: FAILED,
    Outcome.TIMEOUT: LIMIT,
    Outcome.CPU_LIMIT: LIMIT,
    Outcome.MEMORY_LIMIT: LIMIT,
    Outcome.OUTPUT_LIMIT: LIMIT,
    Outcome.HOST_WORK_LIMIT: LIMIT,
    Outcome.PROCESS_LIMIT: LIMIT,
    Outcome.CALL_LIMIT: LIMIT,
    Outcome.KILLED: BROKEN,
    Outcome.LOST: BROKEN,
    Outcome.PROTOCOL_ERROR: BROKEN,
    Outcome.CANCELLED: INTERRUPTED,
    Outcome.UNAVAILABLE: UNAVAILABLE,
    Outcome.SUSPENDED: INTERRUPTED,
    Outcome.DIVERGED: FAILED,
}

BY_ERROR: tuple[tuple[type[ToolcellError], int], ...] = (
    (RegistrationError, USAGE),
    (UsageError, USAGE),
    (SandboxUnavailable, UNAVAILABLE),
    (PackageError, UNAVAILABLE),
    (McpServerError, UNAVAILABLE),
    (AuditError, BROKEN),  # what was merely named wrong is a UsageError, too
    (ToolcellError, FAILED),
)
"""The first class that fits decides."""


def status_of(error: ToolcellError) -> int:
    """Return the exit status for an error that kept a command from doing its work."""
    return next(status for kind, status in BY_ERROR if isinstance(error, kind))
