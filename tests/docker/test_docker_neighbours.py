"""A script in a shared container cannot affect other sandboxes, later runs or the container."""

from __future__ import annotations

import anyio
import pytest

from toolcell import Outcome, SyncRuntime
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.shared.backend import SLOTS

from .shared_sandboxes import TRY, containers, running

pytestmark = pytest.mark.usefixtures("way")


@pytest.mark.docker
def test_a_run_finds_nothing_of_those_before(runtime: SyncRuntime) -> None:
    script = (
        TRY
        + """
found = [os.listdir(place) for place in ('/work', '/tmp', '/dev/shm')]
room = os.statvfs('/work')
for place in ('/work', '/tmp', '/dev/shm'): open(place + '/left', 'w').write('x' * 100_000)
os.mkdir('/tmp/closed', 0); os.chmod('/work', 0)
if os.fork() == 0:
    os.setsid(); import time; time.sleep(99)
set_result([found, room.f_bfree, room.f_ffree])
"""
    )
    values = [runtime.execute_code(script).value for _ in range(SLOTS + 3)]

    assert [value for value in values if value != values[0]] == []
    assert values[0][0] == [[], [], []]


@pytest.mark.docker
@pytest.mark.anyio
async def test_a_sandbox_that_fills_its_disk_leaves_the_disks_of_others(docker_image: ImageRef) -> None:
    fill = (
        TRY
        + """
def fill():
    with open('big', 'wb') as file:
        while True: file.write(bytes(65536))
def litter():
    for n in range(100_000): open(f'f{n}', 'w').close()
set_result([refused(fill), os.unlink('big'), refused(litter), call_tool('echo', q=1)])
"""
    )
    use = "import os\nfor n in range(40): open(f'/tmp/{n}', 'w').close()\nopen('/work/all', 'wb').write(bytes(7 << 20))\nset_result(1)"
    async with running(docker_image) as (runtime, backend):
        full = anyio.Event()

        async def attack() -> None:
            result = await runtime.execute_code(
                "import time\n" + fill + "print('full', flush=True)\ntime.sleep(1)", on_log=lambda *_: full.set()
            )
            # Limits.disk_bytes is its own; the largest file is as large as the disk.
            assert result.value[0] in ("ENOSPC", "EFBIG")
            assert result.value[2:] == ["ENOSPC", 1]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attack)
            await full.wait()
            assert (await runtime.execute_code(use)).value == 1
        assert len(await containers(backend)) == 1


@pytest.mark.docker
@pytest.mark.anyio
async def test_no_other_process_of_the_container_can_be_signalled_or_traced(docker_image: ImageRef) -> None:
    attack = (
        TRY
        + """
import signal
pids = [pid for pid in range(1, 3000) if pid != os.getpid()]
found = {refused(lambda: os.kill(pid, number)) for pid in pids for number in (0, signal.SIGKILL)}
ways = [f'/proc/{pid}/{name}' for pid in pids[:200] for name in ('mem', 'environ', 'maps', 'fd', 'cwd/secret', 'root/etc/passwd')]
looked = {refused(lambda: os.open(way, os.O_RDONLY)) for way in ways}
links = {refused(lambda: os.readlink(f'/proc/{pid}/{name}')) for pid in pids[:200] for name in ('cwd', 'exe', 'fd/3', 'fd/4')}
listed = {refused(lambda: os.listdir(place)) for place in ('/sandbox', '/sandbox/slot0', '/proc', '/dev')}
changed = {refused(lambda: os.chmod(place, 0)) for place in ('/sandbox', '/sandbox/slot0', '/sandbox/slot1')}
dated = {refused(lambda: os.utime(place, (1, 1), follow_symlinks=False)) for place in ('/sandbox/slot0', '/sandbox/work', '/tmp')}
made = {refused(lambda: open(place + '/x', 'w')) for place in ('/sandbox', '/sandbox/slot0', '/sandbox/slot1', '/dev', '/')}
set_result([sorted(each) for each in (found, looked, links, listed, changed, dated, made)])
"""
    )
    keep = "import time\nopen('secret', 'w').write('x')\nprint('kept', flush=True)\ntime.sleep(1.5)\nset_result(open('secret').read())"
    async with running(docker_image) as (runtime, _), anyio.create_task_group() as tasks:
        kept = anyio.Event()

        async def victim() -> None:
            assert (await runtime.execute_code(keep, on_log=lambda *_: kept.set())).value == "x"

        tasks.start_soon(victim)
        await kept.wait()
        result = await runtime.execute_code(attack)
        assert result.outcome is Outcome.OK, result.error
        found, looked, links, listed, changed, dated, made = result.value
        assert found == ["EPERM", "ESRCH"]
        assert set(looked) <= {"EACCES", "ENOENT"}
        assert set(links) <= {"EACCES", "ENOENT"}
        assert listed == ["EACCES"]
        assert set(changed) <= {"EPERM", "EROFS"}
        assert set(dated) <= {"EPERM", "EROFS"}
        assert set(made) <= {"EACCES", "EROFS"}
