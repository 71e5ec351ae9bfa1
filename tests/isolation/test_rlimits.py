"""Resource limits on a real kernel: set, hard limit equal to soft limit, and impossible to raise."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from toolcell_bridge.isolation.rlimits import RlimitPlan, apply

pytestmark = [pytest.mark.quick, pytest.mark.isolation]
Child = Callable[..., Any]

PLAN = RlimitPlan(cpu_s=5, address_space_bytes=1 << 30, processes=16, open_files=32, file_size_bytes=1 << 16)
APPLY = f"from toolcell_bridge.isolation.rlimits import RlimitPlan, apply\napply({PLAN!r})\n"


@pytest.mark.conforms("Q-b1")
def test_every_limit_holds_soft_and_hard_and_cannot_be_raised(child: Child) -> None:
    drop = "from toolcell_bridge.isolation.syscalls import *\nunshare(CLONE_NEWUSER)\n"
    script = (
        drop
        + APPLY
        + f"""
import resource
for name, value in {PLAN.rows()!r}:
    kind = getattr(resource, name)
    try:
        resource.setrlimit(kind, (value + 1, value + 1))
        raised = "raised"
    except ValueError:
        raised = "held"
    print(name, resource.getrlimit(kind) == (value, value), raised)
"""
    )
    assert child(script).lines == [f"{name} True held" for name, _ in PLAN.rows()]


LIMITED = {
    "descriptors": ("[os.dup(1) for _ in range(40)]", "EMFILE"),
    "file size": (
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        " print(outcome(os.posix_fallocate, os.open('big', os.O_CREAT | os.O_RDWR | os.O_TRUNC), 0, 1 << 17))",
        "EFBIG",
    ),
}


@pytest.mark.parametrize("what", LIMITED)
def test_what_passes_without_limits_fails_with_them(child: Child, what: str) -> None:
    action, error = LIMITED[what]
    script = action if "print" in action else f"print(outcome(lambda: {action}))"
    assert child(script).lines == ["ok"]
    assert child(APPLY + script).lines == [error]


def test_memory_beyond_the_address_space_is_a_memory_error(child: Child) -> None:
    script = "\ntry: print(len(bytearray(2 << 30)))\nexcept MemoryError: print('MemoryError')"
    unreserved = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000"  # MAP_NORESERVE: the machine may have less memory
    reserve = f"import mmap\nprint(len(mmap.mmap(-1, 2 << 30, flags={unreserved})))"
    assert child(reserve).lines == [str(2 << 30)]
    assert child(APPLY + script).lines == ["MemoryError"]


@pytest.mark.slow
def test_a_process_at_its_cpu_limit_is_killed_at_once(child: Child) -> None:
    plan = RlimitPlan(cpu_s=1, address_space_bytes=1 << 32, processes=16, open_files=32, file_size_bytes=1 << 16)
    script = f"""
from toolcell_bridge.isolation.rlimits import RlimitPlan, apply
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
apply({plan!r})
while True: pass
"""
    assert child(script).killed_by is signal.SIGKILL


def test_the_process_limit_counts_this_sandbox_alone_when_set_after_its_user_namespace(child: Child) -> None:
    # Forked children stay until the end; uid 65534 for root, whom the limit does not bind.
    script = """
        from toolcell_bridge.isolation.rlimits import RlimitPlan, apply
        from toolcell_bridge.isolation.syscalls import *
        import resource  # before the change of ids closes the way to it
        if os.geteuid() == 0:
            os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
        unshare(CLONE_NEWUSER)
        if sys.argv[1] == "limited":
            apply(RlimitPlan(60, 1 << 32, 6, 64, 1 << 16))
        reader, writer = os.pipe()
        children, said = [], "no limit"
        for _ in range(12):
            try:
                pid = os.fork()
            except OSError as error:
                said = errno.errorcode[error.errno]
                break
            if pid == 0:
                os.close(writer)
                os.read(reader, 1)
                os._exit(0)
            children.append(pid)
        os.close(writer)
        for pid in children:
            os.waitpid(pid, 0)
        print(len(children), said)
    """
    assert child(script, "free").lines == ["12 no limit"]
    assert child(script, "limited").lines == ["5 EAGAIN"]


def test_a_limit_above_the_present_hard_limit_becomes_that_limit(child: Child) -> None:
    script = """
        import resource
        from toolcell_bridge.isolation.syscalls import *
        from toolcell_bridge.isolation.rlimits import RlimitPlan, apply
        unshare(CLONE_NEWUSER)
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 30))
        apply(RlimitPlan(60, 1 << 32, 64, 1000, 1 << 20))
        print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    """
    assert child(script).lines == ["30 30"]


@pytest.mark.parametrize("name", ["cpu_s", "address_space_bytes", "processes", "open_files", "file_size_bytes"])
def test_minus_one_is_refused_because_it_would_mean_unlimited(name: str) -> None:
    values = {"cpu_s": 1, "address_space_bytes": 1, "processes": 1, "open_files": 1, "file_size_bytes": 1, name: -1}
    with pytest.raises(ValueError, match="unlimited"):
        apply(RlimitPlan(**values))
