"""Copy the type checker ty and its libraries for a sandbox, once. A guest sees the copy as /packages, read-only."""

from __future__ import annotations

import os
from pathlib import Path

from toolcell.errors import UsageError
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


def build() -> Path:
    """Return the copy: `bin/ty`, and the libraries that it needs in `lib`.

    Raises:
        UsageError: ty is not installed.
        SandboxUnavailable: the cache cannot be written, or a library is missing.
    """
    program = _installed()
    entry = private_directory(default_cache_dir()) / "type-checker" / entry_key([FORMAT, *facts_of([program])])
    return made_entry(entry, "the copy of the type checker", lambda building: _fill(building, program))


def _installed() -> Path:
    try:
        from ty import find_ty_bin

        return Path(os.fsdecode(find_ty_bin()))
    except (ImportError, FileNotFoundError) as exc:
        raise UsageError("check_types needs the type checker ty: pip install 'toolcell[types]'") from exc


def _fill(building: Path, program: Path) -> None:
    copy_file(program, building / "bin" / "ty")
    for name, path in libraries_of(program).items():
        copy_file(path, building / "lib" / name)
