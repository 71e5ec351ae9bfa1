"""Build the guest package: one directory with everything a guest imports from us, compiled to bytecode.

A guest cannot write bytecode. Without it every cold start compiles the same modules again: 45 ms where the host's
copy has none, as in an editable install. One directory is also one mount instead of three.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from toolcell.sandbox.process.cache import copy_file, entry_key, facts_of, made_entry

FORMAT = 1
"""Part of the key: goes up when the content of the directory changes."""

SUFFIXES = (".py", ".so")


def build(packages: Mapping[str, Path], cache: Path) -> Path:
    """Return a directory with these packages and their bytecode. It is built once for each version of their files.

    Raises:
        SandboxUnavailable: the cache cannot be written.
    """
    sources = {name: _sources(folder) for name, folder in sorted(packages.items())}
    facts = facts_of(path for paths in sources.values() for path in paths)
    entry = cache / "guest" / entry_key([FORMAT, sys.version, *facts])
    return made_entry(entry, "the guest package", lambda building: _fill(building, packages, sources))


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)


def _fill(building: Path, packages: Mapping[str, Path], sources: Mapping[str, list[Path]]) -> None:
    import compileall  # only where there is no copy yet
    import py_compile

    for name, paths in sources.items():
        for path in paths:
            copy_file(
                path, building / name / path.relative_to(packages[name]), 0o555 if path.suffix == ".so" else 0o444
            )
    # Unchecked: nobody changes this copy, and a check is a system call per module.
    how = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(building, quiet=2, stripdir=str(building), prependdir="/toolcell", invalidation_mode=how)
