"""Other processes, and processes that outlive their run: PROMISES.md, "process"."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from escape.attack import IS_CONTAINED, IS_PROCESS, Inside, Victim, full_only, outside
from escape.prologues import RAW, raw

COUNTED_BY_A_WATCH = IS_CONTAINED
"""The kernel has no ceiling for a sandbox of the profile `container`; a burst of one is ended at the next look."""


def assert_ended_at_the_limit(inside: Inside) -> None:
    if COUNTED_BY_A_WATCH and inside.outcome == "error":  # it came to the ceiling of the container between two looks
        return
    assert inside.outcome == "process_limit"
    assert inside.result.usage.peak_processes <= 16 or COUNTED_BY_A_WATCH


pytestmark = [pytest.mark.quick, pytest.mark.isolation]


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process on the host that is not part of any run."""
    with subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], "BYSTANDER": "secret"}) as process:
        yield process
        process.kill()


REACH = raw("""
import signal
def reach(pid):
    return {
        "signal 0": attempt(os.kill, pid, 0),
        "stop and go on": attempt(lambda: (os.kill(pid, signal.SIGSTOP), os.kill(pid, signal.SIGCONT))),
        "environment": attempt(open, f"/proc/{pid}/environ", "rb"),
        "memory": attempt(open, f"/proc/{pid}/mem", "rb"),
        "files": attempt(os.listdir, f"/proc/{pid}/fd"),
        "pidfd": attempt(os.pidfd_open, pid),
        "session": attempt(os.getsid, pid),
        "group": attempt(os.getpgid, pid),
        "affinity": attempt(os.sched_getaffinity, pid),
        "scheduler": attempt(os.sched_getscheduler, pid),
        "limits": attempt(lambda: __import__("resource").prlimit(pid, 7)),
        "priority": attempt(os.getpriority, os.PRIO_PROCESS, pid),
        "adopt": attempt(os.setpgid, 0, pid),
    }
""")


ASKED_BY_ID = frozenset({"session", "group", "affinity", "scheduler", "limits", "priority"})
"""What the kernel tells of any process of the same user."""


def assert_out_of_reach(reached: dict[str, str]) -> None:
    hidden = {name: how for name, how in reached.items() if not (IS_CONTAINED and name in ASKED_BY_ID and how == "ok")}
    assert set(hidden.values()) <= {"ESRCH", "ENOENT", "EPERM", "ProcessLookupError", *(["EACCES"] * IS_CONTAINED)}


def test_a_process_of_the_host_cannot_be_seen_or_touched(victim: Victim, bystander: subprocess.Popen[bytes]) -> None:
    source = REACH + "set_result(reach(pid))"
    reached = outside(source, pid=bystander.pid).value
    assert {name for name, how in reached.items() if how == "ok"} == reached.keys() - {"adopt"}
    assert_out_of_reach(victim.run(source, pid=bystander.pid).value)
    assert bystander.poll() is None


def test_no_process_id_leads_out_of_the_sandbox(victim: Victim, bystander: subprocess.Popen[bytes]) -> None:
    """Signal 0 to every possible process id: only the sandbox's own init exists."""
    source = f"""{RAW}
set_result([pid for pid in range(1, last) if pid not in (os.getpid(), os.getppid()) and attempt(os.kill, pid, 0) == "ok"])
"""
    assert bystander.pid in outside(source, last=bystander.pid + 1).value
    assert victim.run(source, last=100_000).value == []


