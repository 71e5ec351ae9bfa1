"""Build the read-only package environment of a sandbox once and keep it in a cache.

An entry of the cache is a directory `environments/<key>` with `site/`, which goes on the guest's path, and
`manifest.json`. The key is a digest of the requirements, the interpreter, and the versions found when installed copies
are used.

Installed copies are used when they satisfy every requirement; this needs no network. Otherwise uv or pip installs
wheels. Everything here blocks: call it from a worker thread.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from toolcell.config import package_name
from toolcell.errors import PackageError
from toolcell.sandbox.process import package_sources as sources
from toolcell.sandbox.process.cache import ENVIRONMENTS, default_cache_dir, entry_key, keep, private_directory, prune
from toolcell.sandbox.process.package_sources import INDEX_VARIABLES, InstallProgress, install
from toolcell.support import files
from toolcell.support.files import make_private_folder, new_directory, remove_tree

FORMAT = 3
"""Part of every key: a change of layout makes new entries instead of misreading old ones."""

FILE_MODE, DIR_MODE = 0o444, 0o555
"""Readable by everybody, because the sandbox runs under another user id. Writable by nobody."""

_NOT_IMPORTED = ("bin", "include", ".lock")
"""What installers put beside modules: scripts, whose first line is a path of this machine, headers, a lock."""

_COMPILE = """\
import compileall, functools, os, py_compile, re, sys
from concurrent.futures import ProcessPoolExecutor
if __name__ == "__main__":
    site = sys.argv[1]
    names = [os.path.join(at, name) for at, _, files in os.walk(site) for name in files if name.endswith(".py")]
    names = [name for name in names if not re.search("/tests?/", name[len(site):])]
    compiled = functools.partial(compileall.compile_file, quiet=2, stripdir=site,
                                 invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(compiled, names, chunksize=16): pass
"""


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
        found: dict[str, str] = {canonicalize_name(each): f"{each} {self.packages[each]}" for each in self.packages}
        wanted = sources.parse_wanted(requirements)
        names = [item.requirement.name if item.requirement else "" for item in wanted]
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
    request = _Request(wanted, interpreter, sources.find_installed(wanted, interpreter))
    key = request.key
    cache = private_directory(cache_dir or default_cache_dir())
    environments = cache / ENVIRONMENTS
    if found := _kept_environment(environments / key):
        return found
    make_private_folder(environments)
    progress = InstallProgress()
    with _building(environments / f"{key}.lock", progress):
        if found := _kept_environment(environments / key):
            return found
        _clear(environments, key)
        _build(cache, request, progress)
        found = _kept_environment(environments / key)
    if found is None:
        raise PackageError(f"the package environment {environments / key} changed while it was built")
    prune(cache)
    return found


@contextmanager
def _building(lock: Path, progress: InstallProgress) -> Iterator[None]:
    """Hold the lock of an environment. It ends with this process, also after SIGKILL."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not files.lock(descriptor, wait=False):
                progress.say("waiting for another process that builds the same environment")
                files.lock(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)
            progress.end()
    except OSError as exc:
        makes_room = "; what no process uses may be removed" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise PackageError(f"cannot build the package environment in {lock.parent}: {exc}{makes_room}") from exc


def _kept_environment(entry: Path) -> PackageEnvironment | None:
    """Return an environment that is whole, and keep it from being removed while this process lives."""
    return _read_entry(entry) if keep(entry) else None


@dataclass(frozen=True, slots=True)
class _Request:
    """What an environment is to have in it."""

    wanted: Sequence[sources.Wanted]
    interpreter: sources.TargetInterpreter
    installed: sources.Installed | str
    """Or why no installed copies can be used."""

    @property
    def key(self) -> str:
        """Equal for equal environments."""
        asked = [FORMAT, self.interpreter.version, self.interpreter.tag, [item.identity for item in self.wanted]]
        if isinstance(self.installed, sources.Installed):
            return entry_key([asked, sorted(self.installed.identities.values())])
        indexes = {name: os.environ[name].rpartition("@")[2] for name in INDEX_VARIABLES if os.environ.get(name)}
        return entry_key([asked, indexes or None])


def _build(cache: Path, request: _Request, progress: InstallProgress) -> None:
    """Build an environment. The caller holds its lock."""
    key = request.key
    with new_directory(cache / ENVIRONMENTS / key, prefix=f".build-{key}-") as building:
        site = building / "site"
        source = _fill(site, request, progress)
        found = sources.distributions_in(site)
        _drop_what_names_this_machine(site)
        progress.say(f"compiling {', '.join(dist.metadata['Name'] for dist in found)}")
        _compile_bytecode(request.interpreter, site)
        for directory, _, files in os.walk(site, topdown=False):
            for name in files:
                os.chmod(os.path.join(directory, name), FILE_MODE)
            os.chmod(directory, DIR_MODE)
        manifest = {
            "key": key,
            "requirements": [item.identity for item in request.wanted],
            "source": source,
            "packages": {canonicalize_name(dist.metadata["Name"]): dist.version for dist in found},
            "listing": listing(site),
            "digest": digest_of(site),
        }
        path = building / "manifest.json"
        path.write_text(json.dumps(manifest, sort_keys=True), encoding="utf-8")
        path.chmod(FILE_MODE)
        building.chmod(DIR_MODE)


def _fill(site: Path, request: _Request, progress: InstallProgress) -> str:
    """Put the wanted packages into a new directory, and return where they come from."""
    if isinstance(request.installed, sources.Installed):
        progress.say(f"copying {', '.join(request.installed.found)}")
        site.mkdir()
        sources.copy_installed(request.installed, site)
        return "installed"
    try:
        return install(request.wanted, request.interpreter, site, progress)
    except PackageError as exc:
        raise PackageError(f"{exc}{sources.why_none(request.wanted, request.installed)}") from exc


def _drop_what_names_this_machine(site: Path) -> None:
    """Drop scripts and records of where a wheel came from, and the rows of a RECORD whose files are not there."""
    for name in _NOT_IMPORTED:
        path = site / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for left_out in (path for name in sources.LEFT_OUT for path in site.glob(f"*.dist-info/{name}")):
        left_out.unlink()
    for record in site.glob("*.dist-info/RECORD"):
        rows = sorted(sources.rows_of(Distribution.at(record.parent)))
        with record.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def _compile_bytecode(interpreter: sources.TargetInterpreter, site: Path) -> None:
    """Write .pyc files that stay valid wherever an environment is mounted and whatever its times are.

    Hash-based and unchecked, so a guest neither compiles nor looks at a source's time; file names in them are relative,
    so no path of this machine is inside. Test suites are left out: nobody imports them, and they are half the files.
    A file that does not compile is the package's business.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(
        [str(interpreter.python), "-s", "-P", "-c", _COMPILE, str(site)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**own, "PYTHONHASHSEED": "0"},
        check=False,
    )


def digest_of(site: Path) -> str:
    """Return a digest of the names and contents of all files."""
    whole = hashlib.sha256()
    for path in map(Path, sorted(entry.path for entry in _files(site))):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.relative_to(site)}\0{content}\0".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def _files(site: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all files. A link to a directory is a file."""
    pending = [str(site)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    yield entry


def listing(site: Path) -> str:
    """Fingerprint the files by name, size and modification time, without reading them."""
    if not site.is_dir():
        raise FileNotFoundError(site)
    facts = ((entry.path[len(str(site)) :], entry.stat(follow_symlinks=False)) for entry in _files(site))
    lines = sorted(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0" for name, status in facts)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _read_entry(entry: Path) -> PackageEnvironment | None:
    """Return the environment at `entry` if it is whole: its files, their sizes and times are as built."""
    try:
        manifest: dict[str, Any] = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
        if manifest["key"] != entry.name or manifest["listing"] != listing(entry / "site"):
            return None
        return PackageEnvironment(
            entry / "site", manifest["key"], manifest["packages"], manifest["digest"], manifest["source"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _clear(environments: Path, key: str) -> None:
    """Remove a broken entry and what killed builds of this key left. The caller holds the key's lock."""
    for leftover in [environments / key, *environments.glob(f".build-{key}-*")]:
        if leftover.exists():
            remove_tree(leftover)
