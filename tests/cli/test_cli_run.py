"""`toolcell run`: what the runtime gets, what the terminal shows, and the exit status."""

import json
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import anyio
import psutil
import pytest
from typer.testing import CliRunner

import toolcell.runtime
from toolcell.cli import build, demo, early_zygote, execution, exits
from toolcell.config import Limits, Policy
from toolcell.errors import SandboxUnavailable
from toolcell.results import (
    ErrorInfo,
    ExecutionResult,
    Isolation,
    LogEntry,
    Logs,
    Outcome,
    OutputFile,
    ToolCallRecord,
    Usage,
)

pytestmark = pytest.mark.quick

TOOLS = '''
def search(query: str, limit: int = 10) -> list[str]:
    """Search the web for current information.

    Args:
        query: what to look for
    """
    return [query] * limit


async def echo(q: int) -> int:
    """Return the very same number that was given."""
    return q


def _private() -> None:
    """Not a tool, because its name says so."""
'''


class FakeRuntime:
    """Stands where the runtime is and answers with the result it was given."""

    result = ExecutionResult("r1", Outcome.OK)
    error: BaseException | None = None
    seen: dict[str, Any]

    def __init__(self, registry: Any = None, **options: Any) -> None:
        type(self).seen = {"registry": registry, **options}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    async def execute_code(self, source: str, **arguments: Any) -> ExecutionResult:
        self.seen.update(arguments, source=source)
        if self.error is not None:
            raise self.error
        for entry in self.result.logs.entries:
            arguments["on_log"](entry.stream, entry.text)
        return self.result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRuntime]:
    class OneTest(FakeRuntime):
        pass

    monkeypatch.setattr(toolcell.runtime, "Runtime", OneTest)
    return OneTest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_cli_tools.py").write_text(TOOLS)
    (tmp_path / "script.py").write_text("x = 1\ny = 2\nz = x / 0\nw = 4\nv = 5\nu = 6\n")
    return tmp_path


