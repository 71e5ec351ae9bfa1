"""Copy programs of this machine for guests, once: a shell with the usual small programs, and the type checker ty.

A guest that may execute programs sees the first copy as /programs, read-only. It has what is in `NAMES` and installed
here, the libraries of those programs, and nothing else: no program that gives rights, opens a connection or changes the
machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.sandbox.process.cache import (
    copy_file,
    default_cache_dir,
    entry_key,
    facts_of,
    made_entry,
    private_directory,
)
from toolcell.sandbox.process.libraries import libraries_of

FORMAT = 1
"""Part of the key: goes up when the content of a copy changes."""

PROGRAMS = "/programs"
SHELL = "sh"

NAMES = (
    SHELL, "bash",
    "[", "awk", "b2sum", "base32", "base64", "basename", "bzip2", "cat", "chmod", "cksum", "cmp", "comm", "cp",
    "csplit", "cut", "date", "dd", "df", "diff", "diff3", "dirname", "du", "echo", "env", "expand", "expr",
    "factor", "false", "find", "fmt", "fold", "grep", "gzip", "head", "id", "install", "join", "jq", "link", "ln",
    "ls", "md5sum", "mkdir", "mktemp", "mv", "nl", "nproc", "numfmt", "od", "paste", "patch", "pr", "printenv",
    "printf", "pwd", "readlink", "realpath", "rm", "rmdir", "sed", "seq", "sha1sum", "sha256sum", "sha512sum",
    "shred", "shuf", "sleep", "sort", "split", "stat", "sum", "tac", "tail", "tar", "tee", "test", "timeout",
    "touch", "tr", "true", "truncate", "tsort", "uname", "unexpand", "uniq", "unlink", "wc", "whoami", "xargs",
    "xz", "yes",
)  # fmt: skip

PLACES = "/usr/bin:/bin"
"""Not the PATH of this process: what a person installed elsewhere is not shown to guests."""

ENVIRONMENT = {"PATH": f"{PROGRAMS}/bin", "LD_LIBRARY_PATH": f"{PROGRAMS}/lib", "SHELL": f"{PROGRAMS}/bin/{SHELL}"}
"""Environment of every script that may execute programs."""


def build(cache: Path, interpreter: str) -> Path:
    """Return the copy, with a link to the guest's own `interpreter` as python3.

    Raises:
        SandboxUnavailable: there is no shell here, or the cache cannot be written.
    """
    found = {name: Path(os.path.realpath(path)) for name in NAMES if (path := shutil.which(name, path=PLACES))}
    if SHELL not in found:
        raise SandboxUnavailable(f"Policy(shell=True) needs the program {SHELL} of this machine, and {PLACES} has none")
    facts = [FORMAT, interpreter, *facts_of([*found.values(), Path("/etc/ld.so.cache")]), *sorted(found)]
    entry = cache / "programs" / entry_key(facts)
    return made_entry(entry, "the copy of the shell's programs", lambda building: _fill(building, found, interpreter))


def _fill(building: Path, found: Mapping[str, Path], interpreter: str) -> None:
    needed = {path: libraries_of(path) for path in set(found.values())}
    for name, path in found.items():
        if needed[path]:  # others are scripts
            copy_file(path, building / "bin" / name)
    for soname, path in {soname: path for each in needed.values() for soname, path in each.items()}.items():
        copy_file(path, building / "lib" / soname)
    (building / "bin" / "python3").symlink_to(interpreter)


def copy_type_checker() -> Path:
    """Return a copy of ty for a sandbox, which sees it as /packages, read-only: `bin/ty`, and its libraries in `lib`.

    Raises:
        UsageError: ty is not installed.
        SandboxUnavailable: the cache cannot be written, or a library is missing.
    """
    try:
        from ty import find_ty_bin

        program = Path(os.fsdecode(find_ty_bin()))
    except (ImportError, FileNotFoundError) as exc:
        raise UsageError("check_types needs the type checker ty: pip install 'toolcell[types]'") from exc

    def fill(building: Path) -> None:
        copy_file(program, building / "bin" / "ty")
        for name, path in libraries_of(program).items():
            copy_file(path, building / "lib" / name)

    entry = private_directory(default_cache_dir()) / "type-checker" / entry_key([FORMAT, *facts_of([program])])
    return made_entry(entry, "the copy of the type checker", fill)
