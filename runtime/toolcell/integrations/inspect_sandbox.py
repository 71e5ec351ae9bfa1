"""Inspect's sandbox: `Task(..., sandbox="toolcell")` gives each sample a session, in which Python programs run.

Without a shell, `exec` runs `python3` only. Inspect finds it by the entry point of this package.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolcell.config import Limits, Policy
from toolcell.errors import SandboxUnavailable, SessionError, UsageError
from toolcell.integrations import inspect_program
from toolcell.integrations.base import missing_package, program_output
from toolcell.results import ExecutionResult, Outcome
from toolcell.runtime import Runtime
from toolcell.sessions import Session

try:
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxEnvironment,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
except ModuleNotFoundError as exc:
    raise missing_package(exc, "inspect-ai") from exc

__all__ = ["ToolcellSandbox", "ToolcellSandboxEnvironment"]

_GUEST = Path(inspect_program.__file__).read_text(encoding="utf-8")
_PYTHON = f"{_GUEST}\nremove_carried()\nset_result(run_python(KIND, PROGRAM, ARGUMENTS, STDIN, FOLDER, ENVIRONMENT))"
_COMMAND = f"{_GUEST}\nremove_carried()\nset_result(run_command(COMMAND, STDIN, FOLDER, ENVIRONMENT))"
_WRITE = f"{_GUEST}\nset_result(place(TARGET))"
_READ = (
    f"{_GUEST}\nremove_carried()\nPROBLEM = bring(TARGET, MOST_BYTES)\n"
    "set_result(PROBLEM, files=[] if PROBLEM else [CARRIED])"
)

_INTERPRETER = re.compile(r"(/usr(/local)?/bin/)?python(3(\.\d+)?)?")
_SHELL = re.compile(r"(/usr)?(/bin/)?(ba)?sh")
_NO_EFFECT = ("-u", "-B", "-E", "-s", "-q")
"""Options of the interpreter that change nothing in a sandbox."""
_ERRORS: Mapping[str, type[OSError]] = {
    each.__name__: each for each in (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
}


class ToolcellSandbox(BaseModel):
    """Settings: `sandbox=SandboxEnvironmentSpec("toolcell", ToolcellSandbox(...))`, or a JSON file with these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limits: Limits = Field(default_factory=lambda: Limits(wall_s=600.0, cpu_s=600.0))
    """Limits of each command, and of the sandbox of a sample."""
    shell: bool = False
    """Execute every command as a program, as with `Policy(shell=True)`: `sh`, `cat`, `python3` and so on."""
    cpu_s: float = Field(default=6000.0, gt=0)
    """CPU seconds of all commands of a sample."""