def invoke(*arguments: str, input: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(build(arguments), list(arguments), input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_everything_on_the_command_line_reaches_the_runtime(fake: type[FakeRuntime], folder: Path) -> None:
    (folder / "data.csv").write_text("a,b")
    flags = ["--wall-s", "2.5", "--memory-bytes", "64MiB", "--tool-calls", "3", "--lint", "strict", "--seed", "7"]
    status, _, _ = invoke(
        "run", "script.py", *flags, "-t", "my_cli_tools.py", "-i", "rows=[1]", "-f", "data.csv",
        "-p", "numpy,pandas>=2,<4", "--preload", "numpy", "--require", "landlock,seccomp", "--hash-seed", "1",
        "--record", "runs",
    )  # fmt: skip

    seen = fake.seen
    assert status == exits.OK
    assert seen["record"] == "runs"
    assert seen["source"].startswith("x = 1\n")
    assert seen["limits"] == Limits(wall_s=2.5, memory_bytes=64 * 1024 * 1024, tool_calls=3)
    assert seen["policy"] == Policy(
        profile="auto", require=frozenset({"landlock", "seccomp"}), lint="strict", seed=7, hash_seed=1
    )
    assert seen["packages"] == ("numpy", "pandas>=2,<4")
    assert (seen["preload"], seen["backend"]) == (("numpy",), "process")
    assert seen["inputs"] == {"rows": [1]}
    assert seen["files"] == [("data.csv", b"a,b")]
    assert sorted(seen["registry"].list()) == ["echo", "search"]


def test_the_image_of_containers_is_chosen_beside_their_runtime(
    fake: type[FakeRuntime], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str | None, str | None]] = []
    monkeypatch.setattr(
        "toolcell.sandbox.docker.DockerBackend", lambda image, runtime, **given: made.append((image, runtime))
    )

    for flags in (["--runtime", "runsc"], ["--image", "mine"]):
        assert invoke("run", "script.py", "--backend", "docker", *flags)[0] == exits.OK
    assert made == [(None, "runsc"), ("mine", None)]


def test_a_script_may_come_from_stdin(fake: type[FakeRuntime], folder: Path) -> None:
    invoke("run", "-", input="set_result('é')")
    assert fake.seen["source"] == "set_result('é')"


def test_a_script_may_be_given_with_c_and_only_once(fake: type[FakeRuntime], folder: Path) -> None:
    assert invoke("run", "-c", "set_result('é')")[0] == exits.OK
    assert fake.seen["source"] == "set_result('é')"
    for wrong in ((), ("script.py", "-c", "1")):
        assert invoke("run", *wrong)[0] == exits.USAGE


def test_only_the_document_reaches_stdout_with_json(fake: type[FakeRuntime], folder: Path) -> None:
    (folder / "loud.py").write_text(
        "print('loading')\n\ndef add(a: int) -> int:\n    'Return one more than the number that was given.'\n    return a + 1\n"
    )
    fake.result = ExecutionResult("r1", Outcome.OK, float("nan"), True)
    _, out, err = invoke("run", "-c", "1", "--json", "-t", "loud.py")
    assert json.loads(out)["value"] == "nan"
    assert err == "loading\n"


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_ends_with_its_documented_status(outcome: Outcome, fake: type[FakeRuntime], folder: Path) -> None:
    fake.result = ExecutionResult("r1", outcome)
    assert invoke("run", "script.py")[0] == exits.BY_OUTCOME[outcome]
    assert invoke("run", "script.py", "--json")[0] == exits.BY_OUTCOME[outcome]


def test_output_and_value_go_to_stdout_and_the_rest_to_stderr(fake: type[FakeRuntime], folder: Path) -> None:
    logs = Logs((LogEntry("stdout", "one\ntwo"), LogEntry("stderr", "careful\n"), LogEntry("stdout", "three")))
    files = (OutputFile("a.png", "image/png", 3, b"png"), OutputFile("b", "", 0, None, problem="missing"))
    fake.result = ExecutionResult("r1", Outcome.OK, {"n": [1]}, True, logs, files)
    _, out, err = invoke("run", "script.py")
    assert out == 'one\ntwothree\n{\n  "n": [\n    1\n  ]\n}\n'
    assert err == (
        "careful\nfile  a.png  image/png, 3 bytes\nfile  b  missing\nnot saved: --output-dir DIR saves files\n"
    )


def test_a_result_of_none_is_shown_and_no_result_is_not(fake: type[FakeRuntime], folder: Path) -> None:
    fake.result = ExecutionResult("r1", Outcome.OK, None, True)
    assert invoke("run", "script.py")[1] == "null\n"
    fake.result = ExecutionResult("r1", Outcome.OK)
    assert invoke("run", "script.py")[1] == ""


FAILED = ExecutionResult(
    "r1",
    Outcome.ERROR,
    error=ErrorInfo("ZeroDivisionError", "division by zero", 3, 5, 'File "<code>", line 3\n', exit_code=1),
    calls=(
        ToolCallRecord("call_1", "search", {"query": "x"}, "ok", duration_s=0.0123, line=1),
        ToolCallRecord(
            "call_2", "echo", {"q": "a"}, "error", "invalid_args", "q: not a number", duration_s=0.0001, line=2
        ),
    ),
    usage=Usage(wall_s=0.25),
    isolation=Isolation("process", {"pid": "", "net": ""}),
)


@pytest.mark.conforms("Q-b8", "Q-b9")
def test_a_failing_script_shows_type_message_source_and_the_calls_already_made(
    fake: type[FakeRuntime], folder: Path
) -> None:
    fake.result = FAILED
    status, out, err = invoke("run", "script.py")
    assert (status, out) == (exits.FAILED, "")
    assert err == (
        "error  ZeroDivisionError\n"
        "division by zero\n"
        "\n"
        "  1 | x = 1\n"
        "  2 | y = 2\n"
        "> 3 | z = x / 0\n"
        "    |     ^\n"
        "  4 | w = 4\n"
        "  5 | v = 5\n"
        "\n"
        "calls already made\n"
        " call_1  search(query='x')  ok  12.3 ms  line 1\n"
        " call_2  echo(q='a')  error  100 us  line 2\n"
        "      q: not a number\n"
        "error, 250 ms, cpu 0 us, 2 tool calls, isolation process: 2 layers\n"
    )


@pytest.mark.conforms("Q26")
def test_each_finding_of_the_lint_profile_is_shown_with_its_line(fake: type[FakeRuntime], folder: Path) -> None:
    findings = (
        {"line": 1, "column": 1, "rule": "process", "message": "subprocess is blocked: use call_tool() instead"},
        {"line": 3, "column": 9, "rule": "x", "message": "nor this"},
    )
    fake.result = ExecutionResult("r1", Outcome.DENIED, error=ErrorInfo("Blocked", "2 findings", 1, findings=findings))
    _, _, err = invoke("run", "script.py", "--lint", "standard")
    assert "denied  Blocked\n2 findings\n" in err
    assert "line 1, column 1: subprocess is blocked: use call_tool() instead\n> 1 | x = 1\n    | ^\n" in err
    assert "line 3, column 9: nor this\n" in err


def test_a_limit_is_named_with_its_value_what_was_used_and_its_flag(fake: type[FakeRuntime], folder: Path) -> None:
    error = ErrorInfo("Timeout", "execution timed out after 2 s", limit="wall_s", limit_value=2.0, used=2.01)
    fake.result = ExecutionResult("r1", Outcome.TIMEOUT, error=error)
    status, _, err = invoke("run", "script.py")
    assert status == exits.LIMIT
    assert "limit wall_s is 2 s, 2.01 s was used (--wall-s changes it)" in err


def test_less_than_a_limit_was_in_use_before_what_would_have_passed_it(fake: type[FakeRuntime], folder: Path) -> None:
    error = ErrorInfo("MemoryError", "", limit="memory_bytes", limit_value=128 << 20, used=14 << 20)
    fake.result = ExecutionResult("r1", Outcome.MEMORY_LIMIT, error=error)
    _, _, err = invoke("run", "script.py")
    assert "limit memory_bytes is 128 MiB, 14 MiB was in use before that (--memory-bytes changes it)" in err


HOSTILE = "\x1b[2J\x1b]52;c;AAAA\x07\u202e\u2028\x9b31m[red]"


def test_nothing_a_script_says_reaches_the_terminal_raw(fake: type[FakeRuntime], folder: Path) -> None:
    (folder / "script.py").write_text(f"# {HOSTILE}\n1/0\n")
    fake.result = ExecutionResult(
        "r1",
        Outcome.ERROR,
        HOSTILE,
        True,
        Logs((LogEntry("stdout", HOSTILE), LogEntry("stderr", HOSTILE))),
        (OutputFile(HOSTILE, HOSTILE, 1, b"x", problem=HOSTILE),),
        ErrorInfo(HOSTILE, HOSTILE, 2, 1, f"{HOSTILE}\n\n\n\n\n{HOSTILE}", findings=()),
        (ToolCallRecord("call_1", HOSTILE, {HOSTILE: HOSTILE}, "error", HOSTILE, HOSTILE),),
    )
    for arguments in (["run", "script.py"], ["run", "script.py", "--json"]):
        _, out, err = invoke(*arguments)
        assert not re.search("[\x1b\x07\x9b\u202e\u2028]", out + err)
    assert json.loads(out)["value"] == HOSTILE
    assert "[red]" in invoke("run", "script.py")[1]


def test_json_is_the_whole_result(fake: type[FakeRuntime], folder: Path) -> None:
    fake.result = FAILED
    status, out, err = invoke("run", "script.py", "--json")
    told = json.loads(out)
    assert (status, err) == (exits.FAILED, "")
    assert (told["outcome"], told["error"]["line"], told["calls"][0]["name"]) == ("error", 3, "search")
    assert told["isolation"]["layers"] == {"pid": "", "net": ""}


def test_returned_files_are_saved_where_asked(fake: type[FakeRuntime], folder: Path) -> None:
    fake.result = ExecutionResult("r1", Outcome.OK, files=(OutputFile("out/a.txt", "text/plain", 2, b"hi"),))
    _, out, _ = invoke("run", "script.py", "-o", "got", "--json")
    assert (folder / "got" / "out" / "a.txt").read_bytes() == b"hi"
    assert json.loads(out)["saved"] == ["got/out/a.txt"]


@pytest.mark.parametrize("place", ["script.py", "script.py/below", "/proc/below"])
@pytest.mark.parametrize("command", ["run", "repl"])
def test_a_folder_that_cannot_be_written_is_found_out_before_anything_runs(
    command: str, place: str, fake: type[FakeRuntime], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolcell.cli.repl.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    arguments = [command, *(["script.py"] if command == "run" else []), "-o", place]
    status, _, err = invoke(*arguments)
    assert status == exits.USAGE and not hasattr(fake, "seen")
    assert f"--output-dir {place}: no file can be written there" in err


@pytest.mark.isolation
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--record", "s.py"], "cannot write the record s.py"),
        (["--record", "s.py/below"], "cannot write the record s.py/below"),
        (
            ["--builtin", "knowledge", "--store", "s.py"],
            "--store s.py: it cannot be written: it is another kind of file",
        ),
        (["--builtin", "schedule", "--store", "s.py/x.db"], "--store s.py/x.db: it cannot be written"),
        (["--builtin", "file", "--workspace", "s.py"], "cannot be made"),
        (["--mcp-config", "none.json"], "--mcp-config none.json: No such file or directory"),
        (["--limits", "none.toml"], "cannot load Limits from none.toml: No such file or directory"),
    ],
)
def test_no_option_with_a_file_or_folder_that_cannot_be_used_lets_a_script_run(
    arguments: list[str], says: str, folder: Path
) -> None:
    (folder / "s.py").write_text("print('ran')")
    status, out, err = invoke("run", "s.py", *arguments)
    assert (status, out) == (exits.USAGE, "") and says in err.replace("\n", " "), err


