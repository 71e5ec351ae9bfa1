"""`Shell`: run commands in a sandbox that holds a copy of the workspace.

Nothing runs on the host. A command gets a fresh sandbox, which dies with every process in it when the command is over.
The files of the workspace are copied in before and copied out after: no program ever has a path of the host.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolcell.builtin import in_shell
from toolcell.builtin.file import Roots, in_thread
from toolcell.builtin.package import ToolPackage, offered, run_script
from toolcell.builtin.workspace import Workspace, parse_path
from toolcell.errors import ToolError, UsageError
from toolcell.results import ExecutionResult, Outcome
from toolcell.runtime import Runtime
from toolcell.support.checks import check_seconds
from toolcell.support.text import clean, for_terminal, one_line
from toolcell.sync import SyncRuntime
from toolcell.tools import CodeRuntime, ErrorCode, Status, Text, ToolContext, ToolResult
from toolcell_bridge.guest.files import MAX_NAME_BYTES

TIMEOUT_S: Final = 30.0
MAX_TIMEOUT_S: Final = 300.0
GRACE_S: Final = 20.0
"""Beyond a command's timeout, for the copies. Only a sandbox that is stuck needs more."""
SHOWN_CHARS: Final = 4000
"""Characters of the output that a model reads."""
OUTPUT_BYTES: Final = 256 * 1024
"""Most bytes of each stream that code gets."""
MAX_FILES: Final = 2000
MAX_NAMES: Final = 20
"""Names of files in one note to the model."""
MAX_COMMAND_CHARS: Final = 100_000
TRUNCATED: Final = "\n... (truncated)"

BLOCKLIST: Final = ("rm -rf /", "sudo ", "mkfs", "> /dev/", "dd if=")
"""Commands that a model should not try. This is advice: the sandbox is what holds, and these five are easy to
paraphrase."""

_HARMLESS: Final = re.compile(r"> /dev/(null|stdout|stderr)\b|rm -rf /\w")

SOURCE: Final = f"""{Path(in_shell.__file__).read_text(encoding="utf-8")}
set_result(*run_command(COMMAND, TIMEOUT_S, OUTPUT_BYTES, DIRECTORIES))
"""


@dataclass(frozen=True, slots=True)
class Copy:
    """A workspace as a sandbox gets it."""

    files: tuple[tuple[str, bytes], ...]
    directories: tuple[str, ...]
    left_out: tuple[str, ...]
    """Links, special files, and files that are too large."""


