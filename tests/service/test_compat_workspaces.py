"""The folders of the compatible front's sessions."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from service.clock import Clock
from toolcell.errors import StoreError
from toolcell.service.compat.messages import read_request
from toolcell.service.compat.settings import CompatSettings
from toolcell.service.compat.workspaces import Workspaces
from toolcell.service.problems import Problem

pytestmark = pytest.mark.anyio


@pytest.fixture
def places(tmp_path: Path, clock: Clock) -> Workspaces:
    made = Workspaces(tmp_path / "w", 3600.0, now=clock)
    made.open()
    return made


@pytest.mark.conforms("Q35")
async def test_a_workspace_that_nobody_used_for_an_hour_is_deleted(places: Workspaces, clock: Clock) -> None:
    for name in ("old", "new"):
        async with places.use(name) as workspace:
            await workspace.replace({"f": b"1"})
        clock.now += 1000
    clock.now += 1700

    assert await places.evict() == ["old"]
    assert sorted(os.listdir(places.root)) == ["new"]


@pytest.mark.conforms("Q35", "Q-b17")
async def test_a_workspace_in_use_is_not_evicted(places: Workspaces, clock: Clock) -> None:
    async with places.use("s") as workspace:
        await workspace.replace({"f": b"1"})
    clock.now += 10_000
    async with places.use("s") as workspace:
        assert await places.evict() == []
        assert await workspace.files() == {"f": b"1"}
        await workspace.replace({"f": b"2"})
    assert await places.evict() == []


async def test_a_workspace_that_is_deleted_during_a_run_stays_deleted(places: Workspaces) -> None:
    async with places.use("s") as workspace:
        await workspace.replace({"f": b"1"})
        await places.delete("s")
        await workspace.replace({"f": b"2"})
        assert not (places.root / "s").exists()
    async with places.use("s") as workspace:
        assert await workspace.files() == {}
        await workspace.replace({"f": b"3"})
    assert (places.root / "s" / "f").read_bytes() == b"3"


@pytest.mark.conforms("Q-b17")
async def test_users_of_one_workspace_wait_for_each_other(places: Workspaces) -> None:
    order: list[str] = []
    is_in = anyio.Event()

    async def first() -> None:
        async with places.use("s"):
            is_in.set()
            await anyio.wait_all_tasks_blocked()
            order.append("first")

    async def second() -> None:
        await is_in.wait()
        async with places.use("s"):
            order.append("second")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        tasks.start_soon(second)
    assert order == ["first", "second"]


@pytest.mark.parametrize("name", ["../up", "/etc/x", "a//b", "./a", "a/..", ""])
async def test_a_file_name_that_leaves_the_folder_is_never_written(places: Workspaces, name: str) -> None:
    async with places.use("s") as workspace:
        await workspace.replace({"f": b"kept"})
        with pytest.raises(StoreError):
            await workspace.replace({"f": b"lost", name: b"x"})
        assert await workspace.files() == {"f": b"kept"}
    assert os.listdir(places.root) == ["s"]


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("x" * 300,), ("nul\0",)])
async def test_names_that_cannot_be_written_leave_what_was_there(places: Workspaces, names: tuple[str, ...]) -> None:
    async with places.use("s") as workspace:
        await workspace.replace({"f": b"kept"})
        with pytest.raises(StoreError):
            await workspace.replace(dict.fromkeys(names, b""))
        assert await workspace.files() == {"f": b"kept"}


async def test_a_folder_that_a_kill_left_half_written_is_mended(places: Workspaces) -> None:
    for name in (".new-a", ".old-b", ".old-c", "c"):
        (places.root / name).mkdir()
        (places.root / name / "f").write_text(name)

    places.open()

    assert {path.name: (path / "f").read_text() for path in places.root.iterdir()} == {"b": ".old-b", "c": "c"}


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/w"):
        Workspaces(tmp_path / "file" / "w", 1.0).open()


@pytest.mark.conforms("Q39")
@pytest.mark.parametrize(
    ("given", "seconds"), [("301", 300.0), ("1e9", 300.0), ("0", 30.0), ("null", 30.0), ("0.5", 0.5), ("299", 299.0)]
)
async def test_the_time_of_a_request_is_30_seconds_or_up_to_300(given: str, seconds: float) -> None:
    body = f'{{"code": "1", "timeout": {given}}}'.encode()

    assert read_request(body, CompatSettings()).timeout_s == seconds


async def test_a_callback_host_that_is_not_named_is_refused() -> None:
    body = b'{"code": "1", "callback_url": "http://169.254.169.254/latest"}'
    settings = CompatSettings(callback_hosts=("agents",))

    with pytest.raises(Problem, match=r"169\.254\.169\.254:80"):
        read_request(body, settings)
