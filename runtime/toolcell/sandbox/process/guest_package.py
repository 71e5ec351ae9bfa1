"""The guest's own half in one directory, compiled: what a guest sees as its harness.

A guest cannot write bytecode, so without it every cold start compiles the same modules again: 45 ms where the
host's copy has none, as in an editable install. One directory is also one mount where there were three. Knows files;
knows nothing of mounts or sandboxes.
"""

from __future__ import annotations

import compileall
import hashlib
import json
import os
import py_compile
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from toolcell.errors import SandboxUnavailable

FORMAT = 1
"""Part of the key: goes up when what is made would differ."""

SUFFIXES = (".py", ".so")


def take(packages: Mapping[str, Path], cache: Path) -> Path:
    """Return a directory holding these packages with their bytecode, making it if these versions are not there.

    Raises:
        SandboxUnavailable: the cache cannot be written.
    """
    sources = {name: _sources(folder) for name, folder in sorted(packages.items())}
    place = cache / "harness" / _key(sources)
    try:
        if not place.is_dir():
            _make(place, packages, sources)
    except OSError as exc:
        raise SandboxUnavailable(f"the guest's half cannot be kept in {cache}: {exc}") from exc
    return place


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)


def _key(sources: Mapping[str, list[Path]]) -> str:
    facts: list[object] = [FORMAT, sys.version]
    for paths in sources.values():
        for path in paths:
            status = path.stat()
            facts.append((str(path), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _make(place: Path, packages: Mapping[str, Path], sources: Mapping[str, list[Path]]) -> None:
    """Build beside its place and rename; whoever comes second finds it done."""
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=place.parent))
    try:
        for name, paths in sources.items():
            for path in paths:
                _copy(path, work / name / path.relative_to(packages[name]))
        # Unchecked: nobody changes this copy, and a check is a system call per module.
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        compileall.compile_dir(work, quiet=2, stripdir=str(work), prependdir="/toolcell", invalidation_mode=mode)
        for folder, _, _ in os.walk(work):
            os.chmod(folder, 0o755)
        try:
            work.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    os.chmod(target, 0o555 if source.suffix == ".so" else 0o444)
