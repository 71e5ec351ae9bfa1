"""Copy the type checker ty and its libraries for a sandbox, once. A guest sees the copy as /packages, read-only."""

from __future__ import annotations

import os
from pathlib import Path

from toolcell.errors import UsageError
from toolcell.sandbox.process.cache import default_cache_dir, entry_key, made_entry, private_directory
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
    status = program.stat()
    facts = [FORMAT, str(program), status.st_mtime_ns, status.st_size]
    cache = private_directory(default_cache_dir())
    entry = cache / "type-checker" / entry_key(facts)
    return made_entry(entry, "the copy of the type checker", lambda building: _fill(building, program))


def _installed() -> Path:
    try:
        from ty import find_ty_bin

        return Path(os.fsdecode(find_ty_bin()))
    except (ImportError, FileNotFoundError) as exc:
        raise UsageError("check_types needs the type checker ty: pip install 'toolcell[types]'") from exc


def _fill(building: Path, program: Path) -> None:
    libraries = {Path("lib", name): path for name, path in libraries_of(program).items()}
    wanted = {Path("bin", "ty"): program} | libraries
    for target, source in wanted.items():
        (building / target).parent.mkdir(exist_ok=True, mode=0o755)
        (building / target).write_bytes(Path(os.path.realpath(source)).read_bytes())
        (building / target).chmod(0o555)
    for folder in (building, building / "bin", building / "lib"):
        folder.chmod(0o755)