@sandboxenv(name="toolcell")
class ToolcellSandboxEnvironment(SandboxEnvironment):
    """The sandbox of one sample. Commands run one after the other; files stay until the sample ends."""

    def __init__(self, runtime: Runtime, session: Session, settings: ToolcellSandbox) -> None:
        """`runtime` and `session` are open; `sample_cleanup` closes them."""
        super().__init__()
        self._runtime, self._session, self._settings = runtime, session, settings

    @classmethod
    async def task_init(cls, task_name: str, config: BaseModel | str | None) -> None:
        """Check the settings.

        Raises:
            UsageError: they are wrong.
        """
        _settings(config)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Start the sandbox of a sample.

        Raises:
            SandboxUnavailableError: this machine cannot start one.
        """
        settings = _settings(config)
        runtime = Runtime(limits=settings.limits, policy=Policy(shell=settings.shell))
        try:
            await runtime.open()
            session = runtime.session(cpu_s=settings.cpu_s)
            await session.open()
        except BaseException as exc:
            with anyio.CancelScope(shield=True):
                await runtime.close()
            if isinstance(exc, SandboxUnavailable):
                raise SandboxUnavailableError(str(exc)) from exc
            raise
        return {"default": cls(runtime, session, settings)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """End the sandbox of a sample. Cancellation: shielded."""
        with anyio.CancelScope(shield=True):
            for each in environments.values():
                own = each.as_type(cls)
                await own._session.close()
                await own._runtime.close()

    @classmethod
    async def task_cleanup(cls, task_name: str, config: BaseModel | str | None, cleanup: bool) -> None:
        """Do nothing: a sandbox ends with its sample."""

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Do nothing: a sandbox ends with the process that started it."""

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return ToolcellSandbox.model_validate(config)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run `python3 -c CODE`, `python3 -` or `python3 FILE`; with `shell=True` any command.

        Without `timeout`, `limits.wall_s` is one. Nothing is tried a second time.

        Raises:
            TimeoutError, OutputLimitExceededError, SandboxUnavailableError: as Inspect has them.
            SandboxUserUnsupportedError: a user is named; there are none.
        """
        if user is not None:
            raise SandboxUserUnsupportedError(f"a toolcell sandbox has no user {user!r}: leave user= out")
        stdin = input.encode() if isinstance(input, str) else input or b""
        inputs: dict[str, Any] = {"STDIN": stdin, "FOLDER": cwd or ".", "ENVIRONMENT": env or {}}
        if self._settings.shell:
            source, inputs["COMMAND"] = _COMMAND, list(cmd)
        elif (program := python_program(cmd)) is not None:
            source, (inputs["KIND"], inputs["PROGRAM"], inputs["ARGUMENTS"]) = _PYTHON, program
        else:
            return ExecResult(False, 127, "", _not_found(cmd))
        most = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        result = await self._run(source, inputs, timeout, output_bytes=most)
        if result.logs.truncated or result.outcome is Outcome.OUTPUT_LIMIT:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result.logs.text)
        if result.ok:
            code = result.value if type(result.value) is int else 1
            return ExecResult(code == 0, code, result.logs.stdout, result.logs.stderr)
        done = program_output(result)
        return ExecResult(False, done.exit_code or 1, done.stdout, done.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file and the directories above it.

        Raises:
            IsADirectoryError, PermissionError, OSError: it cannot be written.
        """
        data = contents.encode() if isinstance(contents, str) else contents
        carried = {inspect_program.CARRIED: data}
        _check_done(file, await self._run(_WRITE, {"TARGET": file}, carried=carried))

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError, OSError: it cannot be read.
            UnicodeDecodeError: it is not UTF-8.
            OutputLimitExceededError: it is larger than Inspect's limit.
        """
        most = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        limits = {"files": 1, "files_bytes": most}
        result = await self._run(_READ, {"TARGET": file, "MOST_BYTES": most}, **limits)
        _check_done(file, result)
        found = result.files[0] if len(result.files) == 1 else None
        if found is None or found.data is None:
            raise OSError(f"{file!r:.200} cannot be read: {found.problem if found is not None else 'it did not come'}")
        return found.data.decode() if text else found.data

    async def _run(
        self,
        source: str,
        inputs: Mapping[str, Any],
        timeout: int | None = None,
        *,
        carried: Mapping[str, bytes] | None = None,
        **limits: int,
    ) -> ExecutionResult:
        own = self._settings.limits
        wall_s = own.wall_s if timeout is None else min(own.wall_s, timeout)
        changes = {"files": 0, "tool_calls": 0, "wall_s": wall_s, **limits}
        try:
            result = await self._session.execute_code(
                source,
                inputs=inputs,
                files=carried or {},
                limits=own.model_copy(update=changes),
                lint="off",
                check_types=False,
            )
        except (SandboxUnavailable, SessionError) as exc:
            raise SandboxUnavailableError(str(exc)) from exc
        if result.outcome is Outcome.TIMEOUT:
            raise TimeoutError(f"the command ran longer than {wall_s:g} s")
        return result


def python_program(command: list[str]) -> tuple[str, str, list[str]] | None:
    """Return how a command runs Python ("-c", "-" or "file"), the source or file, and arguments; None: it does not.

    `bash -c` and `sh -c` with nothing but such a command are one too: Inspect's `python` tool has that.
    """
    words = list(command)
    if len(words) >= 3 and _SHELL.fullmatch(words[0]):
        options, words = words[1:-1], _plain_words(words[-1])
        if options not in (["-c"], ["-lc"], ["--login", "-c"], ["-l", "-c"]):
            return None
    if not words or not _INTERPRETER.fullmatch(words[0]):
        return None
    words = words[1:]
    while words and words[0] in _NO_EFFECT:
        words = words[1:]
    if not words or words[0] == "-":
        return "-", "", words[1:]
    if words[0] == "-c":
        return ("-c", words[1], words[2:]) if len(words) > 1 else None
    return None if words[0].startswith("-") else ("file", words[0], words[1:])


def _plain_words(line: str) -> list[str]:
    """Return the words of a shell's line, or none where a shell would do more than split it."""
    try:
        words = shlex.split(line)
    except ValueError:
        return []
    return words if shlex.join(words) == line.strip() else []


def _not_found(command: list[str]) -> str:
    named = command[0] if command else ""
    return (
        f"{named[:200]}: command not found: this sandbox has no shell and no programs but Python. "
        "These run: python3 -c CODE, python3 - with the code as input, python3 FILE ARGUMENTS\n"
    )


def _check_done(file: str, result: ExecutionResult) -> None:
    """Raise what the guest says that failed with a file."""
    if not result.ok:
        raise OSError(f"{file!r:.200}: {result.error.message if result.error is not None else result.outcome}")
    match result.value:
        case None:
            return
        case ["OutputLimitExceededError", _]:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        case [str(kind), str(text)]:
            raise _ERRORS.get(kind, OSError)(text[:500])
    raise OSError(f"{file!r:.200}: the sandbox gave no answer")


def _settings(config: BaseModel | str | None) -> ToolcellSandbox:
    """Return the settings of a task.

    Raises:
        UsageError: they are not ours, or their file cannot be read.
    """
    if config is None:
        return ToolcellSandbox()
    if isinstance(config, ToolcellSandbox):
        return config
    if not isinstance(config, str):
        raise UsageError(f"sandbox toolcell takes a ToolcellSandbox or a JSON file, not {type(config).__name__}")
    try:
        return ToolcellSandbox.model_validate_json(Path(config).read_bytes())
    except (OSError, ValidationError) as exc:
        raise UsageError(f"the settings of sandbox toolcell, {config!r}, cannot be used: {exc}") from exc
