"""The cache is bounded: what was not used for longest goes, and never what a process uses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from toolcell.sandbox.process import cache as cache_entries
from toolcell.sandbox.process import packages
from toolcell.sandbox.process.cache import made_entry, private_directory, prune
from toolcell.sandbox.process.packages import PackageEnvironment
from wheels import is_as_built, lay_out

HOUR_NS = 3600 * 10**9

DATA = "x" * (1 << 18)
NAMES = ["tinya", "tinyb", "tinyc"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, and three distributions of a quarter of a mebibyte that are installed."""
    site = tmp_path / "site-packages"
    for name in NAMES:
        lay_out(site, name, "1.0", {f"{name}.txt": DATA, f"{name}.py": ""})
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return private_directory(tmp_path / "caches" / "toolcell")


def built_elsewhere(*wanted: str) -> Path:
    """Build an environment in another process, which uses it no longer."""
    code = (
        "import sys; from toolcell.sandbox.process import packages; print(packages.resolve(sys.argv[1:]).path.parent)"
    )
    done = subprocess.run([sys.executable, "-c", code, *wanted], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def last_used(entry: Path, hours_ago: float) -> None:
    at = time.time_ns() - int(hours_ago * HOUR_NS)
    os.utime(entry, ns=(at, at))


def test_what_was_not_used_for_longest_goes_first(cache: Path) -> None:
    environments = [built_elsewhere(name) for name in NAMES]
    for hours, environment in zip((3, 1, 2), environments, strict=True):
        last_used(environment, hours)

    freed = prune(cache, max_bytes=3 * len(DATA))

    assert len(DATA) < freed < 2 * len(DATA)
    assert [environment.exists() for environment in environments] == [False, True, True]
    assert not list((cache / "environments").glob(f"{environments[0].name}.lock"))


def test_what_a_process_uses_is_never_removed(cache: Path) -> None:
    ours = packages.resolve(NAMES[:1])
    other = built_elsewhere(NAMES[1])
    last_used(ours.path.parent, 100)

    prune(cache, max_bytes=0)

    assert is_as_built(ours) and not other.exists()


def test_an_environment_that_was_removed_is_built_again(cache: Path) -> None:
    environment = built_elsewhere(NAMES[0])
    prune(cache, max_bytes=0)
    assert not environment.exists()
    assert is_as_built(packages.resolve(NAMES[:1]))


def test_who_adds_an_environment_removes_what_is_too_much(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = built_elsewhere(NAMES[0])
    monkeypatch.setattr(prune, "__kwdefaults__", {"max_bytes": 2 * len(DATA)})

    newer = packages.resolve(NAMES[1:2])

    assert not older.exists()
    assert is_as_built(newer)


def test_so_does_who_adds_something_else(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = built_elsewhere(NAMES[0])
    monkeypatch.setattr(prune, "__kwdefaults__", {"max_bytes": 2 * len(DATA)})

    newer = made_entry(cache / "guest" / "key", "a text", lambda building: (building / "text").write_text(2 * DATA))
    cache_entries._pruning[cache].join()

    assert not older.exists()
    assert (newer / "text").read_text() == 2 * DATA


def test_nobody_who_adds_something_waits_for_what_is_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned, goes_on = [], threading.Event()

    def prune_when_told(which: Path) -> None:
        pruned.append(which)
        assert goes_on.wait(60)

    def add(name: str) -> None:
        made_entry(cache / "guest" / name, "a text", lambda building: (building / "text").write_text(DATA))

    monkeypatch.setattr(cache_entries, "prune", prune_when_told)
    add("first")
    add("second")
    assert cache_entries._pruning[cache].daemon
    goes_on.set()
    cache_entries._pruning[cache].join()
    add("third")
    cache_entries._pruning[cache].join()
    assert pruned == [cache] * 2


def test_what_killed_processes_left_goes_after_an_hour(cache: Path) -> None:
    built_elsewhere(NAMES[0])
    old, new, removed = (cache / "environments" / name for name in (".building-old", ".building-new", ".removed-x"))
    for folder in (old, new, removed):
        folder.mkdir()
    last_used(old, 2)

    prune(cache)

    assert [folder.exists() for folder in (old, new, removed)] == [False, True, False]


STORM = f"""
import sys
sys.path.append({str(Path(__file__).parent.parent)!r})
from pathlib import Path
from wheels import is_as_built
from toolcell.sandbox.process import packages
from toolcell.sandbox.process.cache import default_cache_dir, private_directory, prune
print("ready", flush=True)
sys.stdin.readline()
for round in range(8):
    if sys.argv[1] == "prune":
        prune(private_directory(default_cache_dir()), max_bytes=0)
    else:
        assert is_as_built(packages.resolve(sys.argv[2:]))
"""


def test_processes_that_build_and_remove_at_once_never_use_half_an_environment(cache: Path) -> None:
    wanted = [("prune",), ("build", NAMES[0]), ("build", *NAMES[:2]), ("prune",)]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", STORM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in wanted
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    errors = [racer.communicate(timeout=60)[1] for racer in racers]
    assert [(racer.returncode, error) for racer, error in zip(racers, errors, strict=True)] == [(0, "")] * 4


def test_a_link_in_the_place_of_an_entry_is_not_followed(cache: Path, tmp_path: Path) -> None:
    environment = built_elsewhere(NAMES[0])
    elsewhere = tmp_path / "elsewhere"
    environment.chmod(0o700)  # only root moves a folder that nobody may write to
    environment.rename(elsewhere)
    environment.symlink_to(elsewhere)

    prune(cache, max_bytes=0)

    assert (elsewhere / "manifest.json").exists()
    found: PackageEnvironment = packages.resolve(NAMES[:1])
    assert is_as_built(found)
    assert not found.path.parent.is_symlink()
