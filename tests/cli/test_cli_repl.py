"""`toolcell repl`: what is typed runs in one session, and the terminal shows what Python would."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from rows import each_row
from toolcell import PoolConfig, Runtime, ToolRegistry
from toolcell.cli import build, repl

pytestmark = pytest.mark.quick

prompt_toolkit = pytest.importorskip("prompt_toolkit")


def registry() -> ToolRegistry:
    found = ToolRegistry()

    @found.tool
    async def search(query: str, limit: int = 10) -> list[str]:
        """Search the web for current information.

        Args:
            query: what to look for
        """
        return [query] * limit

    @found.tool
    async def press_control_c() -> None:
        """Do what a terminal does when somebody presses Ctrl-C."""
        os.kill(os.getpid(), signal.SIGINT)

    return found


def typed(keys: str, folder: Path) -> str:
    """What the terminal shows when somebody types these keys."""
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput
    from rich.console import Console

    shown = io.StringIO()
    console = Console(file=shown, highlight=False, markup=False, emoji=False, soft_wrap=True)

    async def work(pipe: Any) -> None:
        async with Runtime(registry(), pool=PoolConfig(warm=0)) as runtime:
            read = repl.reader(repl.tool_names(runtime), folder / "history", input=pipe, output=DummyOutput())
            with anyio.fail_after(60):
                await repl.run_repl(runtime, read, console, console, folder / "saved")

    with create_pipe_input() as pipe:
        pipe.send_text(keys)
        anyio.run(work, pipe)
    return shown.getvalue()


@pytest.mark.isolation
def test_what_is_typed_shares_one_session_and_errors_look_as_in_python(tmp_path: Path) -> None:
    shown = typed(
        "x = 40\rdef f(y):\r    return x + y\r\rf(2)\rtools.search('q', limit=2)\rprint('printed')\r1/0\r"
        "\x03?search\r?\r?none\rset_result(1, files=['none'])\rx\rexit()\r1 + 1\r\x04",
        tmp_path,
    )

    assert "42\n" in shown and "['q', 'q']\n" in shown and "printed\n" in shown
    assert 'File "<code 6>", line 1, in <module>\n    1/0\n    ~^~\nZeroDivisionError: division by zero\n' in shown
    assert "KeyboardInterrupt\n" in shown and shown.endswith("40\n")
    assert "def search(*, query: str, limit: int = 10)" in shown and "query: what to look for" in shown
    assert "press_control_c() -> " in shown and "there is no tool 'none'" in shown and "none (missing" in shown
    assert "tools.search('q', limit=2)" in (tmp_path / "history").read_text()
    assert (tmp_path / "history").stat().st_mode & 0o077 == 0


@pytest.mark.isolation
def test_pictures_and_html_are_named_and_saved_and_overwrite_nothing(tmp_path: Path) -> None:
    (tmp_path / "saved" / "script-2-result.html").mkdir(parents=True)
    keys = "x = type('Html', (), {'_repr_html_': lambda self: '<b>'})()\rx\rx\r\x04"
    shown = typed(keys, tmp_path)

    assert "file script-3-result.html (text/html, 3 bytes)\n" in shown
    assert f"saved {tmp_path}/saved/script-3-result.html\n" in shown
    assert (tmp_path / "saved" / "script-3-result.html").read_text() == "<b>"
    assert f"saved {tmp_path}/saved/script-2-result.1.html\n" in shown
    (tmp_path / "saved").rename(tmp_path / "before")
    (tmp_path / "saved").touch()
    assert f"{tmp_path}/saved: File exists\n" in typed(keys, tmp_path)


@pytest.mark.slow
@pytest.mark.isolation
def test_ctrl_c_interrupts_the_script_and_keeps_what_it_had_done(tmp_path: Path) -> None:
    shown = typed("import time; k = 1; tools.press_control_c(); time.sleep(60)\rk + 1\r\x04", tmp_path)

    assert "KeyboardInterrupt (line 1)\n2\n" in shown


@each_row(
    ("text", "found"),
    [
        ("x = tools.se", ["tools.search"]),
        ("call_tool('sea", ["search", "search_tools"]),
        ("progr", ["progress"]),
        ("zzz", []),
    ],
)
def test_names_of_tools_and_functions_are_completed(text: str, found: list[str]) -> None:
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    offered = repl.completer(["search"]).get_completions(Document(text), CompleteEvent())
    assert [each.text for each in offered] == found


@each_row(
    ("text", "is_complete"),
    [
        ("1 + 1", True), ("def f():", False), ("def f():\n    return 1", False), ("def f():\n    return 1\n", True),
        ("(1,\n2", False), ("(1,\n2)", True), ("await call_tool_async('f')", True), ("1 +* 2", True), ("?tool", True),
        ("'''a", False), ("x = '\\x'", True), ("\0", True),
    ],
)  # fmt: skip
def test_enter_runs_what_is_complete_and_goes_on_with_what_is_not(text: str, is_complete: bool) -> None:
    assert repl.is_complete(text) is is_complete


def test_without_a_terminal_it_says_what_to_use() -> None:
    done = CliRunner().invoke(build(["repl"]), ["repl"], input="")

    assert done.exit_code == 2 and "toolcell run" in done.output
