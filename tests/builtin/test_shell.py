"""`shell_exec`: what it answers, what a command can reach, and what is left of it. See docs/builtin/shell.md."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from toolcell import Limits, Policy, Runtime
from toolcell.builtin import Shell
from toolcell.builtin.shell import BLOCKLIST, Copy, command_result, is_answer, save
from toolcell.builtin.workspace import Workspace
from toolcell.calls.result import Status, ToolResult
from toolcell.errors import UsageError
from toolcell.results import ExecutionResult, Outcome, OutputFile
from toolcell.tools import CodeRuntime, RunContext, ToolRegistry

GONE_S = 60.0
"""In which the last of a bomb's killed processes must have ended."""

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

BACKENDS = [
    pytest.param("process", marks=pytest.mark.isolation),
]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.fixture(scope="module", params=BACKENDS)
async def runtime(request: pytest.FixtureRequest) -> AsyncIterator[Runtime]:
    async with Runtime(backend=request.param, policy=Policy(shell=True)) as opened:
        yield opened


@pytest.fixture
def registry(work: Path, runtime: Runtime) -> ToolRegistry:
    return ToolRegistry([Shell(work, runtime)])


async def run(registry: ToolRegistry, command: str, timeout: int = 0, **context: Any) -> ToolResult:
    args = {"command": command, "timeout": timeout}
    return await registry.dispatch("shell_exec", args, context=RunContext(**context) if context else None)


# What it answers


async def test_a_file_with_a_longer_name_than_a_run_takes_is_said_and_the_next_command_runs(
    registry: ToolRegistry, work: Path
) -> None:
    folder = "/".join(5 * ["x" * 200])
    made = await run(registry, f"mkdir -p {folder} && echo hi > {folder}/f; echo kept > g")
    (work / folder).mkdir(parents=True, exist_ok=True)
    (work / folder / "f").write_text("other programs write here too")

    assert "not kept in the workspace" in made.text and (work / "g").read_text() == "kept\n"
    assert "kept" in str((await run(registry, "cat g")).value)


@pytest.mark.conforms("S2", "S-b2")
async def test_output_errors_and_exit_codes_are_told_in_the_words_of_the_requirement(registry: ToolRegistry) -> None:
    result = await run(registry, "echo out; echo err >&2")
    assert result.text == "out\n\n--- stderr ---\nerr\n"
    assert {name: result.value[name] for name in ("exit_code", "stdout", "stderr")} == {
        "exit_code": 0,
        "stdout": "out\n",
        "stderr": "err\n",
    }
    assert (await run(registry, "true")).text == "(no output)"
    failed = await run(registry, "echo partly; exit 3")
    assert failed.text == "exit: exit status 3\npartly\n"
    assert failed.error is not None
    assert failed.error.details["exit_code"] == 3
    assert (await run(registry, "kill -9 $$")).text == "exit: signal: SIGKILL\n(no output)"
    long = await run(registry, "yes | head -n 5000")
    assert long.text == "y\n" * 2000 + "\n... (truncated)"
    assert long.value["stdout"] == "y\n" * 5000


@pytest.mark.conforms("S2", "S-b4")
async def test_a_timeout_kills_every_process_and_keeps_what_was_printed_and_written(
    registry: ToolRegistry, work: Path
) -> None:
    result = await run(registry, "echo begun; echo kept > file; sleep 600 & sleep 600", timeout=1)
    assert result.status is Status.TIMEOUT
    assert result.text == "command timed out after 1s\nbegun\n"
    assert (work / "file").read_text() == "kept\n"
    assert not [command for command in running() if command == ["sleep", "600"]]


async def test_what_runs_in_the_background_is_not_waited_for_and_does_not_outlive_the_command(
    registry: ToolRegistry,
) -> None:
    result = await run(
        registry, "sleep 601 & (python3 -c 'import os, time; os.setsid(); time.sleep(602)' &) ; echo here"
    )
    assert result.text == "here\n"
    with anyio.fail_after(60):  # a used sandbox is stopped at once, and ended a moment later
        while [command for command in running() if "601" in command or any("602" in part for part in command)]:
            await anyio.sleep(0.01)