def test_a_run_that_happened_shows_its_result_also_when_a_file_cannot_be_saved(
    fake: type[FakeRuntime], folder: Path
) -> None:
    files = tuple(OutputFile(name, "text/plain", 2, b"hi") for name in ("link/a.txt", "b.txt"))
    fake.result = ExecutionResult("r1", Outcome.OK, 7, has_value=True, files=files)
    (folder / "got").mkdir()
    (folder / "got" / "link").symlink_to("/tmp")
    status, out, err = invoke("run", "script.py", "-o", "got", "--json")
    told = json.loads(out)
    assert (status, told["value"], told["saved"]) == (exits.FAILED, 7, ["got/b.txt"])
    assert "is a link" in told["not_saved"][0] and "is a link" in err
    status, out, err = invoke("run", "script.py", "-o", "got")
    assert (status, out) == (exits.FAILED, "7\n") and "is a link" in err
    assert "got has a b.txt already: saved as got/b.1.txt" in err


def test_a_folder_that_stays_empty_is_not_left(fake: type[FakeRuntime], folder: Path) -> None:
    assert invoke("run", "script.py", "-o", "got/deeper")[0] == exits.OK
    assert not (folder / "got").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--builtin", "file,knowledge,search"],
        ["--builtin", "file", "--require", "moat"],
        ["--builtin", "file", "--image", "x"],
        ["--builtin", "file", "--tools", "taken.py"],
        ["--builtin", "file", "-o", "script.py"],
    ],
)
def test_built_in_tools_that_are_refused_leave_no_workspace(
    arguments: list[str], fake: type[FakeRuntime], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BRAVE_API_KEY", "SEARXNG_URL"):
        monkeypatch.delenv(name, raising=False)
    (folder / "taken.py").write_text('def file_read(path: str) -> str:\n    """Read what is in a file of ours."""\n')
    before = sorted(folder.rglob("*"))
    assert invoke("run", "script.py", *arguments)[0] == exits.USAGE
    assert [each for each in sorted(folder.rglob("*")) if "__pycache__" not in str(each)] == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing.py"], "cannot read the script"),
        (["/dev/zero"], "it is not a file or a pipe"),
        (["-c", "1", "--file", "x=/dev/zero"], "it is not a file or a pipe"),
        (["script.py", "--wall-s", "-1"], "--wall-s -1.0: Input should be greater than 0"),
        (["script.py", "--input", "x"], "want name=json"),
        (["script.py", "--tools", "nothing.py"], "no such file"),
        (["script.py", "--tools", "no_such_module"], "No module named 'no_such_module'"),
        (["script.py", "--tools", "empty.py"], "no public function"),
        (["script.py", "--tools", "broken.py"], "raised ZeroDivisionError: division by zero (broken.py, line 2)"),
        (["script.py", "--tools", "my_cli_tools.py:search"], "a function, not a ToolRegistry; --tools my_cli_tools.py"),
        (["script.py", "--tools", "my_cli_tools.py:nothing"], "nothing is missing; --tools my_cli_tools.py takes all"),
        (["script.py", "--tools", "two.py"], "name one as two.py:"),
        (["script.py", "--require", "moat"], "no such layer"),
        (["script.py", "--hash-seed", "-4"], "--hash-seed -4: Input should be greater"),
        (["script.py", "--file", "nothing"], "No such file"),
        (["script.py", "--record", ""], "--record '': the path is empty; name a file"),
        (["script.py", "--wall-s", "abc"], "Invalid value for '--wall-s': 'abc': "),
        (["script.py", "--seed", "1.5"], "Invalid value for '--seed': '1.5': "),
        (["script.py", "--runtime", "runsc"], "--image and --runtime are about containers; add --backend docker"),
    ],
)
def test_what_is_wrong_with_the_command_line_is_said_before_anything_runs(
    arguments: list[str], complaint: str, fake: type[FakeRuntime], folder: Path
) -> None:
    (folder / "empty.py").write_text("import json\n_x = 1\n")
    (folder / "broken.py").write_text("x = 1\n1 / 0\n")
    (folder / "two.py").write_text("from toolcell.tools import ToolRegistry\na, b = ToolRegistry(), ToolRegistry()\n")
    status, out, err = invoke("run", *arguments)
    assert (status, out) == (exits.USAGE, "")
    assert complaint in err
    assert not hasattr(fake, "seen")


