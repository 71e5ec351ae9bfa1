"""The profile `container` on kernels whose Landlock lacks what 6.12 has: the filter refuses it, and a script keeps the rest.

The kernel is made older by lesser_machine.py: it owns up to the ABI that it is given and refuses the rights of newer ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from rows import each_row
from toolcell_bridge.isolation import landlock, seccomp
from toolcell_bridge.isolation.apply_in_container import contained, instead_of_landlock
from toolcell_bridge.isolation.seccomp_policy import GUEST_POLICY, SeccompAction
from toolcell_bridge.isolation.syscall_numbers import SYSCALL_NUMBERS

from .lesser_machine import answers


def kernel_abi() -> int:
    try:
        return landlock.abi_version()
    except OSError:
        return 0


KERNELS = {2: "5.19", 1: "5.13", 5: "6.10"}
pytestmark = [
    pytest.mark.contained,
    pytest.mark.skipif(kernel_abi() < max(KERNELS), reason="this kernel's Landlock is older than those that are tried"),
]

PRELUDE = """
import json, subprocess, sys, tempfile
from toolcell import Limits, Policy, PoolConfig, SyncRuntime
opened = SyncRuntime(policy=Policy(profile="container"), pool=PoolConfig(warm=1))
"""

TRY = """
import ctypes, errno, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def refused(action):
    try:
        return repr(action())
    except OSError as error:
        return errno.errorcode[error.errno]
