"""`toolcell repl` in a terminal, as a user has it: a pseudo-terminal, real keys, and the bytes that the screen gets."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("prompt_toolkit")

pytestmark = pytest.mark.isolation

TOOLS = '''
from toolcell import tool

@tool
async def search(query: str) -> str:
    """Search the web for current information."""
    return query.upper()
'''

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>()][A-Z0-9]?")
AT_MOST_S = 120
PROMPT = ">>>"
UP, TAB, CONTROL_C, CONTROL_D = "\x1b[A", "\t", "\x03", "\x04"


IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A program in a pseudo-terminal of its own."""

    def __init__(self, *command: str) -> None:
        self._fd, theirs = os.openpty()
        environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""
        self._seen = 0

    def type(self, keys: str, until: str) -> str:
        """Type, and wait for a text that appears after that; return what appeared."""
        os.write(self._fd, keys.encode())
        return self.wait(until)

    def run(self, keys: str, until: str) -> str:
        """The same, and wait for the next prompt: only then are keys read again."""
        new = self.type(keys, until)
        self.wait(PROMPT)
        return new

    def wait(self, until: str) -> str:
        ends = time.monotonic() + AT_MOST_S
        while (found := self.shown.find(until, self._seen)) < 0:
            assert self._read(ends - time.monotonic()), f"no {until!r} after:\n{self.shown[self._seen :]}"
        new = self.shown[self._seen : found]
        self._seen = found + len(until)
        return new

    def _read(self, within_s: float) -> bool:
        if within_s <= 0 or not select.select([self._fd], [], [], within_s)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # nobody has the terminal open any more
            return False
        self.shown = self.shown[: self._seen] + ESCAPES.sub(
            "", self.shown[self._seen :] + data.decode("utf-8", "replace")
        )
        return bool(data)

    def end(self) -> int:
        """Wait until the program has ended; return its exit code."""
        ends = time.monotonic() + AT_MOST_S
        while self._read(ends - time.monotonic()):
            pass
        return self.process.wait(AT_MOST_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "tools.py").write_text(TOOLS)
    history = str(tmp_path / "history")
    command = ("-m", "toolcell", "repl", "--tools", str(tmp_path / "tools.py"), "--history", history)
    with contextlib.closing(Terminal(*command)) as opened:
        yield opened


def test_a_terminal_has_history_completion_help_and_control_c_and_nothing_is_left_of_it(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.wait("Ctrl-D or exit ends")
    terminal.wait(PROMPT)
    terminal.run("x = 40; [x + 2]\r", "[42]")
    terminal.run("for y in [x, 50]:\r    print([y * 7])\r\r", "[350]")
    terminal.run(UP + "\r\r", "[350]")
    terminal.type("tools.se" + TAB, "arch")  # the screen gets what is new
    terminal.run("('found')\r", "'FOUND'")
    assert "query: str" in terminal.run("?search\r", "Search the web for current information.")
    terminal.type("import time; k = 70; print('be' + 'gun'); time.sleep(600)\r", "begun")
    terminal.run(CONTROL_C, "KeyboardInterrupt")
    terminal.run("[k + 7]\r", "[77]")
    terminal.run("1 + " + CONTROL_C, "KeyboardInterrupt")
    below = psutil.Process(terminal.process.pid).children(recursive=True)
    terminal.type(CONTROL_D, "")

    assert terminal.end() == 0
    assert below and not psutil.wait_procs(below, timeout=AT_MOST_S)[1]
    assert "tools.search('found')" in (tmp_path / "history").read_text()