WRONG_TOOLS = {
    "undocumented": ("x = 1\n\ndef add(a, b):\n    return a + b\n", "tool 'add'", 3, "write a docstring"),
    "decorated": (
        "from toolcell.tools import ToolRegistry\nr = ToolRegistry()\n@r.tool\ndef add(a): return a\n",
        "tool 'add'",
        (3, 4),
        "write a docstring",
    ),
    "annotated": ("def f(a: 'Nope') -> int:\n    'Return the sum of it all.'\n", "name 'Nope'", 1, ""),
    "misnamed": ("import os\nfrom json import lodas\n", "cannot import name 'lodas'", 2, "check the name"),
    "missing": ("import os\nimport no_such_package\n", "'no_such_package'", 2, f"install it for {sys.executable}"),
    "ending": ("import sys\nsys.exit(3)\n", "sys.exit(3)", 2, "__name__"),
    "raising": ("import json\njson.loads('{')\n", "JSONDecodeError", 2, ""),
    "reading": ("open('no such file')\n", "'no such file'", 1, ""),
}
"""A file of tools, what is said of it, its line, and what to do."""


@pytest.mark.parametrize("is_imported", [False, True])
def test_what_is_wrong_with_a_file_of_tools_is_said_with_file_line_and_cure(
    is_imported: bool, fake: type[FakeRuntime], folder: Path
) -> None:
    for name, (source, says, lines, cure) in WRONG_TOOLS.items():
        (folder / f"{name}_tools.py").write_text(source)
        (folder / f"by_{name}.py").write_text(f"{TOOLS}\nimport {name}_tools\n")
        through = f"by_{name}" if is_imported and name not in ("undocumented", "annotated") else f"{name}_tools"
        for command in (["run", "script.py", "--tools", f"{through}.py"], ["tools", through]):
            status, out, err = invoke(*command)
            places = [f"({name}_tools.py, line {line})" for line in (lines if isinstance(lines, tuple) else (lines,))]
            assert (status, out, err.count("\n")) == (exits.USAGE, "", 1), err
            assert says in err and cure in err and any(each in err for each in places), err
            for each in (through, f"{name}_tools"):
                sys.modules.pop(each, None)
    assert not hasattr(fake, "seen")


