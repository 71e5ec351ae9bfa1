"""Run one command of a shell. This file's text is the script that `shell_exec` executes in its sandbox.

It imports the standard library only, and nothing that it returns is believed: the command may have changed it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import stat
import subprocess
import threading
from typing import IO, Any

SHELL = "sh"

LEFT_S = 0.5
"""How long the rest of the output is read, when a process that left the group keeps the stream open."""


def run_command(
    command: str, timeout_s: float, output_bytes: int, directories: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Run `sh -c command` in the workspace: what came out, and the names of new and changed files."""
    root = os.getcwd()
    for name in directories:
        os.makedirs(name, exist_ok=True)
    files, folders, _ = digests(root)
    outcome = execute(command, timeout_s, output_bytes)
    files_after, folders_after, skipped = digests(root)
    changed = [name for name, digest in files_after.items() if files.get(name) != digest]
    return {
        **outcome,
        "deleted": sorted(files.keys() - files_after.keys()),
        "made_directories": sorted(folders_after - folders),
        "deleted_directories": sorted(folders - folders_after, reverse=True),
        "skipped": skipped,
    }, changed


def execute(command: str, timeout_s: float, output_bytes: int) -> dict[str, Any]:
    """Run a command in a process group of its own, which ends with it or at its deadline."""
    process = subprocess.Popen(
        [SHELL, "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    kept = [Kept(stream, output_bytes) for stream in (process.stdout, process.stderr) if stream]
    waiting = threading.Thread(target=process.wait, daemon=True)  # with a timeout of its own it asks again and again
    waiting.start()
    waiting.join(timeout_s)
    timed_out = waiting.is_alive()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    waiting.join()
    for stream in kept:
        stream.reader.join(LEFT_S)
    stdout, stderr = kept
    code = process.returncode
    return {
        "exit_code": code if code >= 0 else 128 - code,
        "signal": -code if code < 0 else 0,
        "timed_out": timed_out,
        "stdout": stdout.text(),
        "stderr": stderr.text(),
        "truncated": stdout.dropped + stderr.dropped > 0,
    }


class Kept:
    """The beginning of a stream, which a thread reads to its end."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._data = bytearray()
        self._most = most
        self.dropped = 0
        self.reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self.reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), 65536):
            room = self._most - len(self._data)
            self._data += data[:room]
            self.dropped += max(0, len(data) - room)

    def text(self) -> str:
        return self._data.decode("utf-8", "replace")


def digests(root: str) -> tuple[dict[str, bytes], set[str], list[str]]:
    """Return the regular files with their digests, the directories, and what is neither."""
    files: dict[str, bytes] = {}
    directories: set[str] = set()
    skipped: list[str] = []
    for folder, folders, names in os.walk(root):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            shown = os.path.relpath(path, root)
            with contextlib.suppress(OSError):
                mode = os.lstat(path).st_mode
                if stat.S_ISDIR(mode):
                    directories.add(shown)
                elif stat.S_ISREG(mode):
                    with open(path, "rb") as file:
                        files[shown] = hashlib.file_digest(file, "blake2b").digest()
                else:
                    skipped.append(shown)
    return files, directories, skipped
