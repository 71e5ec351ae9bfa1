"""`cpu_s` counts children that live for milliseconds, also where there is no cgroup."""

from __future__ import annotations

import pytest

from hostile.attacks import BRIEF_CHILDREN, IGNORE_CHILDREN
from rows import each_row
from toolcell import Limits, Outcome, PoolConfig, Runtime, SyncRuntime
from toolcell.sandbox.process import cgroup_manager
from toolcell.sandbox.process.cgroup_manager import NoLocation

pytestmark = pytest.mark.quick

CPU_S = 1.0
MARGIN_S = 1.0
"""For a machine that is busy with other tests. Children that nobody counts go on to `wall_s`."""

WAITED_FOR = BRIEF_CHILDREN.format(before=IGNORE_CHILDREN, wait="os.waitpid(child, 0)")

ORPHANS = """
import os, time
first = os.getpid()
while True:
    try:
        if os.fork() == 0:
            if os.fork() == 0:
                end = time.process_time() + 0.004
                while time.process_time() < end:
                    pass
            os._exit(0)
    except BlockingIOError:  # as many as an ordinary user may have at once
        if os.getpid() != first:
            os._exit(0)
    try:
        os.waitpid(-1, 0)
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""

IGNORED = """
import os, signal
refused = []
for number in (signal.SIGCHLD, signal.SIGTERM):
    try:
        signal.signal(number, signal.SIG_IGN)
    except PermissionError:
        refused.append(number)
set_result(refused == [signal.SIGCHLD])
"""


@pytest.mark.slow
@pytest.mark.isolation
@each_row(
    ("source", "has_cgroup"),
    [(WAITED_FOR, False), (ORPHANS, True), (ORPHANS, False)],
    ids=["waited for, without a cgroup", "orphans", "orphans, without a cgroup"],
)
def test_the_time_of_brief_children_counts(source: str, has_cgroup: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_cgroup:
        monkeypatch.setattr(cgroup_manager, "discover", lambda: NoLocation("taken away", "none"))
    with SyncRuntime(limits=Limits(cpu_s=CPU_S, wall_s=60.0), pool=PoolConfig(warm=1)) as runtime:
        result = runtime.execute_code(source)

    assert result.outcome is Outcome.CPU_LIMIT
    assert max([result.usage.cpu_s, *map(float, result.logs.stdout.split())]) < CPU_S + MARGIN_S


@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_script_cannot_ignore_the_end_of_its_children() -> None:
    """While SIGCHLD is ignored, the kernel adds the time of ended children to nobody's."""
    async with Runtime(pool=PoolConfig(warm=1)) as runtime:
        assert (await runtime.execute_code(IGNORED)).value is True