def test_a_missing_sandbox_is_not_blamed_on_the_script(fake: type[FakeRuntime], folder: Path) -> None:
    fake.error = ExceptionGroup("unhandled errors in a TaskGroup", [SandboxUnavailable("no user namespaces")])
    status, _, err = invoke("run", "script.py")
    assert (status, err) == (exits.UNAVAILABLE, "sandbox unavailable: no user namespaces\n")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("source", ["vague_tools.py", "vague_tools"])
def test_a_description_too_short_is_one_line_that_names_the_users_file(
    source: str, fake: type[FakeRuntime], folder: Path
) -> None:
    (folder / "vague_tools.py").write_text("def vague(y: int) -> int:\n    'short'\n    return y\n")
    for command in (["run", "script.py", "--tools", source], ["tools", source]):
        status, _, err = invoke(*command)
        assert status == exits.OK
        assert err.startswith(f"warning: {source}: tool 'vague': description 'short' is shorter than 15 characters; ")
        assert err.count("\n") == 1


@pytest.mark.parametrize("last", ["", "1 / 0\n"])
def test_other_warnings_of_a_tools_file_come_as_ever(last: str, folder: Path) -> None:
    (folder / "old_tools.py").write_text(f"{TOOLS}\nimport warnings\nwarnings.warn('old')\n{last}")
    with pytest.warns(UserWarning, match="^old$") as caught:
        invoke("tools", "old_tools.py")
    assert [Path(each.filename).name for each in caught] == ["old_tools.py"]


def test_a_registry_is_found_in_a_file_a_module_and_by_name(fake: type[FakeRuntime], folder: Path) -> None:
    (folder / "holds_registries.py").write_text(
        "from toolcell.tools import ToolRegistry\na, b = ToolRegistry(), ToolRegistry()\n"
        "@a.tool\ndef one(x: int) -> int:\n    '''Return the very same number again.'''\n    return x\n"
        "@b.tool\ndef two(x: int) -> int:\n    '''Return the very same number again.'''\n    return x\n"
    )
    invoke("run", "script.py", "--tools", "holds_registries.py:a")
    assert fake.seen["registry"].list() == ["one"]
    invoke("run", "script.py", "--tools", "holds_registries:b", "--tools", "my_cli_tools")
    assert sorted(fake.seen["registry"].list()) == ["echo", "search", "two"]


def test_a_module_beside_a_file_of_tools_comes_before_an_installed_one(
    fake: type[FakeRuntime], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    installed = tmp_path_factory.mktemp("installed")
    for place in (installed, folder):
        (place / "twice_there.py").touch()
    sys.path.insert(0, str(installed))
    (folder / "imports.py").write_text("import twice_there\n" + TOOLS)
    invoke("run", "script.py", "--tools", "imports.py")
    assert sys.modules.pop("twice_there").__file__ == str(folder / "twice_there.py")


def test_decorated_functions_are_the_tools_where_there_are_any(fake: type[FakeRuntime], folder: Path) -> None:
    (folder / "decorated.py").write_text(
        "from toolcell import tool\n"
        "@tool\ndef shown(x: int) -> int:\n    '''Return the very same number again.'''\n    return hidden(x)\n"
        "def hidden(x: int) -> int:\n    '''Not offered, because another one is marked.'''\n    return x\n"
    )
    invoke("run", "script.py", "--tools", "decorated.py")
    assert fake.seen["registry"].list() == ["shown"]


@pytest.mark.parametrize(
    ("format", "key"), [("openai", "function"), ("anthropic", "input_schema"), ("mcp", "inputSchema")]
)
def test_tools_are_listed_in_each_providers_shape(format: str, key: str, folder: Path) -> None:
    status, out, _ = invoke("tools", "my_cli_tools.py", "--format", format)
    assert status == exits.OK
    assert all(key in each for each in json.loads(out))


def test_tools_are_listed_for_people_and_as_python(folder: Path) -> None:
    _, table, _ = invoke("tools", "my_cli_tools.py")
    assert table.split()[:3] == ["tool", "arguments", "description"]
    assert "query: string, [limit: integer]" in table
    assert "_private" not in table
    _, stubs, _ = invoke("tools", "my_cli_tools.py", "-f", "python")
    assert "def search(*, query: str, limit: int = " in stubs
    assert "query: what to look for" in stubs
    compile(stubs, "stubs", "exec")
    _, plain, _ = invoke("tools", "my_cli_tools.py", "--json")
    assert [each["name"] for each in json.loads(plain)] == ["search", "echo"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("chek", "scripts/"), "Did you mean 'check'?"),
        (("serach", "x", "my_cli_tools.py"), "Did you mean 'search'?"),
        (("search", "my_cli_tools.py", "x"), 'tools search "x" my_cli_tools.py'),
    ],
)
def test_a_misspelt_command_of_tools_and_a_query_that_comes_last_are_told(
    folder: Path, given: tuple[str, ...], said: str
) -> None:
    code, out, err = invoke("tools", *given)

    assert (code, out) == (2, "")
    assert said in " ".join(err.replace("│", "").split())


