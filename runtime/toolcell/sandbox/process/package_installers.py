"""Install wheels with uv, else pip: no code of a package runs."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from toolcell.errors import PackageError
from toolcell.sandbox.process.package_sources import TargetInterpreter, Wanted, logger
from toolcell.support.text import for_terminal

INSTALL_TIMEOUT_S = 900.0
"""An installer that needs longer is stuck on its network."""

INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
"""In the environment, from where installers take packages in place of PyPI."""

_ERROR_LINES = 15
"""How many lines of an installer's output an error repeats."""


def use_package_index(url: str) -> None:
    """Take the packages of sandboxes from another index than PyPI: installers read the environment of this process."""
    os.environ.update(dict.fromkeys(INDEX_VARIABLES, url))
    place = urlsplit(url)
    if place.scheme == "http":  # pip leaves such an index out unless it is told
        os.environ["PIP_TRUSTED_HOST"] = place.netloc.rpartition("@")[2]


class InstallProgress:
    """What a build is doing: log records at level INFO, or one line of a terminal if nobody reads those records."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr is not None and sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO)
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """Say what is under way."""
        logger.info("%s", text)
        if self._is_shown:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"packages: {for_terminal(text).strip()}"[:width])

    def end(self) -> None:
        """Remove the line."""
        if self._is_shown:
            self._write("")

    def _write(self, line: str) -> None:
        with self._lock:
            try:
                sys.stderr.write(f"\r\x1b[K{line}")
                sys.stderr.flush()
            except (OSError, ValueError):  # a terminal that was closed must not end a build
                self._is_shown = False


def install(wanted: Sequence[Wanted], interpreter: TargetInterpreter, site: Path, progress: InstallProgress) -> str:
    """Install what is wanted and its dependencies into a new directory, and return the name of the installer.

    Raises:
        PackageError: there is no installer, or it failed; the last lines of its output are in the message.
    """
    name, texts = "uv", [item.text for item in wanted]
    if uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--python", str(interpreter.python), "--link-mode", "copy", "--no-progress"]
    elif interpreter.has_pip:
        name = "pip"
        command = [str(interpreter.python), "-I", "-m", "pip", "install", "--no-user", "--no-compile", "--no-input"]
        command += ["--progress-bar", "off", "--disable-pip-version-check"]
    else:
        raise PackageError(f"neither uv nor pip is there to install packages for {interpreter.python}: install uv")
    progress.say(f"installing {', '.join(texts)} with {name}")
    run_installer([*command, "--only-binary", ":all:", "--target", str(site), *texts], texts, progress.say)
    return name


def run_installer(command: Sequence[str], texts: Sequence[str], say: Callable[[str], object]) -> None:
    """Run an installer and repeat each line that it writes. It is killed when it is stuck.

    Raises:
        PackageError: it cannot be run, or it failed.
    """
    name, wanted = "uv" if os.path.basename(command[0]) == "uv" else "pip", ", ".join(texts)
    last: deque[str] = deque(maxlen=_ERROR_LINES)
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            stuck = threading.Timer(INSTALL_TIMEOUT_S, process.kill)
            stuck.start()
            try:
                for line in process.stdout or ():
                    if line := line.strip():
                        last.append(line)
                        say(line)
            finally:
                stuck.cancel()
                if process.poll() is None and sys.exception() is not None:
                    process.kill()
    except OSError as exc:
        raise PackageError(f"{name} could not install {wanted}: {exc}") from exc
    if process.returncode:
        output = "\n".join(last)
        raise PackageError(f"{name} could not install {wanted} (exit status {process.returncode}):\n{output}")
