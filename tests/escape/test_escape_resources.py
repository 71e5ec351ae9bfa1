"""Ways to use too much memory, CPU, time or disk: PROMISES.md, "memory", "cpu", "time" and "disk"."""

from __future__ import annotations

import pytest

from escape.attack import ENDED_S, MIB, Victim, outside
from escape.prologues import RAW, raw

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

MEMORY_BYTES = 48 * MIB
HELD_BYTES = 2 * MEMORY_BYTES
"""What each trick tries to hold; without isolation it gets it."""

HOLD = {
    "one growing bytearray": """
        held = bytearray()
        while len(held) < wanted:
            held += bytes(1 << 20)""",
    "many children": """
        ready, tell = os.pipe()
        for _ in range(8):
            if os.fork() == 0:
                held = b"x" * (wanted // 8)
                os.write(tell, b"!")
                signal.pause()
        for _ in range(8):
            os.read(ready, 1)""",
    "anonymous mapping": """
        held = mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for offset in range(0, wanted, 4096):
            held[offset] = 1""",
    "shared mapping": """
        held = mmap.mmap(-1, wanted)
        for offset in range(0, wanted, 4096):
            held[offset] = 1""",
    "shared mapping of zero": """
        held = mmap.mmap(os.open("/dev/zero", os.O_RDWR), wanted)
        for offset in range(0, wanted, 4096):
            held[offset] = 1""",
    "files in memory": """
        for number in range(wanted // (4 << 20)):
            with open(f"fill-{number}", "wb") as file:
                file.write(bytes(4 << 20))""",
    "unlinked files in memory": """
        held = []
        for number in range(wanted // (4 << 20)):
            held.append(open(f"fill-{number}", "wb", buffering=0))
            os.unlink(f"fill-{number}")
            held[-1].write(bytes(4 << 20))""",
    "strings that share nothing": """
        held = [str(number) * 200 for number in range(wanted // 1600)]""",
    "one absurd allocation": """
        held = bytearray(wanted if not isolated else 1 << 44)""",
    "a list that never ends": """
        held = list(range(wanted // 36)) if not isolated else list(iter(int, 1))""",
    "format width": """
        held = format(1, str(wanted))""",
    "threads that each hold a little": """
        import threading
        def hold():
            held = b"x" * (wanted // 8)
            ready.release()
            forever.wait()
        ready, forever = threading.Semaphore(0), threading.Event()
        for _ in range(8):
            threading.Thread(target=hold, daemon=True).start()
        for _ in range(8):
            ready.acquire()""",
}


@pytest.mark.parametrize("trick", HOLD)
def test_no_trick_holds_more_memory_than_the_limit(trick: str, victim: Victim) -> None:
    source = f"{RAW}\nimport mmap, signal\n{unindented(HOLD[trick])}\n{NOTICED}set_result('held')"
    assert outside(source, wanted=HELD_BYTES).value == "held"
    inside = victim.run(
        source,
        wanted=HELD_BYTES,
        limits={"memory_bytes": MEMORY_BYTES, "disk_bytes": 4 * HELD_BYTES, "wall_s": 10},
    )
    if "files" in trick and "cgroup" not in inside.result.isolation.layers:
        assert inside.outcome == "ok"  # bounded by disk_bytes alone there
        return
    assert inside.outcome == "memory_limit"
    assert not inside.result.has_value
    assert inside.growth_bytes < 16 * MIB
    victim.assert_healthy()


NOTICED = "if isolated:\n    import select\n    select.poll().poll(3000)\n"
"""Where no cgroup holds memory, somebody has to look; a script that is over sooner has hurt nobody."""


def unindented(text: str) -> str:
    return text.replace("\n        ", "\n")


def test_memory_of_many_sandboxes_is_each_ones_own(victim: Victim) -> None:
    """A run that is killed for its memory does not affect its neighbour."""
    greedy = "held = bytearray()\nwhile True:\n    held += bytes(1 << 20)"
    modest = "held = bytes(16 << 20)\ncall_tool('meet', {'place': 'end', 'count': 1})\nset_result(len(held))"
    one, two = victim.run_together([(greedy, {}), (modest, {})], limits={"memory_bytes": MEMORY_BYTES})
    assert one.outcome == "memory_limit"
    assert (two.outcome, two.value) == ("ok", 16 << 20)