def test_a_module_whose_name_is_nearly_a_command_is_listed(folder: Path) -> None:
    (folder / "checks.py").write_text((folder / "my_cli_tools.py").read_text())
    try:
        _, out, _ = invoke("tools", "checks", "--json")
    finally:
        sys.modules.pop("checks", None)

    assert [each["name"] for each in json.loads(out)] == ["search", "echo"]


def test_tools_are_searched_and_told_in_as_much_detail_as_is_asked_for(folder: Path) -> None:
    _, found, _ = invoke("tools", "search", "look for something", "my_cli_tools.py", "--json")
    _, one, _ = invoke("tools", "search", "search echo", "my_cli_tools.py", "--detail", "names", "--limit", "1")
    _, lines, _ = invoke("tools", "my_cli_tools.py", "--detail", "signatures")
    _, full, _ = invoke("tools", "my_cli_tools.py", "--detail", "full")

    assert [each["name"] for each in json.loads(found)] == ["search"]
    assert one.strip() == "search"
    assert lines.startswith("search(query: str, limit: int") and len(lines.strip().splitlines()) == 2
    assert "def search(*, query: str" in full
    for wrong in (
        ("search", "x"),
        ("my_cli_tools.py", "--detail", "x"),
        ("search", "x", "my_cli_tools.py", "--limit", "0"),
    ):
        assert invoke("tools", *wrong)[0] == exits.USAGE


# The rest runs real sandboxes.

QUOTED = "results = call_tool('search', {'query': 'Go', 'limit': 2})\nprint('n', len(results))\nset_result(results)"


@pytest.mark.isolation
def test_a_real_script_calls_tools_of_a_file(folder: Path) -> None:
    (folder / "s.py").write_text(QUOTED)
    assert invoke("run", "s.py", "--tools", "my_cli_tools.py") == (exits.OK, 'n 2\n[\n  "Go",\n  "Go"\n]\n', "")


@pytest.mark.isolation
def test_a_real_failure_is_shown_with_the_models_own_line(folder: Path) -> None:
    (folder / "s.py").write_text("call_tool('echo', q=1)\ndef f(x):\n    return 1 / x\n\nprint('before')\nf(0)\n")
    status, out, err = invoke("run", "s.py", "--tools", "my_cli_tools.py")
    assert (status, out) == (exits.FAILED, "before\n")
    assert "error  ZeroDivisionError\ndivision by zero\n" in err
    assert "> 3 |     return 1 / x\n" in err
    assert "1  echo(q=1)  ok" in err


RAISING = '''
def in_stock(x: int) -> int:
    """Say how many of these are in stock."""
    raise ValueError(f"bad x {x}\\n{chr(27)}[2J")


def planned() -> int:
    """Fail as a tool does whose words are meant to be read."""
    from toolcell import ToolError
    raise ToolError("said by the tool")


def abort() -> int:
    """End the whole run, with words of its own."""
    from toolcell import ToolAbort
    raise ToolAbort("no more")
'''


@pytest.mark.isolation
def test_what_a_raising_tool_said_is_for_the_operator_once_and_never_for_the_script(folder: Path) -> None:
    (folder / "raising_tools.py").write_text(RAISING)
    (folder / "s.py").write_text(
        "heard = []\n"
        "for name, args in [('in_stock', {'x': 1}), ('in_stock', {'x': 1}), ('in_stock', {'x': 2}), ('planned', {})]:\n"
        "    try:\n        call_tool(name, args)\n"
        "    except ToolError as error:\n        heard.append(str(error))\n"
        "set_result(heard)\n"
    )
    told = "tool in_stock raised ValueError: bad x 1\\n\\x1b[2J\ntool in_stock raised ValueError: bad x 2\\n\\x1b[2J\n"
    status, out, err = invoke("run", "s.py", "--tools", "raising_tools.py")
    assert (status, err) == (exits.OK, told)
    assert "bad x" not in out
    assert json.loads(out)[0] == "Tool 'in_stock' failed: the tool raised ValueError"
    _, out, err = invoke("run", "s.py", "--tools", "raising_tools.py", "--json")
    assert err == told
    assert "bad x" not in out


@pytest.mark.isolation
def test_a_tool_that_ends_the_run_is_not_said_to_have_raised(folder: Path) -> None:
    (folder / "raising_tools.py").write_text(RAISING)
    status, _, err = invoke("run", "-", "--tools", "raising_tools.py", input="call_tool('abort')")
    assert status == exits.INTERRUPTED
    assert "raised" not in err
    assert err.count("no more") == 1


@pytest.mark.slow
@pytest.mark.isolation
def test_a_real_limit_ends_the_script_with_its_own_status(folder: Path) -> None:
    (folder / "s.py").write_text("print('started', flush=True)\nwhile True: pass\n")
    status, out, err = invoke("run", "s.py", "--wall-s", "1.5")
    assert (status, out) == (exits.LIMIT, "started\n")
    assert "timeout" in err
    assert "limit wall_s is 1.5 s" in err


