"""Run one command of an Inspect sandbox. The text of this file is the script that the sandbox's session executes.

It imports the standard library only, and nothing that it returns is believed: an earlier command may have changed it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import sys
import threading
import traceback
import types
from collections.abc import Iterable, Mapping

CARRIED = ".toolcell-file"
"""The file in the workspace by which contents come in and go out."""


def run_python(
    kind: str, program: str, arguments: Iterable[str], stdin: bytes, folder: str, environment: Mapping[str, str]
) -> int:
    """Run a program with a `__main__`, arguments, input, directory and environment of its own. Return its exit code.

    `kind`: "-c" when `program` is the source, "-" when the input is, otherwise `program` is a file.
    """
    root, known, threads = os.getcwd(), set(sys.modules), set(threading.enumerate())
    variables, main, paths = dict(os.environ), sys.modules["__main__"], list(sys.path)
    before = sys.argv, sys.stdin, sys.stdout, sys.stderr
    module = types.ModuleType("__main__")
    try:
        source = source_of(kind, program, stdin, folder, environment)
        sys.argv = [program if kind == "file" else kind, *arguments]
        sys.stdin = io.TextIOWrapper(io.BytesIO(b"" if kind == "-" else stdin), encoding="utf-8")
        sys.path[0] = os.path.dirname(os.path.abspath(program)) if kind == "file" else os.getcwd()
        sys.modules["__main__"] = module
        importlib.invalidate_caches()
        name = {"-c": "<string>", "-": "<stdin>"}.get(kind, program)
        if kind == "file":
            module.__file__ = program
        exec(compile(source, name, "exec", dont_inherit=True), vars(module))
        join_new(threads)
        return 0
    except SystemExit as exc:
        join_new(threads)
        return exit_code(exc)
    except Exception as exc:
        traceback.print_exception(exc.with_traceback(exc.__traceback__ and exc.__traceback__.tb_next))
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        sys.argv, sys.stdin, sys.stdout, sys.stderr = before
        sys.modules["__main__"] = main
        forget_new(known, paths[1:])
        sys.path[:] = paths
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(root)


def source_of(kind: str, program: str, stdin: bytes, folder: str, environment: Mapping[str, str]) -> str | bytes:
    """Go where a program is to run, and return its source.

    Raises:
        SystemExit: the directory or the file cannot be opened.
    """
    try:
        os.chdir(folder)
        os.environ.update(environment)
        if kind != "file":
            return program if kind == "-c" else stdin
        with open(program, "rb") as file:
            return file.read()
    except OSError as exc:
        sys.stderr.write(f"python3: can't open {exc.filename!r}: {exc.strerror}\n")
        raise SystemExit(2) from exc


def run_command(command: list[str], stdin: bytes, folder: str, environment: Mapping[str, str]) -> int:
    """Execute a program, where the sandbox allows that. Return its exit code as a shell has it."""
    import subprocess

    try:
        done = subprocess.run(command, input=stdin, cwd=folder, env=os.environ | environment, check=False)
    except OSError as exc:
        sys.stderr.write(f"{exc.filename or command[0]}: {exc.strerror}\n")
        return 127 if isinstance(exc, FileNotFoundError) else 126
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def join_new(threads: set[threading.Thread]) -> None:
    """Wait for the threads of a program, as the end of an interpreter does."""
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon:
            thread.join()


def exit_code(exc: SystemExit) -> int:
    """Return the exit code, and print what is none."""
    if exc.code is None or isinstance(exc.code, int):
        return (exc.code or 0) & 255
    sys.stderr.write(f"{exc.code}\n")
    return 1


def forget_new(known: set[str], kept: list[str]) -> None:
    """Forget the modules that a program imported from its own files: the next one finds them as they are then."""
    for name in set(sys.modules) - known:
        module = sys.modules[name]
        places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
        if any(place and not place.startswith(tuple(kept)) for place in places):
            del sys.modules[name]


def place(target: str) -> list[str] | None:
    """Move the file that came in to its place. Return the kind and text of an error."""
    try:
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        if os.path.isdir(target):
            raise IsADirectoryError(f"{target} is a directory")
        shutil.move(CARRIED, target)
    except OSError as exc:
        return [type(exc).__name__, str(exc)]
    finally:
        remove_carried()
    return None


def bring(target: str, most_bytes: int) -> list[str] | None:
    """Put a file where the host fetches it. Return the kind and text of an error."""
    try:
        with open(target, "rb") as file:
            if os.fstat(file.fileno()).st_size > most_bytes:
                return ["OutputLimitExceededError", ""]
        try:
            os.link(target, CARRIED)
        except OSError:
            shutil.copyfile(target, CARRIED)
    except OSError as exc:
        return [type(exc).__name__, str(exc)]
    return None


def remove_carried() -> None:
    with contextlib.suppress(OSError):
        os.unlink(CARRIED)