def test_a_concurrent_sandbox_cannot_be_seen_or_touched(victim: Victim) -> None:
    """A guest that knows the real process ids of its neighbour, the zygote and the host reaches none of them."""
    name = f"toolcell{secrets.token_hex(3)}"
    neighbour = raw("""
libc.prctl(15, ctypes.c_char_p(name.encode()), 0, 0, 0)
call_tool("meet", {"place": "ready", "count": 2})
call_tool("meet", {"place": "done", "count": 2})
set_result("alive")
""")
    attacker = (
        REACH
        + """
call_tool("meet", {"place": "ready", "count": 2})
pids = call_tool("seen", {"name": name}) + hosts
told = [reach(pid) for pid in pids]
for pid in pids:
    attempt(os.kill, pid, signal.SIGKILL)
call_tool("meet", {"place": "done", "count": 2})
set_result([len(pids), told])
"""
    )
    hosts = [victim.pid, *(child.pid for child in psutil.Process(victim.pid).children(recursive=True))]
    one, two = victim.run_together([(neighbour, {"name": name}), (attacker, {"name": name, "hosts": hosts})])
    assert one.value == "alive"
    count, told = two.value
    assert count == 1 + len(hosts)
    for each in told:
        assert_out_of_reach(each)


@pytest.mark.parametrize("target", [0, -1], ids=["its group", "everybody"])
def test_signals_to_many_stay_inside(target: int, victim: Victim) -> None:
    """kill(0) signals a process group, which a pid namespace does not bound. kill(-1) signals all processes it may."""
    source = f"""{RAW}
import signal
for number in range(1, 65):
    if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, 32, 33):
        signal.signal(number, signal.SIG_IGN)
ready, tell = os.pipe()
bystander = os.fork()
if bystander == 0:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    os.write(tell, b"!")
    signal.pause()
os.read(ready, 1)
if target == 0 or isolated:
    os.kill(target, signal.SIGUSR1)
else:
    os.kill(bystander, signal.SIGUSR1)  # everybody would mean this machine
hit = os.waitpid(bystander, 0)[1]
set_result(hit)
if isolated:  # the last one ends a guest that is not its own init
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        attempt(os.kill, target, number)
"""
    assert outside(source, target=target).value == signal.SIGUSR1
    above = 1 if IS_CONTAINED else 2  # the zygote, and the launcher above it; what is below ends with its run
    before = [psutil.Process(victim.pid), *psutil.Process(victim.pid).children(recursive=True)[:above]]
    inside = victim.run(source, target=target)
    if (
        IS_CONTAINED and target == -1 and inside.outcome == "error"
    ):  # refused by the filter, where Landlock has no scopes
        assert inside.result.error is not None and inside.result.error.type == "PermissionError"
        return
    assert inside.value == signal.SIGUSR1
    # A process is in its own group, but not among those that kill(-1) signals.
    assert inside.outcome == ("killed" if target == 0 else "ok") or not IS_PROCESS
    assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in before)
    victim.assert_healthy()


def test_its_process_group_and_session_are_its_own(victim: Victim) -> None:
    """An id of 0 means that the leader is outside the sandbox. Then only other layers would stop signals to it."""
    source = RAW + "set_result([os.getpgrp(), os.getsid(0)])"
    assert 0 not in outside(source).value
    assert 0 not in victim.run(source).value


@pytest.mark.conforms("Q-b10")
@pytest.mark.parametrize("ending", ["done", "exit", "crash", "timeout"])
def test_a_daemon_does_not_outlive_its_run(ending: str, victim: Victim) -> None:
    """A daemon: forked twice, in its own session, ignores signals, holds stdout and the bridge open."""
    name = f"escapee{secrets.token_hex(3)}"
    source = raw("""
import signal, time
ready, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 32):
            attempt(signal.signal, number, signal.SIG_IGN)
        libc.prctl(15, ctypes.c_char_p(name.encode()), 0, 0, 0)
        os.write(tell, str(os.getpid()).encode())
        while True:
            time.sleep(60)
    os._exit(0)
os.wait()
set_result([int(os.read(ready, 20)), call_tool("seen", {"name": name}) if isolated else []])
if not isolated:
    os._exit(0)
{"done": lambda: None, "exit": lambda: os._exit(3), "crash": lambda: os.kill(os.getpid(), 11) or ctypes.string_at(0),
 "timeout": lambda: time.sleep(60)}[ending]()
""")
    survivor = psutil.Process(outside(source, name=name, ending=ending).value[0])
    assert survivor.name() == name
    survivor.kill()

    inside = victim.run(source, name=name, ending=ending, limits={"wall_s": 3 if ending == "timeout" else 10})
    assert inside.outcome == {"done": "ok", "exit": "killed", "crash": "killed", "timeout": "timeout"}[ending]
    _, seen = inside.value
    assert len(seen) == 1
    assert still_there(name, seen) == []
    assert victim.named(name) == []


