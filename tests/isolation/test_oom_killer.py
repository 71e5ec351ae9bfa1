"""Where the memory of a host and its sandboxes is short, the kernel kills a sandbox: `test_systemd_units.py` tries it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolcell import Limits, PoolConfig, Runtime, ToolRegistry
from toolcell.sandbox.process.process_watch import tree_of
from toolcell_bridge.isolation.procfs import OOM_SCORE

pytestmark = [pytest.mark.anyio, pytest.mark.isolation]

HIGHEST = int(OOM_SCORE)


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii"))


def is_checker(pid: int) -> bool:
    return b"toolcell.calls.checker_program" in Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_the_kernel_kills_sandboxes_their_zygote_and_checkers_before_the_host() -> None:
    tools, own, seen, checkers = ToolRegistry(), score(os.getpid()), list[int](), list[int]()
    before = tree_of(os.getpid())  # other tests keep sandboxes, and a checker stays for the next that asks

    @tools.tool
    def look(numbers: set[int]) -> None:
        """Look at the host's processes."""
        found = tree_of(os.getpid())
        seen.extend(score(pid) for pid in found if pid not in before and not is_checker(pid))
        checkers.extend(score(pid) for pid in found if is_checker(pid))

    async with Runtime(tools, pool=PoolConfig(warm=0), limits=Limits(wall_s=60)) as runtime:
        result = await runtime.execute_code("call_tool('look', {'numbers': [2**62 + each for each in range(2000)]})")

    assert (result.error, own) == (None, score(os.getpid()))
    assert sorted(seen) == [own, HIGHEST, HIGHEST]  # the launcher, which is small; the zygote and its sandbox
    assert {*checkers} == {HIGHEST}