class Shell(ToolPackage):
    """A tool that runs commands in a sandbox of their own."""

    package = "shell"
    needs = ("workspace", "Runtime(policy=Policy(shell=True))", "timeout_s")

    def __init__(
        self,
        workspace: str | os.PathLike[str] | Workspace,
        runtime: Runtime | SyncRuntime,
        *,
        timeout_s: float = TIMEOUT_S,
        per_user: bool = False,
        blocklist: Iterable[str] = BLOCKLIST,
    ) -> None:
        """`timeout_s`: of a command that asks for none. `blocklist`: texts that no command may contain, as advice to
        the model.

        Raises:
            UsageError: the runtime may not execute programs, or an argument is wrong.
        """
        asynchronous = runtime.runtime if isinstance(runtime, SyncRuntime) else runtime
        known = isinstance(asynchronous, CodeRuntime)
        policy, limits = (asynchronous.policy, asynchronous.limits) if known else (None, None)
        if policy is None or limits is None:
            raise UsageError(f"Shell takes a Runtime with Policy(shell=True), not {type(runtime).__name__}")
        if not policy.shell:
            raise UsageError("shell_exec is off: enable it with Runtime(policy=Policy(shell=True))")
        check_seconds("timeout_s", timeout_s)
        if not timeout_s:
            raise UsageError("timeout_s must be more than 0")
        self._roots = Roots(workspace, per_user=per_user)
        self._runtime, self._own_limits = runtime, limits
        self._timeout_s = min(timeout_s, MAX_TIMEOUT_S)
        self._blocklist = tuple(each.lower() for each in blocklist)

    @offered(
        timeout_s=MAX_TIMEOUT_S + 2 * GRACE_S,
        returns={
            "type": "object",
            "properties": {
                "exit_code": {"type": "integer"},
                "stdout": {"type": "string"},
                "stderr": {"type": "string"},
                "truncated": {"type": "boolean"},
                "changed": {"type": "array", "items": {"type": "string"}},
                "deleted": {"type": "array", "items": {"type": "string"}},
                "not_saved": {"type": "array", "items": {"type": "string"}},
            },
        },
    )
    async def shell_exec(self, command: str, ctx: ToolContext, timeout: int = 0) -> ToolResult:
        """Run a command with `sh -c` in the workspace and return its output. There is no network.

        Args:
            command: The command, as in grep -rn TODO src | head.
            timeout: Seconds; 0 is the default of 30, 300 is the most.
        """
        self._check(command)
        timeout_s = min(float(timeout), MAX_TIMEOUT_S) if timeout > 0 else self._timeout_s
        workspace = await self._roots.of(ctx)
        own = {"files": MAX_FILES, "files_bytes": self._own_limits.disk_bytes, "tool_calls": 0}
        limits = self._own_limits.model_copy(update={"wall_s": timeout_s + GRACE_S, **own})
        copy = await in_thread(copy_of, workspace, limits.disk_bytes // 2)
        inputs = {
            "COMMAND": command,
            "TIMEOUT_S": timeout_s,
            "OUTPUT_BYTES": OUTPUT_BYTES,
            "DIRECTORIES": list(copy.directories),
        }
        result = await run_script(self._runtime, "command", SOURCE, ctx, inputs=inputs, files=copy.files, limits=limits)
        if result.outcome is Outcome.TIMEOUT:
            return failed(f"command timed out after {timeout_s:g}s", "", status=Status.TIMEOUT, code=ErrorCode.TIMEOUT)
        if not result.ok or not is_answer(result.value):
            said = result.error.message if result.error is not None else "the sandbox gave no answer"
            raise ToolError(
                f"the command was ended: {result.outcome}: {one_line(said, 500)}; no file was changed",
                code=str(result.outcome),
            )
        value = await in_thread(save, workspace, result, copy)
        return command_result(value, timeout_s, bool(result.value["timed_out"]), int(result.value["signal"]))

    def _check(self, command: str) -> None:
        if not command.strip():
            raise ToolError("command is required")
        if len(command) > MAX_COMMAND_CHARS:
            raise ToolError(
                f"command has {len(command)} characters, and {MAX_COMMAND_CHARS} is the limit: write a script with "
                "file_write and run it with sh"
            )
        if "\0" in command:
            raise ToolError("command has a null character")
        lowered = _HARMLESS.sub("", command.lower())
        for pattern in self._blocklist:
            if pattern in lowered:
                raise ToolError(f"command blocked for safety: {pattern}", code=ErrorCode.BLOCKED)


def copy_of(workspace: Workspace, most_bytes: int) -> Copy:
    """Read a workspace.

    Raises:
        ToolError: it is larger than a sandbox takes.
    """
    files: list[tuple[str, bytes]] = []
    directories: list[str] = []
    left_out: list[str] = []
    total = 0
    for entry in workspace.walk():
        try:
            if entry.kind == "directory":
                parse_path(entry.path)
                directories.append(entry.path)
            elif entry.kind == "file":
                if len(os.fsencode(entry.path)) > MAX_NAME_BYTES:
                    raise ToolError("no name of an input file")
                data = workspace.read(entry.path)
                total += len(data)
                files.append((entry.path, data))
            else:
                raise ToolError("no regular file")
        except ToolError:  # among them names that are not text: others than our tools write here too
            left_out.append(for_terminal(entry.path))
        if total > most_bytes or len(files) + len(directories) + len(left_out) > MAX_FILES:
            raise ToolError(
                f"the workspace has more than {MAX_FILES} entries or {most_bytes} bytes, which is what the sandbox of "
                "a shell takes; delete files, or give its Runtime more disk_bytes"
            )
    return Copy(tuple(files), tuple(directories), tuple(left_out))


def is_answer(value: object) -> bool:
    """Return whether a sandbox answered as our script does. The command may have changed the script."""
    if not isinstance(value, dict):
        return False
    lists = ("deleted", "made_directories", "deleted_directories", "skipped")
    return (
        all(isinstance(value.get(name), str) for name in ("stdout", "stderr"))
        and all(type(value.get(name)) is int for name in ("exit_code", "signal"))
        and all(type(value.get(name)) is bool for name in ("timed_out", "truncated"))
        and all(isinstance(value.get(name), list) and all(isinstance(x, str) for x in value[name]) for name in lists)
    )


def save(workspace: Workspace, result: ExecutionResult, copy: Copy) -> dict[str, Any]:
    """Write to the workspace what a command changed. Names are the sandbox's: each is checked as a model's is."""
    said = result.value
    had, had_directories = {name for name, _ in copy.files}, set(copy.directories)
    changed: list[str] = []
    deleted: list[str] = []
    not_saved: list[str] = [*said["skipped"]]

    def attempt(done: list[str], name: str, action: Any, *args: Any) -> None:
        try:
            action(name, *args)
            done.append(name)
        except ToolError as exc:
            not_saved.append(f"{name}: {exc.message}")

    for name in said["deleted"]:
        if name in had:
            attempt(deleted, name, workspace.delete)
    for name in said["deleted_directories"]:
        if name in had_directories:
            attempt(deleted, name, workspace.delete)
    for name in said["made_directories"][:MAX_FILES]:
        attempt([], name, workspace.make_directory)
    for file in result.files:
        if file.data is None:
            not_saved.append(f"{file.name}: {file.problem}")
        else:
            attempt(changed, file.name, workspace.write, file.data)
    return {
        "exit_code": said["exit_code"],
        "stdout": said["stdout"],
        "stderr": said["stderr"],
        "truncated": said["truncated"],
        "changed": changed,
        "deleted": deleted,
        "not_saved": [clean(each)[:300] for each in not_saved[:MAX_FILES]],
        "left_out": list(copy.left_out),
    }


def command_result(value: dict[str, Any], timeout_s: float, timed_out: bool, number: int) -> ToolResult:
    """Return what a command gave, in the words that a model reads."""
    text = value["stdout"] + (f"\n--- stderr ---\n{value['stderr']}" if value["stderr"] else "")
    text = clean(text[: SHOWN_CHARS + 1])
    text = (text[:SHOWN_CHARS] + TRUNCATED if len(text) > SHOWN_CHARS or value["truncated"] else text) or "(no output)"
    if value["not_saved"]:
        text += f"\n(not kept in the workspace: {_few(value['not_saved'])})"
    if timed_out:
        return failed(
            f"command timed out after {timeout_s:g}s", text, value, status=Status.TIMEOUT, code=ErrorCode.TIMEOUT
        )
    if number:
        return failed(f"exit: signal: {_signal(number)}", text, value)
    if value["exit_code"]:
        return failed(f"exit: exit status {value['exit_code']}", text, value)
    return ToolResult(parts=(Text(text),), value=value, has_value=True)


def failed(message: str, output: str, value: dict[str, Any] | None = None, **fields: Any) -> ToolResult:
    """Return a failure with its output. Code finds the value in the error's details."""
    fields.setdefault("code", ErrorCode.TOOL_ERROR)
    return ToolResult.fail(
        message, output=output, retryable=False, facts=value, value=value, has_value=value is not None, **fields
    )


def _few(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(one_line(name, 120) for name in names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
