"""Run a script in plain CPython with stand-ins for the names of a sandbox, and compare that with a sandbox's result."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from toolcell import ExecutionResult, ToolRegistry

from .plain_scripts import HELPER, SCRIPTS

STAND_INS = """
import builtins, json, os
def _note(kind, value):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps([kind, value]) + "\\n")
def call_tool(name, **arguments):
    _note("call", [name, arguments])
    return arguments["a"] + arguments.get("b", 1)
class _Tools:
    def __getattr__(self, name):
        return lambda **arguments: call_tool(name, **arguments)
def set_result(data=None, files=None):
    _note("result", [data, files or []])
builtins.call_tool, builtins.tools, builtins.set_result = call_tool, _Tools(), set_result
"""

NAME = "script.py"
"""A script's file in CPython. In a sandbox its name is `<code>`, and `<code 2>` for the second one of a session."""

WRITTEN = {path.stem: path.read_text("utf-8") for path in sorted((Path(__file__).parent / "scripts").glob("*.txt"))}
"""Scripts of everyday work, each written as a model writes one."""

OF_EACH_KIND: Final = (
    "a thread that nobody joins", "a process that nobody joins", "exit hooks, the last one first", "an exit code",
    "an exit message", "a hook for exceptions", "a file that is not closed", "a file written after the result",
    "destructors of what is left", "every way to print without a newline", "an error with notes",
    "a group of exceptions", "a traceback that the script prints", "a task that nobody awaits", "a warning",
    "tool_fan_out", "contextvars_tasks", "unittest_main_fails", "argparse_help", "stdin_is_empty",
)  # fmt: skip
"""Scripts for routes on which not all of them run."""

ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True)
class Ending:
    """What is compared."""

    failed: bool
    exit_code: int | None
    stdout: str
    stderr: str
    value: Any = None
    files: dict[str, bytes] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)


def registry() -> ToolRegistry:
    """The tool that the scripts call."""
    tools = ToolRegistry()

    @tools.tool
    def add(a: int, b: int = 1) -> int:
        """Add two numbers, as a tool of a test does."""
        return a + b

    return tools


def source_of(script: str) -> str:
    """Return the text of a script. It ends with a statement without a value, which would be its result."""
    text = WRITTEN[script] if script in WRITTEN else textwrap.dedent(SCRIPTS[script]).strip("\n")
    return text.rstrip("\n") + "\npass\n"


@cache
def ending_in_cpython(script: str) -> Ending:
    """Run a script of the tables in CPython, once for all routes."""
    with tempfile.TemporaryDirectory() as folder:
        return in_cpython(source_of(script), HELPER, Path(folder))


def in_cpython(source: str, files: dict[str, str], folder: Path) -> Ending:
    """Run a script as `python script.py` does."""
    work, site, notes = folder / "work", folder / "site", folder / "notes"
    for each in (work, site):
        each.mkdir()
    notes.touch()
    (site / "sitecustomize.py").write_text(STAND_INS)
    (work / NAME).write_text(source, "utf-8")
    for name, text in files.items():
        (work / name).write_text(text)
    environment = {"PYTHONPATH": str(site), "NOTES": str(notes), "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
    done = subprocess.run(
        [sys.executable, NAME],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    found = [json.loads(line) for line in notes.read_text().splitlines()]
    results = [value for kind, value in found if kind == "result"]
    value, names = results[-1] if results else (None, [])
    return Ending(
        done.returncode != 0,
        done.returncode or None,
        _comparable(done.stdout, f"{work}/"),
        _comparable(done.stderr, f"{work}/"),
        value,
        {name: (work / name).read_bytes() for name in names},
        sorted((value for kind, value in found if kind == "call"), key=repr),
    )


def of_sandbox(result: Mapping[str, Any], files: Mapping[str, bytes]) -> Ending:
    """Return the same of a sandbox's run, as `ExecutionResult.to_dict` and the command line write it.

    An uncaught exception is in its error, and not in stderr.
    """
    error, said = result["error"], ""
    is_exit = error is not None and error["type"] == "SystemExit"
    if error is not None and not is_exit:
        said = f"{error['traceback']}\n"
    elif error is not None and not error["message"].startswith("exit code "):
        said = f"{error['message']}\n"
    return Ending(
        error is not None,
        (error["exit_code"] if is_exit else 1) if error is not None else None,
        _comparable(result["logs"]["stdout"]),
        _comparable(result["logs"]["stderr"] + said),
        result["value"],
        dict(files),
        sorted(([call["name"], call["args"]] for call in result["calls"]), key=repr),
    )


def ending_of(result: ExecutionResult) -> Ending:
    return of_sandbox(result.to_dict(), {file.name: file.data or b"" for file in result.files})


def _comparable(text: str, folder: str = "/sandbox/work/") -> str:
    """Take out addresses, names of the script, and the frames of libraries: a run's error has none."""
    text = text.replace(folder, "").replace(NAME, "<code>").replace("<code 2>", "<code>")
    kept, is_shown, margin = [], True, 0
    has_marks = sys.version_info < (3, 13) or "Exception ignored in" not in text  # then it is printed in C
    for line in ADDRESS.sub("0x", text).splitlines():
        bare = line.lstrip(" |")
        if not has_marks and line and set(bare) <= set("~^ "):
            continue
        if bare.startswith('File "'):
            name = bare.split('"')[1]
            is_shown = "/" not in name and not name.startswith("<frozen ")
            margin = len(line) - len(bare)
        elif len(line) - len(bare) <= margin:
            is_shown = True
        if is_shown:
            kept.append(line.rstrip())
    return "\n".join(kept)
