"""`install_package` with indexes that have odd packages, answer with errors, or do not answer at all."""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import psutil
import pytest

from builtin.webkit import Page, page
from egress.package_index import index, link_to, opened
from rows import each_row
from runtime.conftest import eventually
from runtime.test_life import alive, cgroup_folders
from toolcell import Allow, Egress, Limits, Outcome, PoolConfig, Runtime
from toolcell.egress import PackageIndex
from wheels import make_wheel

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]


KEY = "k-0f3a9c51d7e2"

INSTALL = """
import importlib
found = {}
for name in names:
    try:
        install_package(name)
        found[name] = importlib.import_module(name.partition("=")[0]).VALUE
    except RuntimeError as error:
        found[name] = str(error)
set_result(found)
"""

ODD = {
    "sdist": "No matching distribution found for sdist. Only wheels of pure Python",
    "yanked": 1,
    "pinned==2.0": 2,
    "gone": "No matching distribution found for gone",
    "damaged": "a wheel cannot be unpacked: Bad CRC-32",
    "unlisted": 1,
    "needy": 1,
    "crowd": "crowd and what it needs are 33 wheels, and one call installs at most 32",
    "locked": "cannot be read: 403 Client Error",
    "broken": "json.decoder.JSONDecodeError: ",
    "leaning": "the index cannot be reached: GET http://127.0.0.1:",
}
"""By what a script asks for: the value of the module that it gets, or what it reads."""


async def test_odd_packages_and_answers_with_errors_are_named(tmp_path: Path) -> None:
    def make(name: str, version: str = "1.0", value: int = 1, metadata: str = "") -> Path:
        return make_wheel(tmp_path, name, version, {f"{name}/__init__.py": f"VALUE = {value}"}, metadata)

    def changed(wheel: Path, old: bytes, new: bytes) -> Path:
        content = wheel.read_bytes()
        assert content.count(old) == 1
        wheel.write_bytes(content.replace(old, new))
        return wheel

    unlisted = make("unlisted")
    with zipfile.ZipFile(unlisted, "a") as wheel:
        wheel.writestr("unlisted/more.py", "")
    yanked, first, second, pinned = make("gone"), make("yanked"), make("yanked", "2.0", 2), make("pinned", "2.0", 2)
    odd = [
        changed(make("damaged"), b"VALUE = 1", b"VALUE = 2"),
        unlisted,
        make("needy", metadata="Requires-Dist: pip\n"),
        make("pip", "99.0"),
        make("crowd", metadata="".join(f"Requires-Dist: one{number}\n" for number in range(32))),
        *(make(f"one{number}") for number in range(32)),
        make("leaning"),  # which is not taken because the index does not answer for what the newer one needs
        make("leaning", "2.0", metadata="Requires-Dist: silent\n"),
    ]
    pages = {
        "/simple/sdist/": page('<a href="/files/sdist-1.0.tar.gz">sdist-1.0.tar.gz</a>'),
        "/simple/yanked/": page(link_to(first) + link_to(second, 'data-yanked="broken"')),
        "/simple/pinned/": page(link_to(pinned, 'data-yanked=""')),
        "/simple/gone/": page(link_to(yanked, 'data-yanked=""')),
        "/simple/locked/": page("no", "text/plain", "403 Forbidden"),
        "/simple/broken/": page("{", "application/vnd.pypi.simple.v1+json"),
    }
    async with opened([yanked, first, second, pinned, *odd], *{name.partition("=")[0] for name in ODD}) as (
        site,
        runtime,
    ):
        site.pages.update(pages)
        site.pages["/simple/silent/"] = anyio.abc.ByteStream.aclose
        result = await runtime.execute_code(INSTALL, inputs={"names": list(ODD)})

    assert result.error is None, result.error
    for name, expected in ODD.items():
        found = result.value[name]
        assert expected in found if isinstance(expected, str) else expected == found, (name, found)


