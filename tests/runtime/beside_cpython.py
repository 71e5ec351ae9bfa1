"""Run a script in plain CPython with stand-ins for the names of a sandbox, and compare that with a sandbox's result."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolcell import ExecutionResult, ToolRegistry

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


def in_cpython(source: str, files: dict[str, str], folder: Path) -> Ending:
    """Run a script as `python code.py` does."""
    work, site, notes = folder / "work", folder / "site", folder / "notes"
    for each in (work, site):
        each.mkdir()
    notes.touch()
    (site / "sitecustomize.py").write_text(STAND_INS)
    (work / "code.py").write_text(source)
    for name, text in files.items():
        (work / name).write_text(text)
    environment = {"PYTHONPATH": str(site), "NOTES": str(notes), "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
    done = subprocess.run(
        [sys.executable, "code.py"], cwd=work, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    found = [json.loads(line) for line in notes.read_text().splitlines()]
    results = [value for kind, value in found if kind == "result"]
    value, names = results[-1] if results else (None, [])
    stderr = done.stderr.replace(str(work / "code.py"), "<code>").replace(f"{work}/", "")
    return Ending(
        done.returncode != 0,
        done.returncode or None,
        _comparable(done.stdout.replace(str(work / "code.py"), "<code>")),
        _comparable(stderr),
        value,
        {name: (work / name).read_bytes() for name in names},
        sorted((value for kind, value in found if kind == "call"), key=repr),
    )


def of_sandbox(result: ExecutionResult) -> Ending:
    """Return the same of a sandbox's run. An uncaught exception is in its error, and not in stderr."""
    error = result.error
    is_exit = error is not None and error.type == "SystemExit"
    said = f"{error.traceback}\n" if error is not None and not is_exit else ""
    if error is not None and is_exit and not error.message.startswith("exit code "):
        said = f"{error.message}\n"
    text = (result.logs.stderr + said).replace("/sandbox/work/", "")
    return Ending(
        error is not None,
        (error.exit_code if is_exit else 1) if error is not None else None,
        _comparable(result.logs.stdout),
        _comparable(text),
        result.value,
        {file.name: file.data or b"" for file in result.files},
        sorted(([call.name, call.args] for call in result.calls), key=repr),
    )


def _comparable(text: str) -> str:
    """Take out addresses, and the frames of libraries: a run's error has none."""
    kept, is_shown, margin = [], True, 0
    for line in ADDRESS.sub("0x", text).splitlines():
        bare = line.lstrip(" |")
        if bare.startswith('File "'):
            name = bare.split('"')[1]
            is_shown = "/" not in name and not name.startswith("<frozen ")
            margin = len(line) - len(bare)
        elif len(line) - len(bare) <= margin:
            is_shown = True
        if is_shown:
            kept.append(line.rstrip())
    return "\n".join(kept)


def dedented(source: str) -> str:
    """Return a script of a table. It ends with a statement without a value, which would be its result."""
    return textwrap.dedent(source).strip("\n") + "\npass\n"