def test_kernel_memory_counts_too(victim: Victim) -> None:
    """Buffers of sockets and pipes are pages outside every address space."""
    source = f"""{RAW}
import socket
held, filled = [], 0
while filled < bound:
    try:
        left, right = socket.socketpair()
        left.setblocking(False)
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        held += [left, right]
        while True:
            filled += left.send(bytes(65536))
    except BlockingIOError:
        continue
    except OSError as error:
        if error.errno != errno.EMFILE or not isolated or os.fork() == 0:
            break
        import signal
        signal.pause()
set_result(filled)
"""
    assert outside(source, bound=32 << 20).value >= 32 << 20
    inside = victim.run(source, bound=1 << 40, limits={"memory_bytes": 64 * MIB, "open_files": 256, "wall_s": 5})
    assert inside.outcome in ("memory_limit", "ok", "timeout", "process_limit", "killed")
    if "cgroup" in inside.result.isolation.layers:
        assert inside.result.usage.peak_memory_bytes <= 64 * MIB
        assert inside.outcome == "memory_limit"
    victim.assert_healthy()


DEEP = {
    "recursion": "import sys\nsys.setrecursionlimit(10**4 if not isolated else 10**9)\ndef down(): return down()\ndown()",
    "nested brackets": "compile('(' * 10**6, '', 'exec')",
    "nested unary": "compile('-' * 10**6 + '1', '', 'eval')",
    "nested lists, compared": """
import sys
sys.setrecursionlimit(10**9)
one, other = [], []
for _ in range(10**6):
    one, other = [one], [other]
one == other""",
    "repr of itself": """
import sys
sys.setrecursionlimit(10**9)
class Loop:
    def __repr__(self): return f"{self!r}"
repr(Loop())""",
    "regex that nests": "import re\nre.compile('(' * 50000 + ')' * 50000)",
    "a wild pointer": "import ctypes\nctypes.string_at(1)",
}


@pytest.mark.parametrize("kind", DEEP)
def test_a_stack_that_overflows_ends_the_run_and_nothing_else(kind: str, victim: Victim) -> None:
    assert outside(DEEP[kind], may_fail=True).status != 0
    inside = victim.run(DEEP[kind], limits={"wall_s": 3, "memory_bytes": 64 * MIB})
    assert inside.outcome in ("error", "killed", "timeout", "memory_limit")
    victim.assert_healthy()


BUSY = {
    "ignored signals": """
        import signal
        for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGVTALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_IGN)
        signal.raise_signal(signal.SIGXCPU)
        signal.raise_signal(signal.SIGTERM)
        set_result("deaf")
        while isolated:
            pass""",
    "caught everything": """
        set_result("deaf")
        while isolated:
            try:
                while True:
                    pass
            except BaseException:
                continue""",
    "C code that holds the interpreter": """
        set_result("deaf")
        sum(range(10**5 if not isolated else 10**12))""",
    "a regex without end": """
        import re
        set_result("deaf")
        re.match("(a+)+$", "a" * (10 if not isolated else 60) + "b")""",
    "a number without end": """
        set_result("deaf")
        (1 << (10**3 if not isolated else 10**8)) ** 9
        str(10 ** (10**3 if not isolated else 10**7))
        while isolated:
            pass""",
    "blocked signals": """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        set_result("deaf")
        while isolated:
            pass""",
}


@pytest.mark.parametrize("kind", BUSY)
def test_processor_time_ends_at_its_limit_whatever_the_script_ignores(kind: str, victim: Victim) -> None:
    source = unindented(BUSY[kind])
    assert outside(source).value == "deaf"
    inside = victim.run(source, limits={"cpu_s": 0.3, "wall_s": 20})
    assert inside.outcome == "cpu_limit"
    assert inside.result.usage.cpu_s < 3
    victim.assert_healthy()


def test_processor_time_of_all_children_is_added_up(victim: Victim) -> None:
    source = f"""{RAW}
import time
for _ in range(4):
    if os.fork() == 0:
        while time.process_time() < seconds:
            pass
        os._exit(0)
for _ in range(4):
    os.wait()
set_result(sum(os.times()[:4]))
"""
    assert outside(source, seconds=0.1).value > 0.3
    inside = victim.run(source, seconds=0.4, limits={"cpu_s": 0.5, "wall_s": 20})
    assert (inside.outcome, inside.result.has_value) == ("cpu_limit", False)


ASLEEP = {
    "sleep": "import time\ntime.sleep(600)",
    "sleep that is renewed": "import time\nwhile True:\n    try:\n        time.sleep(600)\n    except BaseException:\n        pass",
    "wait for a child": "import os, signal\nif os.fork() == 0:\n    signal.pause()\nos.wait()",
    "lock": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "read": "import os\nos.read(os.pipe()[0], 1)",
    "tool that never answers": "call_tool('wait_forever')",
    "fifo that nobody writes": "import os\nos.mkfifo('fifo')\nopen('fifo').read()",
    "stopped children": "import os, signal\nfor _ in range(4):\n    if os.fork() == 0:\n        os.kill(os.getpid(), signal.SIGSTOP)\nos.wait()",
    "bridge that is read elsewhere": "import os\nwhile True:\n    os.read(3, 1)",
}