async def test_an_index_gets_a_secret_that_the_script_does_not_have(tmp_path: Path) -> None:
    def guarded(content: bytes) -> Page:
        async def answer(stream: anyio.abc.ByteStream) -> None:
            is_known = f"X-Key: {KEY}\r\n" in site.requests[-1]
            await stream.send(content if is_known else page("who are you?", "text/plain", "401 Unauthorized"))

        return answer

    wheel = make_wheel(tmp_path, "own", "1.0", {"own/__init__.py": "VALUE = 1", "own/data": "x" * 600_000})
    async with index(wheel) as site:
        site.pages.update(
            {path: guarded(content) for path, content in site.pages.items() if isinstance(content, bytes)}
        )
        url, place = site.url("/simple/", "127.0.0.1"), Allow("http://127.0.0.1", ports=[site.port])
        results = []
        for rule in (replace(place, secrets={"X-Key": "{KEY}"}), place):
            packages = PackageIndex(["own"], url=url, rules=[rule])
            async with Runtime(egress=Egress(packages=packages, secrets={"KEY": KEY})) as runtime:
                results.append((await runtime.execute_code(INSTALL, inputs={"names": ["own"]})).value["own"])

    assert results[0] == 1
    assert "401 Client Error" in results[1]


def below(process: int) -> list[psutil.Process]:
    return psutil.Process(process).children(recursive=True)


class Slow:
    """A page of an index that never comes."""

    def __init__(self) -> None:
        self.asked = anyio.Event()

    async def __call__(self, _: anyio.abc.ByteStream) -> None:
        self.asked.set()
        await anyio.sleep_forever()


@each_row("end", ["wall limit", "cancel", "close"])
async def test_nothing_is_left_when_a_run_ends_whose_index_hangs(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    slow, cancelled, results, pid = Slow(), anyio.Event(), list[Any](), os.getpid()
    async with opened([], "slow", pool=PoolConfig(warm=0)) as (site, runtime):
        site.pages["/simple/slow/"] = slow
        await runtime.execute_code("1")
        groups, temporary = cgroup_folders(pid), os.listdir(tmp_path)
        before = below(pid)

        async def run() -> None:
            limits = Limits(wall_s=3 if end == "wall limit" else 120)
            results.append(await runtime.execute_code("install_package('slow')", limits=limits, cancel=cancelled))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await slow.asked.wait()
            started, more = [each for each in below(pid) if each not in before], len(cgroup_folders(pid))
            if end == "cancel":
                cancelled.set()
            if end == "close":
                await runtime.close()

        assert len(started) >= 3  # the script's, and what pip runs in
        assert more == 2 * len(groups)
        await eventually(lambda: alive(started) == [])
        assert cgroup_folders(pid) == ([] if end == "close" else groups)
        assert os.listdir(tmp_path) == ([] if end == "close" else temporary)
    assert results[0].outcome is (Outcome.TIMEOUT if end == "wall limit" else Outcome.CANCELLED)


HOST = """
import sys, anyio
from toolcell import Egress, Limits, Runtime
from toolcell.egress import PackageIndex

async def main():
    egress = Egress(packages=PackageIndex(["slow"], url=sys.argv[1]))
    async with Runtime(egress=egress, limits=Limits(wall_s=120)) as runtime:
        await runtime.execute_code("install_package('slow')")

anyio.run(main)
"""


async def test_nothing_is_left_of_a_host_that_is_killed_while_its_index_hangs(tmp_path: Path) -> None:
    slow = Slow()
    async with index() as site:
        site.pages["/simple/slow/"] = slow
        command = [sys.executable, "-c", HOST, site.url("/simple/", "127.0.0.1")]
        host = await anyio.open_process(command, env={**os.environ, "TMPDIR": str(tmp_path)})
        try:
            await slow.asked.wait()
            started = below(host.pid)
        finally:
            host.kill()
            await host.wait()

        await eventually(lambda: alive(started) == [])
        await eventually(lambda: cgroup_folders(host.pid) == [])
        assert os.listdir(tmp_path) == []