def running() -> list[list[str]]:
    """The command lines of this process's children, and theirs."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found.append(process.cmdline())
    return found


@pytest.mark.conforms("S2")
async def test_timeouts_out_of_range_become_the_default_or_the_most(work: Path) -> None:
    runtime = RecordingRuntime()
    registry = ToolRegistry([Shell(work, runtime, timeout_s=7)])
    for timeout in (0, -5, 20, 301, 10**9):
        await run(registry, "true", timeout)
    assert runtime.timeouts == [7, 7, 20, 300, 300]
    await run(ToolRegistry([Shell(work, runtime)]), "true")
    assert runtime.timeouts[-1] == 30


@pytest.mark.conforms("S3")
@pytest.mark.parametrize(
    ("command", "pattern"),
    [
        ("rm -rf /", "rm -rf /"),
        ("RM -RF /*", "rm -rf /"),
        ("SUDO reboot", "sudo "),
        ("mkfs.ext4 x", "mkfs"),
        ("echo x > /dev/sda", "> /dev/"),
        ("dd if=/dev/zero of=x", "dd if="),
    ],
)
async def test_a_blocked_command_says_which_pattern_it_has(work: Path, command: str, pattern: str) -> None:
    registry = ToolRegistry([Shell(work, RecordingRuntime())])
    assert (await run(registry, command)).text == f"command blocked for safety: {pattern}"
    allowed = ToolRegistry([Shell(work, RecordingRuntime(), blocklist=())])
    assert not (await run(allowed, command)).is_error


@pytest.mark.conforms("S2", "S-b4")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "command is required"),
        (" \n", "command is required"),
        ("a\0b", "command has a null character"),
        ("x" * 100_001, "command has 100001 characters, and 100000 is the limit"),
        ("echo x > /dev/null", ""),
        ("rm -rf /sandbox/work/tmp", ""),
        ("ls 2> /dev/null", ""),
    ],
)
async def test_a_command_is_checked_and_harmless_ones_are_not_blocked(work: Path, command: str, said: str) -> None:
    result = await run(ToolRegistry([Shell(work, RecordingRuntime())]), command)
    assert result.is_error is bool(said)
    assert result.text.startswith(said)


@pytest.mark.conforms("S-b4")
def test_shell_exec_is_off_until_a_runtime_may_execute_programs(work: Path) -> None:
    with pytest.raises(UsageError, match=r"shell_exec is off: enable it with Runtime\(policy=Policy\(shell=True\)\)"):
        Shell(work, Runtime())
    for wrong in (None, "process", Policy(shell=True)):
        with pytest.raises(UsageError, match="Shell takes a Runtime"):
            Shell(work, wrong)  # type: ignore[arg-type]
    for bad in (0, -1, True, "30"):
        with pytest.raises(UsageError, match="timeout_s"):
            Shell(work, RecordingRuntime(), timeout_s=bad)  # type: ignore[arg-type]


# What a command can reach


async def test_the_workspace_is_copied_in_and_out(registry: ToolRegistry, work: Path, tmp_path: Path) -> None:
    (work / "src").mkdir()
    (work / "src" / "a.txt").write_text("one\n")
    (work / "old").mkdir()
    (work / "old" / "gone.txt").write_text("x")
    (work / "same").write_bytes(b"\0\xff")
    before = (work / "same").stat()
    result = await run(registry, "sed -i s/one/two/ src/a.txt; rm -r old; mkdir -p new/empty; printf x > 'new/a b'; ls")
    assert result.text == "new\nsame\nsrc\n"
    assert (work / "src" / "a.txt").read_text() == "two\n"
    assert (work / "new" / "a b").read_text() == "x"
    assert (work / "new" / "empty").is_dir()
    assert not (work / "old").exists()
    assert (work / "same").stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(result.value["changed"]) == ["new/a b", "src/a.txt"]


async def test_nothing_but_files_and_directories_leaves_the_sandbox(
    registry: ToolRegistry, work: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("the host's")
    (work / "out").symlink_to(tmp_path)
    (work / "link").symlink_to(tmp_path / "secret")
    command = (
        f"cat link out/secret {tmp_path}/secret; ln -s /etc link2; python3 -c 'import os; os.mkfifo(\"f\")'; "
        "mkdir out; echo x > out/new; echo y > link"
    )
    result = await run(registry, command)
    assert "the host's" not in result.text
    assert (tmp_path / "secret").read_text() == "the host's"
    assert not (tmp_path / "new").exists()
    assert sorted(os.listdir(work)) == ["link", "out"]
    assert (work / "link").is_symlink()
    assert {each.partition(":")[0] for each in result.value["not_saved"]} == {"f", "link2", "link", "out", "out/new"}


ATTACKS = {
    "python3 -c 'import socket; socket.socket()'": "Operation not permitted",
    "cp $(which_sh=/bin/sh; echo $which_sh) ./own && ./own -c 'echo escaped'": "Permission denied",
    "cat /proc/1/environ": "No such file or directory",
    "ls /home /root /var": "No such file or directory",
    "echo x > /usr/x": "",
    "echo x > /programs/bin/x": "",
    "python3 -c 'import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))'": "-1",
    "python3 -c 'import os; os.setuid(0)'": "Operation not permitted",
    "cat /sandbox/etc/../../etc/shadow": "No such file or directory",
}


@pytest.mark.conforms("S-b4")
async def test_a_command_has_no_network_no_rights_and_no_programs_of_its_own(registry: ToolRegistry) -> None:
    for command, said in ATTACKS.items():
        result = await run(registry, f"{command} 2>&1")
        assert said in result.text, command
        assert result.is_error or said == "-1", (command, result.text)
        assert "escaped" not in result.text


async def test_the_programs_that_a_model_expects_are_there(registry: ToolRegistry) -> None:
    command = (
        "printf 'b\\na\\n' > x && sort x | awk '{print NR, $1}' | sed s/a/A/ | tr -d ' ' && grep -c a x && find . -name x "
        "&& tar cf t.tar x && tar tf t.tar && gzip x && gzip -dc x.gz | wc -l && python3 -c 'print(6 * 7)' "
        "&& awk 'BEGIN { system(\"echo nested\") }' && (sleep 0 & wait) && echo done"
    )
    result = await run(registry, command)
    assert result.text == "1A\n2b\n1\n./x\nx\n2\n42\nnested\ndone\n"


async def test_a_limit_that_ends_a_command_is_named_and_nothing_is_changed(work: Path, runtime: Runtime) -> None:
    registry = ToolRegistry([Shell(work, Limited(runtime, Limits(memory_bytes="64MiB")))])  # type: ignore[arg-type]
    result = await run(registry, "echo x > file; python3 -c 'x = b\"1\" * 200_000_000'; sleep 60")
    assert result.text.startswith("the command was ended: memory_limit: ")
    assert result.text.endswith("; no file was changed")
    assert os.listdir(work) == []


async def test_a_fork_bomb_meets_its_limit_and_leaves_nothing(work: Path, runtime: Runtime) -> None:
    registry = ToolRegistry([Shell(work, Limited(runtime, Limits(processes=20)))])
    result = await run(registry, "i=0; while [ $i -lt 200 ]; do sleep 603 & i=$((i+1)); done; wait")
    assert "Cannot fork" in result.text or "process_limit" in result.text
    with anyio.fail_after(GONE_S):
        while [command for command in running() if "603" in command]:
            await anyio.sleep(0.01)


async def test_a_workspace_that_is_too_large_for_a_sandbox_is_refused(work: Path, runtime: Runtime) -> None:
    registry = ToolRegistry([Shell(work, Limited(runtime, Limits(disk_bytes="1MiB")))])  # type: ignore[arg-type]
    (work / "large").write_bytes(b"x" * 600_000)
    assert "the workspace has more than 2000 entries or 524288 bytes" in (await run(registry, "true")).text


# Who it is for


async def test_each_user_has_a_workspace_of_their_own(work: Path, runtime: Runtime) -> None:
    registry = ToolRegistry([Shell(work, runtime, per_user=True)])
    await run(registry, "echo mine > file", user_id="ada")
    assert (await run(registry, "cat file", user_id="ada")).text == "mine\n"
    assert (await run(registry, "cat file", user_id="eve")).is_error
    assert "this run is for no user" in (await run(registry, "true")).text


# What a hostile sandbox may answer

ANSWER: dict[str, Any] = {
    "exit_code": 0, "signal": 0, "timed_out": False, "stdout": "", "stderr": "", "truncated": False,
    "deleted": [], "made_directories": [], "deleted_directories": [], "skipped": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"stdout": 1},
        {"exit_code": "0"},
        {"exit_code": True},
        {"deleted": "x"},
        {"deleted": [1]},
        {"timed_out": 0},
        {"skipped": None},
    ],
)
async def test_an_answer_that_is_none_is_an_error(work: Path, change: dict[str, Any]) -> None:
    assert is_answer(ANSWER)
    assert not is_answer(ANSWER | change)
    result = await run(ToolRegistry([Shell(work, RecordingRuntime(ANSWER | change))]), "true")
    assert result.text.startswith("the command was ended: ok: the sandbox gave no answer")


def test_an_answer_changes_only_what_the_sandbox_was_given(tmp_path: Path) -> None:
    work = Workspace(tmp_path / "work")
    work.write("given", b"1")
    work.write("not-given", b"2")
    (tmp_path / "outside").write_text("3")
    said = ANSWER | {
        "deleted": ["given", "not-given", "../outside", str(tmp_path / "outside")],
        "deleted_directories": ["..", "", "/"],
        "made_directories": ["../new", str(tmp_path / "new-too"), "fine"],
    }
    files = [OutputFile(name, "", 1, b"x") for name in ("../outside", str(tmp_path / "x"), "given/..", "a\nb", "ok")]
    value = save(work, ExecutionResult("r", Outcome.OK, said, files=tuple(files)), Copy((("given", b"1"),), (), ()))
    assert value["deleted"] == ["given"]
    assert value["changed"] == ["ok"]
    assert sorted(os.listdir(work.root)) == ["fine", "not-given", "ok"]
    assert sorted(os.listdir(tmp_path)) == ["outside", "work"]
    assert (tmp_path / "outside").read_text() == "3"
    assert len(value["not_saved"]) == 6


def test_a_signal_that_does_not_exist_is_a_number() -> None:
    value = {"stdout": "", "stderr": "", "truncated": False, "not_saved": [], "exit_code": 255}
    assert command_result(value, 1.0, False, 127).message == "exit: signal: 127"


class Limited:
    """A runtime with other limits."""

    packages = hosts = installable = ()

    def __init__(self, runtime: Runtime, limits: Limits) -> None:
        self.policy, self.limits, self.execute_code = runtime.policy, limits, runtime.execute_code


class RecordingRuntime(CodeRuntime):
    """Answers without a sandbox."""

    policy = Policy(shell=True)
    limits = Limits()

    def __init__(self, answer: dict[str, Any] = ANSWER) -> None:
        self.answer = answer
        self.timeouts: list[float] = []

    async def execute_code(self, source: str, *, inputs: dict[str, Any], **_: Any) -> ExecutionResult:
        self.timeouts.append(inputs["TIMEOUT_S"])
        return ExecutionResult("r", Outcome.OK, self.answer, has_value=True)


@pytest.mark.slow
def test_the_blocklist_is_the_one_of_the_requirement() -> None:
    assert BLOCKLIST == ("rm -rf /", "sudo ", "mkfs", "> /dev/", "dd if=")
