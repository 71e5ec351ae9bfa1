"""The immortal heap of a zygote: on each Python that has one, off where its probe fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.test_cli_doctor import invoke
from sandbox.test_contained_backend import CONTAINER
from sandbox.test_interpreters import each_version, interpreter
from toolcell import PoolConfig, SyncRuntime
from toolcell_bridge.entry import immortal_heap
from toolcell_bridge.entry.immortal_heap import COUNTS

BRIDGE = Path(immortal_heap.__file__).parent.parent.parent

KNOWN = [f"{major}.{minor}" for major, minor in COUNTS]


def in_python(version: str, source: str) -> str:
    """Run source in a Python of this version, with the bridge on its path; return what it prints."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    run = subprocess.run(
        [python, "-c", f"import sys\nsys.path.insert(0, {str(BRIDGE)!r})\n{textwrap.dedent(source)}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("version", ["3.11", *KNOWN, "3.14"])
def test_the_probe_says_on_which_versions_it_is_on(version: str) -> None:
    why = in_python(version, "from toolcell_bridge.entry import immortal_heap\nprint(immortal_heap.why_mortal())")

    assert why == ("\n" if version in KNOWN else f"Python {version}; with 3.12 and 3.13 sandboxes copy fewer pages\n")


@pytest.mark.parametrize("version", KNOWN)
@pytest.mark.parametrize("wrong", ["0xFFFFFFFE", "0x7FFFFFFF", "5"])
def test_a_count_that_is_not_the_versions_own_is_found(version: str, wrong: str) -> None:
    why = in_python(
        version,
        f"""
        from toolcell_bridge.entry import immortal_heap
        immortal_heap.COUNTS[sys.version_info[:2]] = {wrong}
        print(immortal_heap.why_mortal(), immortal_heap.begin())
        """,
    )

    assert why == "reference counts are not where this build should have them None\n"


def test_a_build_whose_counts_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 has no immortal objects. One that claims to have some is such a build."""
    if sys.version_info >= (3, 12):
        pytest.skip("this Python has immortal objects")
    none = sys.getrefcount(None)
    monkeypatch.setitem(COUNTS, (3, 11), 1 << 33)
    counts = {id(None) // 8: 1 << 33}

    class Memory:
        def __getitem__(self, place: int) -> Any:
            return counts.get(place) or immortal_heap_counts[place]

        def __setitem__(self, place: int, count: int) -> None:
            immortal_heap_counts[place] = count

    immortal_heap_counts = immortal_heap._reference_counts()
    monkeypatch.setattr(immortal_heap, "_reference_counts", Memory)

    assert immortal_heap.why_mortal() == "an immortal reference count changes in this build"
    assert abs(sys.getrefcount(None) - none) < 1000


@pytest.mark.parametrize("version", KNOWN)
def test_what_there_is_becomes_immortal_and_what_comes_is_freed(version: str) -> None:
    shown = in_python(
        version,
        """
        import asyncio, gc, json, weakref
        from toolcell_bridge.entry import immortal_heap
        class Old: pass
        old, holder = Old(), {"key of " + "".join(["a", " dict"]): ["in", "it"]}
        def function(argument="default " + str(sys.argv)): return "a constant of it"
        gc.collect(); gc.freeze()
        heap = immortal_heap.begin()
        steps = 1
        while not heap.step():
            steps += 1
        heap = None
        counts = [sys.getrefcount(each) == 0xFFFFFFFF for each in (
            old, Old, json, json.dumps, json.dumps.__code__, asyncio.Task, holder, *holder, *holder.values(),
            function, *function.__defaults__, *function.__code__.co_consts,
            json.decoder.JSONObject.__code__.co_consts, *json.decoder.JSONObject.__code__.co_consts)]
        new = Old()
        gone = weakref.ref(new)
        cycle = [Old()]; cycle.append(cycle); in_cycle = weakref.ref(cycle[0])
        del new, cycle
        gc.collect()
        print(all(counts), steps > 10, gone() is None, in_cycle() is None, sys.getrefcount(Old()) < 3)
        print(json.dumps(holder), asyncio.run(asyncio.sleep(0, "slept")), function())
        """,
    )

    assert shown.splitlines() == [
        "True True True True True",
        '{"key of a dict": ["in", "it"]} slept a constant of it',
    ]


def old_and_new() -> Iterator[Any]:
    for profile in ("full", "container"):
        for parameter in each_version():
            marks = parameter.marks or ([pytest.mark.contained] if profile == "container" else [])  # not here: skipped
            yield pytest.param(profile, *parameter.values, id=f"{profile}-{parameter.id}", marks=marks)


@pytest.mark.parametrize(("profile", "version", "python"), list(old_and_new()))
def test_sandboxes_share_the_heap_of_a_zygote_that_has_been_idle(profile: str, version: str, python: str) -> None:
    source = """
        import sys, weakref
        class New: pass
        new = New()
        gone = weakref.ref(new)
        del new
        import statistics
        set_result([sys.getrefcount(statistics.mean) == 0xFFFFFFFF, gone() is None, statistics.mean([1, 3])])
    """
    options: dict[str, Any] = {"policy": CONTAINER} if profile == "container" else {}
    with SyncRuntime(python=python, pool=PoolConfig(warm=1), **options) as runtime:
        for _ in range(200):
            found, *others = runtime.execute_code(textwrap.dedent(source)).value
            assert others == [True, 2]
            if found or version not in KNOWN:
                break

    assert found == (version in KNOWN)


def test_doctor_says_whether_it_is_on() -> None:
    _, text, _ = invoke()

    state = "immortal" if sys.version_info[:2] in COUNTS else "mortal: Python"
    assert re.search(rf"^heap +{state}", text, re.MULTILINE)
