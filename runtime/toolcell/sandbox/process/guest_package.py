"""Build the guest package: one directory with everything a guest imports from us, compiled to bytecode.

A guest cannot write bytecode. Without it every cold start compiles the same modules again: 45 ms where the host's
copy has none, as in an editable install. One directory is also one mount instead of three.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from toolcell.sandbox.process.cache import entry_key, made_entry

FORMAT = 1
"""Part of the key: goes up when the content of the directory changes."""

SUFFIXES = (".py", ".so")


def build(packages: Mapping[str, Path], cache: Path) -> Path:
    """Return a directory with these packages and their bytecode. It is built once for each version of their files.

    Raises:
        SandboxUnavailable: the cache cannot be written.
    """
    sources = {name: _sources(folder) for name, folder in sorted(packages.items())}
    entry = cache / "guest" / _key(sources)
    return made_entry(entry, "the guest package", lambda building: _fill(building, packages, sources))


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)


def _key(sources: Mapping[str, list[Path]]) -> str:
    facts: list[object] = [FORMAT, sys.version]
    for paths in sources.values():
        for path in paths:
            status = path.stat()
            facts.append((str(path), status.st_size, status.st_mtime_ns))
    return entry_key(facts)


def _fill(building: Path, packages: Mapping[str, Path], sources: Mapping[str, list[Path]]) -> None:
    import compileall  # only where there is no copy yet
    import py_compile

    for name, paths in sources.items():
        for path in paths:
            _copy(path, building / name / path.relative_to(packages[name]))
    # Unchecked: nobody changes this copy, and a check is a system call per module.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(building, quiet=2, stripdir=str(building), prependdir="/toolcell", invalidation_mode=mode)
    for folder, _, _ in os.walk(building):
        os.chmod(folder, 0o755)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    os.chmod(target, 0o555 if source.suffix == ".so" else 0o444)
