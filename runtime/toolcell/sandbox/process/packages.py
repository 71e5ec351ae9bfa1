"""Build the read-only package environment of a sandbox once and keep it in a cache.

An entry of the cache is a directory `environments/<key>` with `site/`, which goes on the guest's path, and
`manifest.json`. The key is a digest of the requirements, the interpreter, and the versions found when installed copies
are used. The files are hard links to one copy of each distribution (`package_copies`), so an environment takes what it
adds.

Installed copies are used when they satisfy every requirement; this needs no network. Otherwise uv or pip finds the
wheels. Everything here blocks: call it from a worker thread.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from toolcell.config import package_name
from toolcell.errors import PackageError
from toolcell.sandbox.process import cache_entries
from toolcell.sandbox.process import package_sources as sources
from toolcell.sandbox.process.cache import default_cache_dir, entry_key, keep, note_use, private_directory
from toolcell.sandbox.process.package_copies import (
    DIR_MODE,
    PackageCopy,
    ensure_copies,
    listing,
    write_manifest,
)
from toolcell.sandbox.process.package_installers import INDEX_VARIABLES, InstallProgress, of_installed, resolved
from toolcell.support import file_lock
from toolcell.support.atomic import link_or_copy, new_directory, remove_tree
from toolcell.support.private_files import make_private_folder

FORMAT = 2
"""Part of every key: a change of layout makes new entries instead of misreading old ones."""


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
    request = _Request(wanted, interpreter, sources.find_installed(wanted, interpreter))
    key = request.key
    cache = private_directory(cache_dir or default_cache_dir())
    environments = cache / cache_entries.ENVIRONMENTS
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
    cache_entries.prune(cache)
    return found


@contextmanager
def _building(lock: Path, progress: InstallProgress) -> Iterator[None]:
    """Hold the lock of an environment. It ends with this process, also after SIGKILL."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not file_lock.lock(descriptor, wait=False):
                progress.say("waiting for another process that builds the same environment")
                file_lock.lock(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)
            progress.end()
    except OSError as exc:
        makes_room = "; `toolcell cache prune` makes room" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise PackageError(f"cannot build the package environment in {lock.parent}: {exc}{makes_room}") from exc


def _kept_environment(entry: Path) -> PackageEnvironment | None:
    """Return an environment that is whole, and keep it from being removed while this process lives."""
    if not keep(entry):
        return None
    found = _read_entry(entry)
    if found is not None:
        for copy in cache_entries.copies_of(entry):
            note_use(entry.parent.parent / cache_entries.COPIES / copy)
    return found


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
        identities = [item.identity for item in self.wanted]
        asked = [FORMAT, self.interpreter.version, self.interpreter.tag, identities]
        if isinstance(self.installed, sources.Installed):
            return entry_key([asked, sorted(self.installed.identities.values())])
        indexes = {name: os.environ[name].rpartition("@")[2] for name in INDEX_VARIABLES if os.environ.get(name)}
        return entry_key([asked, indexes or None])


def _build(cache: Path, request: _Request, progress: InstallProgress) -> None:
    """Build an environment. The caller holds its lock."""
    key = request.key
    entry = cache / cache_entries.ENVIRONMENTS / key
    with new_directory(entry, prefix=f".build-{key}-") as building, ExitStack() as held:
        with tempfile.TemporaryDirectory(dir=building) as scratch:
            source, copies = _copies(cache, request, Path(scratch), progress=progress, held=held)
        progress.say(f"linking {', '.join(f'{copy.name} {copy.version}' for copy in copies)}")
        site = building / "site"
        files = _link(copies, site)
        write_manifest(
            building,
            {
                "key": key,
                "requirements": [item.identity for item in request.wanted],
                "source": source,
                "packages": {copy.name: copy.version for copy in copies},
                "copies": [copy.key for copy in copies],
                "listing": listing(site),
                "digest": digest_of(files),
            },
        )


def _copies(
    cache: Path, request: _Request, scratch: Path, *, progress: InstallProgress, held: ExitStack
) -> tuple[str, list[PackageCopy]]:
    """Return where the files come from, and the copy of each distribution, sorted by name."""
    ensure = partial(ensure_copies, interpreter=request.interpreter, cache=cache, progress=progress, held=held)
    if isinstance(request.installed, sources.Installed):
        return "installed", ensure(of_installed(request.installed))
    try:
        name, found = resolved(request.wanted, request.interpreter, scratch, progress)
        return name, ensure(sorted(found, key=lambda source: source.name))
    except PackageError as exc:
        raise PackageError(f"{exc}{sources.why_none(request.wanted, request.installed)}") from exc


def _link(copies: Sequence[PackageCopy], site: Path) -> dict[str, str]:
    """Make a read-only directory of hard links to all files of `copies`, and return the digest of each.

    Of a file that several have, as of a namespace package, the first one stays.
    """
    site.mkdir()
    made, files, owners = {""}, dict[str, str](), dict[str, str]()
    for copy in copies:
        for name, digest in copy.files.items():
            if name in files:
                if files[name] != digest:
                    sources.logger.warning("%s and %s both have %s: using the first", owners[name], copy.name, name)
                continue
            folder = os.path.dirname(name)
            if folder not in made:
                os.makedirs(site / folder, exist_ok=True)
                made.add(folder)
            link_or_copy(f"{copy.site}/{name}", f"{site}/{name}")
            files[name], owners[name] = digest, copy.name
    for directory, _, _ in os.walk(site, topdown=False):
        os.chmod(directory, DIR_MODE)
    return files


def digest_of(files: Mapping[str, str]) -> str:
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(f"{name}\0{files[name]}\0".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


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
