"""Sessions in containers: the state stays, an interrupted script keeps it, and a killed container is rebuilt."""

from __future__ import annotations

import anyio
import pytest

from toolcell import Limits, Outcome, PoolConfig, SyncRuntime
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.images.reference import ImageRef

pytestmark = pytest.mark.docker


def test_a_session_in_a_container_keeps_its_state_and_is_rebuilt(docker_image: ImageRef) -> None:
    backend = DockerBackend(docker_image.id)
    with SyncRuntime(backend=backend, pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        assert session.execute_code("x = [41]; open('f', 'w').write('f')").ok
        late = session.execute_code("import time\ntime.sleep(60)", limits=Limits(wall_s=0.3))
        left = session.execute_code("import os\nif os.fork() == 0: time.sleep(60)")
        after = session.execute_code("[x, open('f').read()]")
        session.reset()
        session.execute_code("y = 1")
        killed = session.execute_code("import os; os._exit(3)")
        rebuilt = session.execute_code("y")

    assert late.outcome is Outcome.TIMEOUT and late.session is not None and not late.session.lost, late
    assert left.session is not None and left.session.ended == ("1 process",)
    assert after.value == [[41], "f"]
    assert killed.session is not None and killed.session.lost
    assert rebuilt.value == 1 and rebuilt.session is not None and rebuilt.session.began == "journal"


def test_an_interrupt_that_the_daemon_passes_on_late_does_not_meet_the_next_script(
    docker_image: ImageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_on = EngineClient.kill

    async def late(client: EngineClient, container: str, signal: int | None = None) -> None:
        if signal is not None:
            await anyio.sleep(0.4)
        await passed_on(client, container, signal)

    monkeypatch.setattr(EngineClient, "kill", late)
    backend = DockerBackend(docker_image.id)
    with SyncRuntime(backend=backend, pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        session.execute_code("import time")
        for _ in range(3):
            stopped = session.execute_code("while True: time.sleep(0.01)", limits=Limits(wall_s=0.3))
            assert stopped.outcome is Outcome.TIMEOUT and stopped.session is not None and not stopped.session.lost
            following = session.execute_code("time.sleep(0.6)")
            assert following.ok, following.error


def test_a_paused_session_in_a_container_goes_on_with_its_next_script_and_is_removed_while_paused(
    docker_image: ImageRef,
) -> None:
    backend = DockerBackend(docker_image.id)
    with SyncRuntime(backend=backend, pool=PoolConfig(warm=0)) as runtime:
        with runtime.session() as session:
            assert session.execute_code("x = 41").ok
            assert session.pause() and session.pause() and session.session.is_paused
            again = session.execute_code("x + 1")
            assert (again.value, session.session.is_paused) == (42, False)
            assert again.session is not None and again.session.began == "live"
            assert session.pause()
        assert not session.session.is_live and runtime.execute_code("1").value == 1


def test_a_state_is_brought_back_by_value_in_another_container(docker_image: ImageRef) -> None:
    backend = DockerBackend(docker_image.id)
    leaves = (
        "import random, os\nclass Box: pass\nbox = Box()\nbox.drawn = random.random()\nn = 0\ndef up():\n  global n\n"
        "  n += 1\n  return n\nup()\nos.makedirs('a')\nopen('a/f', 'w').write('f')\nbig = bytes(20 << 20)\nbox.drawn"
    )
    looks = "[box.drawn, isinstance(box, Box), up(), open('a/f').read(), len(big), random.random()]"
    with SyncRuntime(backend=backend, pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        drawn = session.execute_code(leaves).value
        with session.fork() as copy:
            there = copy.execute_code(looks)
        session.put_down()
        back = session.execute_code(looks)

    assert back.ok, back.error
    assert there.value == back.value
    assert back.value[:5] == [drawn, True, 2, "f", 20 << 20]
    assert back.session is not None
    assert back.session.began == "value"


@pytest.mark.parametrize("end", ["", "\nwhile True: pass"], ids=["ends", "is interrupted"])
def test_names_stay_when_a_thread_ends_with_its_container(docker_image: ImageRef, end: str) -> None:
    backend = DockerBackend(docker_image.id)
    source = "import threading\nn = 5\nthreading.Thread(target=threading.Event().wait, name='stuck').start()"
    with SyncRuntime(backend=backend, pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        left = session.execute_code(source + end, limits=Limits(wall_s=2))
        back = session.execute_code("[n, len(threading.enumerate())]")

    assert left.session is not None and not left.session.lost and left.session.ended == ("thread 'stuck'",)
    assert back.value == [5, 1], back.error
    assert back.session is not None and back.session.began == "value"