def still_there(name: str, pids: list[int]) -> list[int]:
    """Return those of `pids` that have this name and do not end soon."""
    left = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.name() == name:
                left.append(process)
        except psutil.NoSuchProcess:
            continue
    return [process.pid for process in psutil.wait_procs(left, timeout=60)[1]]


GOING_ON = {
    "itself": "None",
    "children of children": "os.fork()",
    "threads": "threading.Thread(target=spin, args=(60,), daemon=True).start()",
}


@pytest.fixture(scope="module")
def unhurried() -> Iterator[Victim]:
    """A host during a burst of runs that does not end: used sandboxes wait until they are destroyed."""
    patience = "import toolcell.sandbox.pool as pool\npool.QUIET_S = pool.FROZEN_S = 600.0\n"
    patience += "import os\nos.environ['TOOLCELL_SETTLE_S'] = '3'\n"  # it never does: what was used is still there
    host = Victim(before=patience)
    yield host
    host.close()


@pytest.mark.parametrize("kind", GOING_ON)
def test_nothing_goes_on_between_its_run_and_its_end(kind: str, unhurried: Victim) -> None:
    """A timer, children that fork children, and threads all try to work on when the run is over."""
    name = f"goer{secrets.token_hex(3)}"
    source = f"""{RAW}
import signal, threading, time
libc.prctl(15, ctypes.c_char_p(name.encode()), 0, 0, 0)
def spin(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
def go_on(*_):
    attempt(lambda: {GOING_ON[kind]})
    spin(0.001)
signal.signal(signal.SIGALRM, go_on)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.01)
set_result(os.getpid())
while not isolated:
    signal.pause()
"""
    gone_on = outside(source, name=name, within_s=3.0)
    assert isinstance(gone_on.value, int)
    assert gone_on.status is None

    inside = [unhurried.run(source, name=name, limits={"processes": 16}) for _ in range(2)]
    assert [each.outcome for each in inside] == ["ok", "ok"]
    before = stopped_work(unhurried, name)
    time.sleep(0.3)
    assert stopped_work(unhurried, name) == before


def stopped_work(victim: Victim, name: str) -> dict[int, float]:
    """Return the CPU seconds of every process of that name, when all of them are stopped or gone."""
    deadline = time.monotonic() + 60
    while True:
        try:
            found = [psutil.Process(pid) for pid in victim.named(name)]
            found = [each for each in found if each.status() != psutil.STATUS_ZOMBIE]
            work = {each.pid: sum(each.cpu_times()[:2]) for each in found if each.status() == psutil.STATUS_STOPPED}
        except psutil.NoSuchProcess:
            continue
        if len(work) == len(found):
            return work
        assert time.monotonic() < deadline, f"{found} go on"


@pytest.mark.conforms("Q-b10")
def test_a_child_that_holds_stdout_does_not_hold_the_run(victim: Victim) -> None:
    source = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(600 if isolated else 10)
    os._exit(0)
set_result("finished")
"""
    plain = f"isolated = False\nset_result = lambda value: None\n{source}"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", plain], stdout=subprocess.PIPE) as process:
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 0)[0] == []  # no end of file: a reader would go on waiting

    inside = victim.run(source, limits={"wall_s": 600})
    assert (inside.value, inside.outcome) == ("finished", "ok")
    victim.assert_healthy()


FORK_BOMB = f"""{RAW}
import signal
made = 0
while made < bound:
    child = os.fork()
    if child == 0:
        signal.pause()
    made += 1