@pytest.mark.parametrize("kind", ASLEEP)
def test_the_wall_clock_ends_a_script_that_uses_nothing(kind: str, victim: Victim) -> None:
    if "tool" not in kind and "bridge" not in kind:
        assert outside(ASLEEP[kind], within_s=0.15).status is None
    inside = victim.run(ASLEEP[kind], limits={"wall_s": 0.2})
    assert inside.outcome == "timeout"
    assert inside.result.usage.wall_s < ENDED_S
    victim.assert_healthy()


DISK_BYTES = 2 * MIB
INODES = 64
FILL = {
    "one big file": "bytes_in(lambda: open('big', 'wb', buffering=0))",
    "many files": "bytes_in(lambda: open(f'file-{len(os.listdir())}', 'wb', buffering=0), 65536)",
    "unlinked and open": "bytes_in(unlinked, 65536)",
    "three places": "sum(bytes_in(lambda: open(place + '/big', 'wb', buffering=0)) for place in places)",
    "reserved": "reserved()",
    "written through a mapping": "mapped()",
}


@pytest.mark.parametrize("trick", FILL)
def test_no_trick_stores_more_than_the_disk_limit(trick: str, victim: Victim) -> None:
    source = f"""{RAW}
import mmap, tempfile
def bytes_in(make, most=1 << 30):
    held, total = [], 0
    while total < wanted:
        try:
            held.append(make())
            written = 0
            while written < most and total < wanted:
                count = held[-1].write(bytes(65536))
                written += count
                total += count
                if not count:
                    return total
        except OSError:
            return total
    return total
def unlinked():
    file = open("gone", "wb", buffering=0)
    os.unlink("gone")
    return file
def reserved():
    file = os.open("reserved", os.O_RDWR | os.O_CREAT)
    return wanted if attempt(os.posix_fallocate, file, 0, wanted) == "ok" else 0
def mapped():
    file = os.open("mapped", os.O_RDWR | os.O_CREAT)
    if attempt(os.ftruncate, file, wanted) != "ok":
        return 0
    held = mmap.mmap(file, wanted)
    child = os.fork()
    if child == 0:
        for offset in range(0, wanted, 4096):
            held[offset] = 1
        os._exit(0)
    return wanted if os.waitpid(child, 0)[1] == 0 else 0
set_result({FILL[trick]})
"""
    wanted = 2 * DISK_BYTES
    assert outside(source, wanted=wanted, places=["."]).value >= wanted
    inside = victim.run(
        source,
        wanted=wanted,
        places=["/sandbox/work", "/tmp", "/dev/shm"],
        limits={"disk_bytes": DISK_BYTES, "inodes": INODES, "open_files": 256},
    )
    assert inside.value <= DISK_BYTES


def test_a_sparse_file_promises_nothing(victim: Victim) -> None:
    source = f"""{RAW}
file = os.open("sparse", os.O_RDWR | os.O_CREAT)
set_result([attempt(os.ftruncate, file, size), attempt(os.pwrite, file, b"x", size - 1)])
"""
    assert outside(source, size=1 << 40).value == ["ok", "ok"]
    inside = victim.run(source, size=1 << 40, limits={"disk_bytes": DISK_BYTES, "wall_s": 5})
    assert not inside.result.has_value or set(inside.value) <= {"EFBIG", "ENOSPC"}


@pytest.mark.parametrize("kind", ["files", "folders", "links", "symlinks", "fifos", "unlinked"])
def test_inodes_end_at_their_limit(kind: str, victim: Victim) -> None:
    source = raw("""
held = []
def unlinked(name):
    held.append(os.open(name, os.O_CREAT | os.O_RDWR))
    os.unlink(name)
open("first", "w").close()
make = {
    "files": lambda name: open(name, "w").close(), "folders": os.mkdir, "fifos": os.mkfifo, "unlinked": unlinked,
    "links": lambda name: os.link("first", name), "symlinks": lambda name: os.symlink("x" * 4000, name),
}[kind]
made = 0
while made < bound and attempt(make, f"node-{made}") == "ok":
    made += 1
set_result(made)
""")
    assert outside(source, kind=kind, bound=200).value == 200
    inside = victim.run(source, kind=kind, bound=100_000, limits={"inodes": INODES, "open_files": 256})
    assert inside.value < INODES


def test_descriptors_end_at_their_limit(victim: Victim) -> None:
    source = f"""{RAW}
held = []
while len(held) < bound:
    try:
        held += os.pipe()
    except OSError:
        break
set_result(len(held))
"""
    assert outside(source, bound=400).value == 400
    assert victim.run(source, bound=10**6, limits={"open_files": 64}).value < 64
    victim.assert_healthy()
