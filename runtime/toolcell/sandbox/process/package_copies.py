"""Keep one read-only copy of each distribution in the cache. Package environments are made of hard links to them.

A copy is a directory `packages/<key>` with `site/` and `manifest.json`. It has its bytecode and a RECORD of the files
that are there, so that it is the same whichever installer it came from.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from toolcell.errors import PackageError
from toolcell.sandbox.process.cache import entry_key, hold
from toolcell.sandbox.process.cache_entries import COPIES
from toolcell.sandbox.process.package_installers import InstallProgress, PackageSource
from toolcell.sandbox.process.package_sources import LEFT_OUT, TargetInterpreter, distributions_in
from toolcell.support.atomic import new_directory, remove_tree

FORMAT = 1
"""Part of every key: a change of layout makes new copies instead of misreading old ones."""

FILE_MODE, DIR_MODE = 0o444, 0o555
"""Readable by everybody, because the sandbox runs under another user id. Writable by nobody."""

_AT_ONCE = 4
"""Distributions that are unpacked at the same time."""

_NOT_IMPORTED = ("bin", "include", ".lock")
"""What installers put beside modules: scripts, whose first line is a path of this machine, headers, a lock."""

_COMPILE = """\
import compileall, functools, os, py_compile, re, sys
from concurrent.futures import ProcessPoolExecutor
if __name__ == "__main__":
    with ProcessPoolExecutor() as pool:
        for site in sys.argv[1:]:
            names = [os.path.join(at, name) for at, _, files in os.walk(site) for name in files if name.endswith(".py")]
            names = [name for name in names if not re.search("/tests?/", name[len(site):])]
            compiled = functools.partial(compileall.compile_file, quiet=2, stripdir=site,
                                         invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
            for _ in pool.map(compiled, names, chunksize=16): pass
"""


@dataclass(frozen=True, slots=True)
class PackageCopy:
    """The copy of one distribution."""

    site: Path
    name: str
    version: str
    files: Mapping[str, str]
    """Path to SHA-256."""

    @property
    def key(self) -> str:
        """The name of its directory in the cache."""
        return self.site.parent.name


def ensure_copies(
    sources: Sequence[PackageSource],
    interpreter: TargetInterpreter,
    cache: Path,
    progress: InstallProgress,
    held: ExitStack,
) -> list[PackageCopy]:
    """Return the copy of each distribution. Those that are missing or damaged are made, all of them or none.

    Two processes may make the same copy at once; one of them stays. `held` keeps them from being removed.

    Raises:
        PackageError: a distribution cannot be had, or is none.
        OSError: the cache cannot be written.
    """
    places = {source: cache / COPIES / _key(source, interpreter) for source in sources}
    missing = [source for source, place in places.items() if _hold_copy(place, held) is None]
    with ExitStack() as stack:
        for source in missing:
            remove_tree(places[source])
        sites = {source: stack.enter_context(new_directory(places[source])) / "site" for source in missing}

        def fill(source: PackageSource) -> None:
            progress.say(f"unpacking {source.name}")
            sites[source].mkdir()
            source.fill(sites[source])
            _drop_what_names_this_machine(sites[source])

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(fill, missing))
        if missing:
            progress.say(f"compiling {', '.join(source.name for source in missing)}")
            _compile_bytecode(interpreter, list(sites.values()))
        for source in missing:
            _finish(sites[source], source)
    found = [_hold_copy(place, held) for place in places.values()]
    if None in found:
        raise PackageError(f"the packages in {cache} changed while they were copied; try again")
    return [copy for copy in found if copy is not None]


def _hold_copy(place: Path, holding: ExitStack) -> PackageCopy | None:
    opened = hold(place)
    if opened is not None:
        holding.callback(os.close, opened)
    return read_copy(place)


def _key(source: PackageSource, interpreter: TargetInterpreter) -> str:
    facts = [FORMAT, interpreter.version, interpreter.tag, source.name, source.identity]
    return entry_key(facts)


def read_copy(place: Path) -> PackageCopy | None:
    """Return the copy at `place` if it is whole: its files, their sizes and times are as it was made."""
    try:
        manifest: dict[str, Any] = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
        if manifest["listing"] != listing(place / "site"):
            return None
        return PackageCopy(place / "site", manifest["name"], manifest["version"], manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _drop_what_names_this_machine(site: Path) -> None:
    """Drop scripts and records of where a wheel came from."""
    for name in _NOT_IMPORTED:
        path = site / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for left_out in (path for name in LEFT_OUT for path in site.glob(f"*.dist-info/{name}")):
        left_out.unlink()


def _compile_bytecode(interpreter: TargetInterpreter, sites: Sequence[Path]) -> None:
    """Write .pyc files that stay valid wherever a copy is mounted and whatever its times are.

    Hash-based and unchecked, so a guest neither compiles nor looks at a source's time; file names in them are relative,
    so no path of this machine is inside. Test suites are left out: nobody imports them, and they are half the files.
    A file that does not compile is the package's business.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(
        [str(interpreter.python), "-s", "-P", "-c", _COMPILE, *map(str, sites)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**own, "PYTHONHASHSEED": "0"},
        check=False,
    )


def _finish(site: Path, source: PackageSource) -> None:
    """Write RECORD and manifest, and make everything read-only."""
    found = distributions_in(site)
    if len(found) != 1:
        raise PackageError(f"{source.name} has the metadata of {len(found)} distributions, not of one")
    (dist,) = found
    (record,) = site.glob("*.dist-info/METADATA")
    record = record.with_name("RECORD")
    record.unlink(missing_ok=True)
    hashes = {str(path.relative_to(site)): _digest(path) for path in files_below(site)}
    own_name = str(record.relative_to(site))
    with record.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        for name, digest in hashes.items():
            if not name.endswith(".pyc"):
                text = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
                table.writerow([name, f"sha256={text}", (site / name).stat().st_size])
        table.writerow([own_name, "", ""])
    hashes[own_name] = _digest(record)
    for directory, _, files in os.walk(site, topdown=False):
        for name in files:
            os.chmod(os.path.join(directory, name), FILE_MODE)
        os.chmod(directory, DIR_MODE)
    manifest = {
        "name": canonicalize_name(dist.metadata["Name"]),
        "version": dist.version,
        "files": {name: digest.hex() for name, digest in hashes.items()},
        "listing": listing(site),
    }
    write_manifest(site.parent, manifest)


def write_manifest(entry: Path, manifest: Mapping[str, object]) -> None:
    """Write the manifest of a directory of the cache, and make both read-only."""
    path = entry / "manifest.json"
    path.write_text(json.dumps(manifest, sort_keys=True), encoding="utf-8")
    path.chmod(FILE_MODE)
    entry.chmod(DIR_MODE)


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def files_below(site: Path) -> list[Path]:
    """Return all files, sorted by path. A link to a directory is a file."""
    found: list[str] = []
    pending = [str(site)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                (pending if entry.is_dir(follow_symlinks=False) else found).append(entry.path)
    return [Path(path) for path in sorted(found)]


def listing(site: Path) -> str:
    """Fingerprint the files by name, size and modification time, without reading them."""
    if not site.is_dir():
        raise FileNotFoundError(site)
    found: list[str] = []
    pending, base = [str(site)], len(str(site))
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    status = entry.stat(follow_symlinks=False)
                    found.append(f"{entry.path[base:]}\0{status.st_size}\0{status.st_mtime_ns}\0")
    return hashlib.sha256("".join(sorted(found)).encode("utf-8", "surrogateescape")).hexdigest()
