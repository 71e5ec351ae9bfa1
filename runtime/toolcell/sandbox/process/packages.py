"""Build the read-only package environment of a sandbox once and keep it in a cache.

An entry of the cache is a directory `<key>` with `site/`, which goes on the guest's path, and `manifest.json`. The key
is a digest of the requirements, the interpreter, and the versions found when installed copies are used.

Installed copies are used when they satisfy every requirement; this needs no network. Otherwise uv or pip installs
wheels. Everything here blocks: call it from a worker thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from packaging.utils import canonicalize_name

from toolcell.config import package_name
from toolcell.errors import PackageError
from toolcell.sandbox.process import package_sources as sources
from toolcell.sandbox.process.cache import default_cache_dir, private_directory
from toolcell.support.atomic import new_directory, remove_tree

FORMAT = 1
"""Part of every key: a change of layout makes new entries instead of misreading old ones."""

_FILE_MODE, _DIR_MODE = 0o444, 0o555
"""Readable by everybody, because the sandbox runs under another user id. Writable by nobody."""


@dataclass(frozen=True, slots=True)
class PackageEnvironment:
    """A directory of importable packages that nobody may change."""

    path: Path
    """To be mounted read-only and put on the guest's `sys.path`."""
    key: str
    """Equal for the same requirements and the same interpreter."""
    packages: Mapping[str, str]
    """Name to version, dependencies included."""
    digest: str
    """SHA-256 over the names and contents of all files."""
    source: str
    """Where the files came from: "installed", "uv" or "pip"."""

    def versions(self, requirements: Sequence[str]) -> tuple[str, ...]:
        """Return what was asked for, as name and version."""
        found = {canonicalize_name(name): f"{name} {version}" for name, version in self.packages.items()}
        wanted = sources.parse_wanted(requirements)
        names = [canonicalize_name(item.requirement.name if item.requirement else "") for item in wanted]
        return tuple(found.get(name, package_name(item.text)) for name, item in zip(names, wanted, strict=True))


def resolve(
    packages: Sequence[str], *, python: Path | None = None, cache_dir: Path | None = None
) -> PackageEnvironment:
    """Return the environment with `packages` for `python`, building it if it is not in the cache.

    Safe to call from several threads and processes at once: one builds, the others wait. A killed build leaves a
    directory that nobody reads; the next build of the same key removes it.

    Raises:
        UsageError: a requirement is malformed, or is an option, a URL or a path.
        PackageError: the cache cannot be used, or an installer failed.
    """
    wanted = sources.parse_wanted(packages)
    interpreter = sources.probe_interpreter(python or Path(sys.executable))
    installed = sources.find_installed(wanted, interpreter)
    key = _key(wanted, interpreter, installed)
    cache = private_directory(cache_dir or default_cache_dir())
    if entry := _read_entry(cache / key):
        return entry
    with FileLock(cache / f"{key}.lock", mode=0o600):
        if entry := _read_entry(cache / key):
            return entry
        _clear(cache, key)
        return _build(cache, key, wanted, interpreter, installed)


def _key(
    wanted: Sequence[sources.Wanted], interpreter: sources.TargetInterpreter, installed: sources.Installed | str
) -> str:
    asked = [FORMAT, interpreter.version, interpreter.tag, [item.identity for item in wanted]]
    answer = installed.identity if isinstance(installed, sources.Installed) else None
    return hashlib.sha256(json.dumps([asked, answer]).encode()).hexdigest()[:32]


def _build(
    cache: Path,
    key: str,
    wanted: Sequence[sources.Wanted],
    interpreter: sources.TargetInterpreter,
    installed: sources.Installed | str,
) -> PackageEnvironment:
    try:
        with new_directory(cache / key, prefix=f".build-{key}-") as building:
            site = building / "site"
            site.mkdir()
            source = _fill(site, wanted, interpreter, installed)
            sources.compile_bytecode(interpreter, site)
            _make_read_only(site)
            _write_manifest(building, key, source, wanted, interpreter)
            building.chmod(_DIR_MODE)
    except OSError as exc:
        raise PackageError(f"cannot build the package environment in {cache}: {exc}") from exc
    if entry := _read_entry(cache / key):
        return entry
    raise PackageError(f"the package environment {cache / key} changed while it was built")


def _fill(
    site: Path,
    wanted: Sequence[sources.Wanted],
    interpreter: sources.TargetInterpreter,
    installed: sources.Installed | str,
) -> str:
    if isinstance(installed, sources.Installed):
        sources.logger.info("copying %s", ", ".join(sorted(installed.found)))
        sources.copy_installed(installed, site)
        return "installed"
    try:
        return sources.install(wanted, interpreter, site)
    except PackageError as exc:
        raise PackageError(f"{exc}\n(no installed copy was used: {installed})") from exc


def _make_read_only(site: Path) -> None:
    for directory, _, files in os.walk(site, topdown=False):
        for name in files:
            os.chmod(os.path.join(directory, name), _FILE_MODE, follow_symlinks=True)
        os.chmod(directory, _DIR_MODE)


def _write_manifest(
    building: Path, key: str, source: str, wanted: Sequence[sources.Wanted], interpreter: sources.TargetInterpreter
) -> None:
    site = building / "site"
    files, listing = _listing(site)
    manifest = {
        "format": FORMAT,
        "key": key,
        "requirements": [item.identity for item in wanted],
        "python": f"{interpreter.version} {interpreter.tag}",
        "source": source,
        "packages": {canonicalize_name(d.metadata["Name"]): d.version for d in sources.distributions_in(site)},
        "files": files,
        "listing": listing,
        "digest": _content_digest(site),
    }
    path = building / "manifest.json"
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
    path.chmod(_FILE_MODE)


def _read_entry(entry: Path) -> PackageEnvironment | None:
    """Return the environment at `entry` if it is whole: its files, their sizes and times are as built."""
    try:
        manifest: dict[str, Any] = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
        if manifest["key"] != entry.name or (manifest["files"], manifest["listing"]) != _listing(entry / "site"):
            return None
        return PackageEnvironment(
            entry / "site", manifest["key"], manifest["packages"], manifest["digest"], manifest["source"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(environment: PackageEnvironment) -> bool:
    """Read every file and return whether the contents are still as built. Slower than the check of `resolve`."""
    return _content_digest(environment.path) == environment.digest


def _files(site: Path) -> list[os.DirEntry[str]]:
    found: list[os.DirEntry[str]] = []
    pending = [str(site)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    found.append(entry)
    return sorted(found, key=lambda entry: entry.path)


def _listing(site: Path) -> tuple[int, str]:
    """Count and fingerprint the files by name, size and modification time, without reading them."""
    if not site.is_dir():
        raise FileNotFoundError(site)
    files, fingerprint, base = _files(site), hashlib.sha256(), len(str(site))
    for entry in files:
        status = entry.stat(follow_symlinks=False)
        fingerprint.update(
            f"{entry.path[base:]}\0{status.st_size}\0{status.st_mtime_ns}\0".encode("utf-8", "surrogateescape")
        )
    return len(files), fingerprint.hexdigest()


def _content_digest(site: Path) -> str:
    whole, base = hashlib.sha256(), len(str(site))
    for entry in _files(site):
        with open(entry.path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{entry.path[base:]}\0{content}\0".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def _clear(cache: Path, key: str) -> None:
    """Remove a broken entry and what killed builds of this key left. The caller holds the key's lock."""
    for leftover in [cache / key, *cache.glob(f".build-{key}-*")]:
        if leftover.exists():
            remove_tree(leftover)