set_result(made)
"""


def test_a_fork_bomb_ends_at_the_limit_and_leaves_nothing(victim: Victim) -> None:
    assert outside(FORK_BOMB, bound=200).value == 200
    inside = victim.run(FORK_BOMB, bound=10**9, limits={"processes": 16, "wall_s": 10})
    assert_ended_at_the_limit(inside)
    victim.assert_healthy()


def test_a_fork_bomb_that_ignores_refusals_is_ended(victim: Victim) -> None:
    source = f"""{RAW}
generations = 0
while generations < bound:
    try:
        if os.fork() == 0 and not isolated:
            os._exit(0)
    except OSError:
        pass
    generations += 1
set_result(generations)
"""
    assert outside(source, bound=100).value == 100
    inside = victim.run(source, bound=10**9, limits={"processes": 16, "wall_s": 1.0, "cpu_s": 3})
    assert inside.outcome in ("process_limit", "timeout", "cpu_limit")
    victim.assert_healthy()


def test_a_thread_bomb_ends_at_the_limit(victim: Victim) -> None:
    source = f"""{RAW}
import threading
stop = threading.Event()
started = 0
while started < bound:
    threading.Thread(target=stop.wait, daemon=True).start()
    started += 1
stop.set()
set_result(started)
"""
    assert outside(source, bound=200).value == 200
    inside = victim.run(source, bound=10**6, limits={"processes": 16, "wall_s": 10})
    assert_ended_at_the_limit(inside)
    victim.assert_healthy()


@full_only("processes are watched there, and this is over before the next look")
def test_raw_clones_count_like_any_process(victim: Victim) -> None:
    """vfork, CLONE_VM and CLONE_THREAD bypass Python and the C library."""
    source = f"""{RAW}
made, flags = 0, 0x100 | 0x200 | 0x400 | 17  # VM, FS, FILES
stacks = ctypes.create_string_buffer(1 << 20)
pause = ctypes.cast(libc.pause, ctypes.c_void_p).value
libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
while made < bound:
    top = (ctypes.addressof(stacks) + (1 << 20) - 64 - made * 4096) & ~15
    if libc.clone(pause, top, flags, None) < 0:
        break
    made += 1
set_result(made)
"""
    assert outside(source, bound=100).value == 100
    assert victim.run(source, bound=200, limits={"processes": 16}).value < 24
    victim.assert_healthy()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, signal.SIGSEGV])
def test_a_guest_that_signals_itself_ends_or_goes_on_and_never_hangs(number: int, victim: Victim) -> None:
    source = f"""{RAW}
import signal
def hit():
    os.kill(os.getpid(), number)
    return "went on"
child = os.fork()
if child == 0:
    hit()
    os._exit(0)
ended = os.waitpid(child, os.WUNTRACED)[1]
if not isolated:
    attempt(os.kill, child, signal.SIGKILL)
set_result([os.WIFSTOPPED(ended), os.WIFSIGNALED(ended)])
if isolated:
    hit()
"""
    assert True in outside(source, number=int(number)).value
    inside = victim.run(source, number=int(number), limits={"wall_s": 1.5})
    assert inside.outcome in ("ok", "killed", "timeout")
    victim.assert_healthy()


def test_everything_dies_with_its_host(victim: Victim) -> None:
    """The host gets SIGKILL during a run, with a daemon in the sandbox."""
    name = f"orphan{secrets.token_hex(3)}"
    source = raw("""
import time
if os.fork() == 0:
    os.setsid()
    libc.prctl(15, ctypes.c_char_p(name.encode()), 0, 0, 0)
    while True:
        time.sleep(60)
while not call_tool("seen", {"name": name}):
    time.sleep(0.01)
call_tool("meet", {"place": "up", "count": 1})
call_tool("die")
""")
    host = Victim(mortal=True)
    try:
        host.start()
        family = psutil.Process(host.pid).children(recursive=True)
        with pytest.raises(AssertionError, match="died"):
            host.run(source, name=name)
        assert psutil.wait_procs(family, timeout=60)[1] == []
        alive = [process for process in psutil.process_iter(["name"]) if process.info["name"] == name]
        assert psutil.wait_procs(alive, timeout=60)[1] == []
    finally:
        host.kill()