def call(name, *arguments):
    result = libc.syscall(ctypes.c_long(numbers[name]), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return repr(result) if result >= 0 else errno.errorcode[ctypes.get_errno()]
"""

ATTACK = (
    TRY
    + """
def bare(path):
    descriptor = os.open(path, 3)
    return sorted({refused(lambda: os.read(descriptor, 1)), refused(lambda: os.write(descriptor, b"x"))})
import toolcell_bridge
module = toolcell_bridge.__file__.encode()  # a script may read it, and it belongs to the same user
how = (ctypes.c_uint64 * 3)(os.O_TRUNC, 0, 0)
found = {
    "signals": sorted({*[call(name, each, 0) for name in ("kill", "tkill") for each in (pid, -pid, 1, -1, os.getppid()) if each > 0 or name == "kill"],
                       call("tgkill", pid, pid, 0), call("rt_sigqueueinfo", pid, 0, None), call("pidfd_open", pid, 0),
                       call("pidfd_send_signal", 3, 0, None, 0), refused(lambda: os.killpg(1, 0))}),
    "owner of a descriptor": refused(lambda: __import__("fcntl").fcntl(0, 8, pid)),
    "truncation": sorted({refused(lambda: os.truncate(secret, 0)), call("truncate", module, 0),
                          *[refused(lambda: os.open(each, flags)) for each in (secret, module)
                            for flags in (os.O_TRUNC, 3 | os.O_TRUNC, os.O_TRUNC | os.O_CLOEXEC, os.O_WRONLY | os.O_TRUNC)],
                          }),
    "access mode 3": refused(lambda: bare(module)),
    "openat2": call("openat2", -100, module, how, 24),
    "sockets": sorted({refused(lambda: __import__("socket").socket(family)) for family in (1, 2, 10, 16)}),
    "files": sorted({refused(lambda: open(secret).read()), refused(lambda: os.listdir("/")), refused(lambda: os.unlink(secret))}),
    "a child": None,
}
child = os.fork()
if not child:
    os._exit(refused(lambda: os.kill(pid, 0)) != "EPERM")
found["a child"] = os.waitpid(child, 0)[1]
set_result(found)
"""
)

ATTACKED = f"""{PRELUDE}
from toolcell_bridge.isolation.syscall_numbers import SYSCALL_NUMBERS, native_machine
with (tempfile.NamedTemporaryFile("w") as secret, opened as runtime,
      subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as victim):
    print("secret", file=secret, flush=True)
    inputs = {{"pid": victim.pid, "secret": secret.name, "numbers": SYSCALL_NUMBERS[native_machine()]}}
    result = runtime.execute_code({ATTACK!r}, inputs=inputs)
    again = runtime.execute_code("import toolcell_bridge; set_result(open(toolcell_bridge.__file__).read() != '')")
    whole = open(secret.name).read() == "secret\\n" and again.value
print(json.dumps([result.value, whole, result.error and result.error.message, dict(result.isolation.layers)]))
"""


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is attacked is not the cache of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@each_row("abi", KERNELS)
def test_what_landlock_lacks_the_filter_refuses(abi: int) -> None:
    found, is_whole, problem, layers = answers(ATTACKED, abi=abi)

    assert problem is None
    assert set(found["signals"]) == {"EPERM"}
    assert found["a child"] == 0
    assert found["owner of a descriptor"] == "EPERM"
    assert set(found["truncation"]) <= {"EPERM", "EACCES", "ENOSYS", "EINVAL"}
    assert found["access mode 3"] in ({"EPERM"} if abi < 3 else {"['EBADF']", "EACCES"})
    assert found["openat2"] in {"EACCES", "ENOSYS"}
    assert set(found["sockets"]) == {"EPERM"}
    assert set(found["files"]) == {"EACCES"}
    assert is_whole
    assert layers["landlock"] == f"ABI {abi}"
    assert "signals kept inside" in layers["seccomp"]


KEPT = """
import os, signal, threading, time, shutil
caught = []
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
    signal.signal(number, lambda given, _: caught.append(given))
os.kill(os.getpid(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR2)
signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
os.killpg(os.getpgrp(), signal.SIGUSR1)
os.kill(0, signal.SIGUSR2)
child = os.fork()
if not child:
    os.setsid()  # answered, and not made
    os._exit(3)
with open("a", "w") as file:
    file.write("long text"); file.truncate(4)
with open("a", "w") as file:
    file.write("new")
os.mkdir("folder"); shutil.move("a", "folder/b"); shutil.copytree("folder", "copies")
set_result([len(caught), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), open("copies/b").read()])
"""

LOST = f"""{TRY}
child = os.fork()
if not child:
    signal.pause()
found = [refused(lambda: os.kill(child, signal.SIGTERM)), refused(lambda: os.truncate("a", 0) if open("a", "w") else 0)]
child = os.fork()
if not child:
    os._exit(refused(lambda: signal.raise_signal(signal.SIGUSR1)) == "EPERM")
set_result([*found, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])])
"""

DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)\nset_result(os.getpid())"

BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"

LIVED = f"""{PRELUDE}
import psutil, threading
def below():
    return [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
with opened as runtime:
    results = [runtime.execute_code(source) for source in ({KEPT!r}, {LOST!r}, {DAEMON!r})]
    bomb = runtime.execute_code({BOMB!r}, limits=Limits(wall_s=2, processes=20))
    with runtime.session() as session:
        session.execute_code("x = 40")
        started = threading.Event()
        interrupted = []
        thread = threading.Thread(target=lambda: interrupted.append(session.execute_code("print('on', flush=True)\\nwhile True: pass", on_log=lambda *_: started.set())))
        thread.start(); started.wait(60); session.interrupt(); thread.join()
        kept = session.execute_code("x + 2").value
print(json.dumps([[each.value if each.error is None else each.error.message for each in results], bomb.outcome.value,
                  interrupted[0].outcome.value, kept, len(below())]))
"""


@pytest.mark.parametrize("abi", [2, 5])
def test_a_script_keeps_its_own_signals_and_files_and_leaves_nothing(abi: int) -> None:
    results, bomb, interrupted, kept, left = answers(LIVED, abi=abi)

    assert results[0] == [5, 3, "new"]
    assert results[1] == ["EPERM", "EPERM" if abi < 3 else "None", 1]
    assert isinstance(results[2], int)
    assert bomb in ("process_limit", "timeout")
    assert (interrupted, kept) == ("cancelled", 42)
    assert left == 0


@pytest.mark.parametrize("machine", SYSCALL_NUMBERS)
def test_each_older_abi_moves_calls_between_the_tables_and_loses_none(machine: str) -> None:
    numbers = SYSCALL_NUMBERS[machine]
    for abi in range(11):
        policy = instead_of_landlock(contained(GUEST_POLICY), abi)
        assert policy.table(machine).keys() == GUEST_POLICY.table(machine).keys()
        own = policy.decide(machine, numbers["kill"], (seccomp.OWN_PROCESS, 9))
        others = [policy.decide(machine, numbers["kill"], (pid & 0xFFFF_FFFF, 9)) for pid in (1, -1, 4711, -4711)]
        assert own is SeccompAction.ALLOW
        assert set(others) == {SeccompAction.EPERM if abi < 6 else SeccompAction.ALLOW}
        for access, cut, name in product((0, 1, 2, 3), (0, 0o1000), ("openat", "open")):
            if name in numbers:
                is_refused = (
                    policy.decide(machine, numbers[name], (0, access | cut, access | cut)) is SeccompAction.EPERM
                )
                assert is_refused == (abi < 3 and (access == 3 or (access == 0 and cut > 0)))
