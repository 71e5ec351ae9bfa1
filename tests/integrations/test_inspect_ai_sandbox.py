"""`sandbox="toolcell"` in Inspect's evaluation, with its mock model and its own `python` tool."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from integrations.cities import nothing_left_behind
from integrations.conftest import needs
from toolcell import Limits
from toolcell.errors import UsageError

needs("inspect_ai")

from inspect_ai import Task, eval_async  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.log import read_eval_log  # noqa: E402
from inspect_ai.model import ModelOutput, ModelUsage, get_model  # noqa: E402
from inspect_ai.scorer import Score, Scorer, accuracy, scorer  # noqa: E402
from inspect_ai.solver import generate, use_tools  # noqa: E402
from inspect_ai.tool import python  # noqa: E402
from inspect_ai.util import (  # noqa: E402
    OutputLimitExceededError,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandbox,
)
from inspect_ai.util._sandbox.limits import override_sandbox_output_limit  # noqa: E402

from toolcell.integrations.inspect_sandbox import (  # noqa: E402
    ToolcellSandbox,
    ToolcellSandboxEnvironment,
    python_program,
)

pytestmark = [
    pytest.mark.framework,
    pytest.mark.isolation,
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@asynccontextmanager
async def opened(config: ToolcellSandbox | str | None = None) -> AsyncIterator[Any]:
    """Open a sandbox as Inspect does for a sample."""
    with nothing_left_behind():
        await ToolcellSandboxEnvironment.task_init("task", config)
        environments = await ToolcellSandboxEnvironment.sample_init("task", config, {})
        try:
            yield environments["default"]
        finally:
            await ToolcellSandboxEnvironment.sample_cleanup("task", config, environments, False)
            await ToolcellSandboxEnvironment.task_cleanup("task", config, True)
            await ToolcellSandboxEnvironment.cli_cleanup(None)


@scorer(metrics=[accuracy()])
def reads_the_report() -> Scorer:
    async def score(state: Any, target: Any) -> Score:
        return Score(value=await sandbox().read_file("out/report.txt") == target.text)

    return score


async def evaluated(box: Any, home: Path, *codes: str) -> Any:
    outputs = [ModelOutput.for_tool_call("mockllm/model", "python", {"code": code}) for code in codes]
    outputs.append(ModelOutput.from_content("mockllm/model", "done"))
    for each in outputs:
        each.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    sample = Sample(input="sum?", target="6", files={"data/numbers.txt": "1\n2\n3\n"})
    solver = [use_tools(python()), generate()]
    task = Task(dataset=[sample], solver=solver, scorer=reads_the_report(), sandbox=box)
    [log] = await eval_async(task, model=get_model("mockllm/model", custom_outputs=outputs), log_dir=str(home))
    return log


async def test_inspects_own_python_tool_sample_files_and_scorer_work_in_a_toolcell_sandbox(tmp_path: Path) -> None:
    with nothing_left_behind():
        log = await evaluated(
            "toolcell",
            tmp_path,
            "import os\nos.makedirs('out')\ntotal = sum(map(int, open('data/numbers.txt')))\n"
            "open('out/report.txt', 'w').write(str(total))\nprint('written')",
            "print(total)",
            "import socket\nsocket.create_connection(('127.0.0.1', 9))",
        )
    assert log.status == "success" and log.results.scores[0].metrics["accuracy"].value == 1
    told = [each.text for each in log.samples[0].messages if each.role == "tool"]
    assert told[0] == "written\n" and "NameError" in told[1] and "Error" in told[2]
    execs = [each for each in log.samples[0].events if each.event == "sandbox" and each.action == "exec"]
    assert [each.result for each in execs if "python3 -" in each.cmd] == [0, 1, 1]


async def test_the_settings_of_a_task_are_in_its_log_and_can_be_a_file(tmp_path: Path) -> None:
    settings = ToolcellSandbox(limits=Limits(wall_s=50.0), cpu_s=40.0)
    spec = SandboxEnvironmentSpec("toolcell", settings)
    log = await evaluated(spec, tmp_path, "import os\nos.mkdir('out')\nopen('out/report.txt', 'w').write('6')")
    assert read_eval_log(log.location).eval.sandbox.config == settings
    (tmp_path / "box.json").write_text(settings.model_dump_json())
    async with opened(str(tmp_path / "box.json")) as box:
        assert box._settings == settings
    (tmp_path / "box.json").write_text('{"shall": true}')
    for wrong in (str(tmp_path / "box.json"), str(tmp_path / "none.json")):
        with pytest.raises(UsageError, match=r"\.json"):
            await ToolcellSandboxEnvironment.task_init("task", wrong)
    with pytest.raises(UsageError, match="Limits"):
        await ToolcellSandboxEnvironment.task_init("task", Limits())


async def test_programs_get_arguments_input_directory_and_environment_and_leave_none_of_them() -> None:
    code = "import os, sys; print(__name__, sys.argv, repr(sys.stdin.read()), os.getcwd(), os.environ.get('A')); x = 1"
    async with opened() as box:
        done = await box.exec(["python3", "-c", code, "a b"], input="in", cwd="/tmp", env={"A": "1"})
        assert done.success and re.fullmatch(r"__main__ \['-c', 'a b'\] 'in' \S*/tmp 1\n", done.stdout)
        assert not done.stderr
        done = await box.exec(["/usr/bin/python3", "-u", "-", "z"], input=code.encode())
        assert done.stdout.startswith("__main__ ['-', 'z'] '' ") and done.stdout.endswith(" None\n")
        await box.write_file("pkg/main.py", "import other, sys\nprint(other.VALUE, sys.argv, __file__)\nsys.exit(3)")
        await box.write_file("pkg/other.py", "VALUE = 1")
        done = await box.exec(["python", "pkg/main.py", "q"])
        assert (done.success, done.returncode) == (False, 3) and done.stdout == "1 ['pkg/main.py', 'q'] pkg/main.py\n"
        await box.write_file("pkg/other.py", "VALUE = 'new'")
        assert (await box.exec(["python3", "main.py"], cwd="pkg")).stdout.startswith("new ['main.py']")
        assert (
            await box.exec(["bash", "--login", "-c", "python3 -"], input="print('x' in globals())")
        ).stdout == "False\n"


async def test_programs_that_fail_say_so_as_python_does() -> None:
    async with opened() as box:
        failed = await box.exec(["python3", "-c", "print('so far')\n1 / 0"])
        assert failed.returncode == 1 and failed.stdout == "so far\n"
        assert failed.stderr.splitlines()[1] == '  File "<string>", line 2, in <module>'
        assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
        assert "SyntaxError" in (await box.exec(["python3", "-c", "if:"])).stderr
        told = await box.exec(["python3", "-c", "raise SystemExit('no')"])
        assert (told.returncode, told.stderr) == (1, "no\n")
        missing = await box.exec(["python3", "none.py"], env={"A": "1"})
        assert missing.returncode == 2 and "can't open 'none.py'" in missing.stderr
        assert (await box.exec(["python3", "-c", "import os; print('A' in os.environ)"])).stdout == "False\n"
        assert (await box.exec(["python3", "-c", "1"], cwd="nowhere")).returncode == 2
        assert (await box.exec(["python3", "-c", "import os; os._exit(5)"])).returncode == 5
        await box.write_file("kept.txt", "back")
        assert (await box.exec(["python3", "-c", "import os; os.abort()"])).returncode == 137
        assert (await box.exec(["python3", "-c", "print(open('kept.txt').read())"])).stdout == "back\n"


@pytest.mark.parametrize(
    "command",
    [["ls"], [], ["bash", "-c", "ls"], ["bash", "-c", "python3 - | cat"], ["sh", "-c", "python3 $HOME/x.py"],
     ["bash", "-c", "python3 'x"], ["python3", "-c"], ["python3", "-m", "pip"], ["python3", "--version"]],
)  # fmt: skip
async def test_another_command_does_not_exist(command: list[str]) -> None:
    assert python_program(command) is None
    async with opened() as box:
        done = await box.exec(command)
        assert (done.success, done.returncode) == (False, 127) and "python3 -c CODE" in done.stderr
        with pytest.raises(SandboxUserUnsupportedError, match="root"):
            await box.exec(["python3", "-c", "1"], user="root")


async def test_a_command_past_its_timeout_or_the_output_limit_is_an_error_and_files_stay() -> None:
    async with opened(ToolcellSandbox(limits=Limits(wall_s=60.0))) as box:
        await box.write_file("kept.txt", "here")
        with pytest.raises(TimeoutError, match="1 s"):
            await box.exec(["python3", "-c", "while True: pass"], timeout=1)
        assert await box.read_file("kept.txt") == "here"
        with override_sandbox_output_limit(1000, "exec"), pytest.raises(OutputLimitExceededError) as caught:
            await box.exec(["python3", "-c", "print('x' * 5000)"])
        assert caught.value.truncated_output and "xxx" in caught.value.truncated_output
        large = await box.exec(["python3", "-c", "print('x' * 1_000_000)"])
        assert len(large.stdout) == 1_000_001


@pytest.mark.parametrize("name", ["a.txt", "deep/er/a*.txt", "/tmp/own/a.txt"])
async def test_files_go_in_and_come_back_as_they_are(name: str) -> None:
    async with opened() as box:
        for content in (b"\xc3\x28\r\n", b"", b"x" * 12_000_000):
            await box.write_file(name, content)
            assert await box.read_file(name, text=False) == content
        await box.write_file(name, "✨\r\n")
        assert await box.read_file(name) == "✨\r\n"
        found = await box.exec(["python3", "-c", "import os; print(sorted(os.listdir()))"])
        assert ".toolcell" not in found.stdout
        with override_sandbox_output_limit(3, "read_file"), pytest.raises(OutputLimitExceededError):
            await box.read_file(name)


async def test_files_that_cannot_be_read_or_written_are_the_errors_of_the_protocol() -> None:
    async with opened() as box:
        await box.write_file("folder/a.bin", b"\xc3\x28")
        with pytest.raises(UnicodeDecodeError):
            await box.read_file("folder/a.bin")
        with pytest.raises(FileNotFoundError, match=r"none\.txt"):
            await box.read_file("none.txt")
        with pytest.raises(IsADirectoryError, match="folder"):
            await box.read_file("folder", text=False)
        with pytest.raises(IsADirectoryError, match="folder"):
            await box.write_file("folder", "x")
        with pytest.raises(OSError, match="folder/"):
            await box.write_file("folder/a.bin/b", "x")


async def test_with_a_shell_every_program_of_the_sandbox_runs() -> None:
    async with opened(ToolcellSandbox(shell=True)) as box:
        await box.write_file("a.txt", "one\ntwo\n")
        done = await box.exec(
            ["sh", "-c", "grep t a.txt | cat; cat; echo $A >&2; exit 4"], input="in\n", env={"A": "1"}
        )
        assert (done.returncode, done.stdout, done.stderr) == (4, "two\nin\n", "1\n")
        assert (await box.exec(["python3", "-"], input="import os; os._exit(5)")).returncode == 5
        assert (await box.exec(["no-such-program"])).returncode == 127
        with pytest.raises(TimeoutError):
            await box.exec(["sleep", "1000"], timeout=1)
        assert (await box.exec(["cat", "a.txt"])).stdout == "one\ntwo\n"


async def test_where_no_sandbox_can_start_inspect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcell.integrations.inspect_sandbox.Runtime", lambda **options: _without_python(options))
    with nothing_left_behind(), pytest.raises(SandboxUnavailableError, match="python"):
        await ToolcellSandboxEnvironment.sample_init("task", None, {})


def _without_python(options: dict[str, Any]) -> Any:
    from toolcell import Runtime

    return Runtime(**options, python="/nonexistent/python")