@pytest.mark.isolation
@pytest.mark.conforms("Q26", "V-16")
def test_a_real_lint_refusal_is_shown_before_anything_runs(folder: Path) -> None:
    (folder / "s.py").write_text("print('ran')\nimport os\nos.system('rm -rf /')\n")
    status, out, err = invoke("run", "s.py", "--lint", "standard")
    assert (status, out) == (exits.FAILED, "")
    assert "os.system is blocked: use call_tool() instead" in err
    assert "> 3 | os.system('rm -rf /')" in err


@pytest.mark.isolation
def test_a_real_file_goes_in_and_comes_out(folder: Path) -> None:
    (folder / "in=1.txt").write_text("hello")  # no other name for the file 1.txt
    (folder / "s.py").write_text(
        "open('up.txt', 'w').write(open('in=1.txt').read().upper())\nset_result(1, files='up.txt')"
    )
    status, _, err = invoke("run", "s.py", "--file", "in=1.txt", "--output-dir", "got")
    assert (status, (folder / "got" / "up.txt").read_text()) == (exits.OK, "HELLO")
    assert "file  up.txt  text/plain, 5 bytes" in err
    assert "not saved" not in err


@pytest.mark.slow
@pytest.mark.isolation
def test_ctrl_c_ends_a_real_run_and_keeps_what_it_had_said(folder: Path) -> None:
    (folder / "s.py").write_text(
        "call_tool('ready')\nprint('so far')\ncall_tool('interrupt_me')\nimport time\ntime.sleep(60)\n"
    )
    (folder / "ready_tools.py").write_text(
        "import os, signal\n"
        "def ready() -> str:\n    '''Return at once.'''\n    return 'ok'\n"
        "def interrupt_me() -> str:\n    '''Tell the test that the script has come this far.'''\n"
        "    os.write(3, b'x')\n    return 'ok'\n"
    )
    reader, writer = os.pipe()
    command = [
        sys.executable,
        "-c",
        "import os, sys; os.dup2(int(sys.argv.pop(1)), 3); from toolcell.cli import main; main()",
    ]
    with subprocess.Popen(
        [*command, str(writer), "run", "s.py", "--tools", "ready_tools.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(writer,),
    ) as process:
        assert os.read(reader, 1) == b"x"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    os.close(reader)
    os.close(writer)
    assert process.returncode == exits.INTERRUPTED
    assert "so far" in out
    assert "cancelled" in err
    assert "ready()  ok" in err


PRINTING = """
import sys
for stream in (sys.stdout, sys.stderr):
    print("one of", stream.name, file=stream)
    print("and a part", end="", file=stream)
    call_tool("wait")
while True:
    print("more")
"""


@pytest.mark.slow
@pytest.mark.isolation
def test_prints_arrive_through_a_pipe_when_they_are_printed_and_a_reader_that_leaves_ends_the_script(
    folder: Path,
) -> None:
    (folder / "s.py").write_text(PRINTING)
    (folder / "waiting.py").write_text("def wait() -> str:\n    '''Wait for the test.'''\n    return input()\n")
    with subprocess.Popen(
        [sys.executable, "-m", "toolcell", "run", "s.py", "--tools", "waiting.py", "--wall-s", "60"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        for stream, name in ((process.stdout, b"<stdout>"), (process.stderr, b"<stderr>")):
            wanted = b"one of %s\nand a part" % name
            assert stream.read(len(wanted)) == wanted  # while the script waits
            process.stdin.write(b"go on\n")
            process.stdin.flush()
        assert process.stdout.readline() == b"more\n"
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (exits.READER_GONE, b"")


@pytest.mark.isolation
def test_the_demo_works_and_both_attacks_fail(tmp_path: Path) -> None:
    status, out, err = invoke("demo", "--record", tmp_path / "runs.db")
    assert (status, err) == (exits.OK, "")
    with closing(sqlite3.connect(tmp_path / "runs.db")) as record:  # any program can query it, as docs/audit.md says
        called = record.execute("select tool, count(*) from call group by 1").fetchall()
    assert called == [("list_modules", 1), ("read_module", demo.MODULES), ("save_note", 1)]
    for line in demo.SCRIPT.splitlines():
        assert line in out
    assert "read_module(name=" in out
    assert "save_note(title='largest modules'" in out
    assert '"total_lines":' in out
    assert out.count("  refused  ") == len(demo.ATTACKS)
    assert "  live  landlock" in out


@pytest.mark.isolation
def test_the_demo_as_json_holds_every_result() -> None:
    status, out, _ = invoke("demo", "--json")
    told = json.loads(out)
    assert (status, told["ok"]) == (exits.OK, True)
    assert [each["outcome"] for each in told["attacks"].values()] == ["error", "error"]
    _, *read, _ = told["script"]["calls"]
    assert len(read) == demo.MODULES
    assert all(each["args"]["name"].startswith(("toolcell/", "toolcell_bridge/")) for each in read)


def test_what_takes_long_says_so_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    from rich.console import Console

    monkeypatch.setattr(execution, "QUIET_S", 0.0)
    monkeypatch.setattr(execution, "REFRESH_S", 0.001)

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "step 2" in text:
                was_shown.set()
            return super().write(text)

    async def work(watch: execution.Watch) -> str:
        watch.doing = "running"
        watch.say("step 1\nstep 2\x1b[2J[/red]\n")
        await was_shown.wait()
        watch.show("stdout", "printed\n")
        return "done"

    was_shown, shown = anyio.Event(), Screen()
    assert execution.run_watched(work, Console(file=shown, force_terminal=True, width=80)) == "done"
    assert "running" in shown.getvalue()
    assert "\\x1b[2J[/red]" in shown.getvalue()
    assert ("printed" in shown.getvalue(), capsys.readouterr().out) == (False, "printed\n")

    async def quick(watch: execution.Watch) -> str:
        return "done"

    silent = io.StringIO()
    execution.run_watched(quick, Console(file=silent, width=80))
    assert silent.getvalue() == ""


@pytest.mark.slow
@pytest.mark.isolation
def test_a_plain_run_from_the_command_line_loads_only_what_it_needs(folder: Path) -> None:
    needless = (
        "pydantic",
        "rich",
        "docker",
        "tomllib",
        "jsonschema_rs",
        "toolcell.sandbox.process.contained_backend",
        "toolcell_bridge.guest.lint",
        "toolcell_bridge.isolation.seccomp",
    )
    probe = (
        "import gc, subprocess, sys\nfrom toolcell.cli import main\nyoung, started = [0], []\n"
        "class Started(subprocess.Popen):\n"
        "    def __init__(self, *given, **options): super().__init__(*given, **options); started.append('typer' in sys.modules)\n"
        "subprocess.Popen = Started\n"
        "gc.callbacks.append(lambda when, about: young.append(len(gc.get_objects(about['generation']))))\n"
        "try: main()\nfinally: "
        f"print([n for n in {needless} if n in sys.modules], max(young) < 20_000, started, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe, "run", "-c", "6 * 7"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (exits.OK, "42\n", "[] True [False]\n")


@pytest.mark.slow
@pytest.mark.isolation
def test_python_m_toolcell_is_the_command(folder: Path) -> None:
    command = [sys.executable, "-m", "toolcell", "run", "--json", "-c", "print('\\x1b[2J'); float('nan')"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert json.loads(done.stdout)["value"] == "nan"
    assert subprocess.run([*command[:3], "--version"], capture_output=True, text=True).stdout.startswith("toolcell ")


@pytest.mark.isolation
def test_a_zygote_that_nobody_waits_for_ends_with_its_host(folder: Path) -> None:
    early = (
        "import sys\nfrom toolcell.sandbox.process.backend import ProcessBackend\n"
        "backend = ProcessBackend()\nbackend.spawn()\n"
        "import psutil; print(*[each.pid for each in psutil.Process().children(recursive=True)])"
    )
    done = subprocess.run([sys.executable, "-c", early], capture_output=True, text=True, check=True)
    started = [int(pid) for pid in done.stdout.split()]
    assert started
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in started if psutil.pid_exists(pid)], timeout=60)
    assert not alive


def children() -> list[int]:
    return sorted(each.pid for each in psutil.Process().children(recursive=True))


@pytest.mark.isolation
def test_a_run_that_needs_another_zygote_starts_none_too_early_and_keeps_none() -> None:
    before = children()
    for arguments in (["-pnumpy"], ["-p", "numpy"], ["--limits", "limits.toml"], ["--limits=limits.toml"]):
        early_zygote.start(arguments)
        assert children() == before
    early_zygote.start(["-c", "1"])
    assert children() != before
    options = {"backend": "process", "packages": (), "record": None, "policy": Policy(), "limits": Limits()}
    assert early_zygote.backend_for({**options, "preload": ("json",)}) == "process"
    assert children() == before


def test_a_cache_that_cannot_be_had_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "toolcell", "run", "-c", "1"],
        env={**os.environ, "XDG_CACHE_HOME": "/dev/null"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == exits.UNAVAILABLE
    assert done.stderr.startswith("package error: cannot use /dev/null/toolcell as the package cache")
    assert done.stderr.count("\n") == 1


def test_commands_that_run_no_script_at_once_import_no_sandbox_for_their_help() -> None:
    program = (
        "import sys\nfrom toolcell.cli import build\nfor name in ('mcp', 'serve'): build([name])\n"
        "print([name for name in sys.modules if name.startswith('toolcell.sandbox')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_progress_line_shows_what_an_installer_does() -> None:
    async def shown() -> tuple[str, int]:
        watch = execution.Watch()
        logger = logging.getLogger("toolcell.sandbox.process.package_sources")
        with execution.showing_installation(watch):
            logger.info("Downloading numpy (16 MB)")
        return watch.line(3).plain, logger.level

    assert anyio.run(shown) == ("installing 3 s  Downloading numpy (16 MB)", logging.NOTSET)
