"""The guest's filter on a real kernel: refused calls, each tried without it first, and calls that must work."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from rows import each_row
from toolcell_bridge.isolation.seccomp_policy import EPOLL, REFUSED
from toolcell_bridge.isolation.syscall_numbers import SYSCALL_NUMBERS
from toolcell_bridge.isolation.syscalls import syscall

from .conftest import child_in

pytestmark = [pytest.mark.quick, pytest.mark.isolation]
Child = Callable[..., Any]

BAD = "2**64 - 1"
# Bad pointers on purpose: without the filter the kernel gets far enough to complain about them.
ACTIONS = {
    "a TCP socket": "syscall('socket', 2, 1, 0)",
    "a UDP socket": "syscall('socket', 2, 2, 0)",
    "a unix socket": "syscall('socket', 1, 1, 0)",
    "a netlink socket": "syscall('socket', 16, 3, 0)",
    "a datagram pair": "syscall('socketpair', 1, 2, 0, ctypes.create_string_buffer(8))",
    "io_uring": f"syscall('io_uring_setup', 8, {BAD})",
    "kernel aio": f"syscall('io_setup', 1, {BAD})",
    "memfd_create": "syscall('memfd_create', b'x', 0)",
    "userfaultfd": "syscall('userfaultfd', 1)",
    "a new user namespace": "syscall('unshare', 0x10000000)",
    "clone into a new user namespace": f"syscall('clone', 0x10000000 | 0x200 | 17, 0, {BAD}, 0, 0)",
    "joining a namespace": "syscall('setns', -1, 0)",
    "its own memory through the kernel": f"syscall('process_vm_readv', os.getpid(), {BAD}, 1, 0, 0, 0)",
    "a pidfd": "syscall('pidfd_open', os.getpid(), 0)",
    "tracing": "syscall('ptrace', 0, 0, 0, 0)",
    "comparing kernel objects": "syscall('kcmp', os.getpid(), os.getpid(), 6, 0, 0)",
    "another personality": "syscall('personality', 0xffffffff)",
    "watching files": "syscall('inotify_init1', 0)",
    "file handles": f"syscall('name_to_handle_at', -100, b'/', {BAD}, {BAD}, 0)",
    "executing a program": f"syscall('execve', b'/', {BAD}, {BAD})",
    "executing by descriptor": f"syscall('execveat', -1, b'', {BAD}, {BAD}, 0x1000)",
    "seeing a file lock of others": "fcntl.fcntl(os.open('/etc/passwd', os.O_RDONLY), fcntl.F_GETLK, bytes(32))",
    "a lease": "syscall('fcntl', os.open('mine', os.O_RDONLY | os.O_CREAT), 1024, 0)",
    "a change notification": "syscall('fcntl', os.open('.', os.O_RDONLY), 1026, 0)",
    "another cpu set": f"syscall('sched_setaffinity', 0, 8, {BAD})",
    "a nicer self": "syscall('setpriority', 0, 0, 0)",
    "a limit": "syscall('prlimit64', 0, 4, bytes(16), None)",
    "being dumped": "syscall('prctl', 4, 1, 0, 0, 0)",
    "surviving its parent": "syscall('prctl', 1, 0, 0, 0, 0)",
    "a Landlock ruleset": "syscall('landlock_create_ruleset', None, 0, 1)",
    "another filter": f"syscall('seccomp', 1, 0, {BAD})",
    "splicing": "syscall('tee', *os.pipe(), 1, 0)",
    "mapping pages into a pipe": f"syscall('vmsplice', os.pipe()[1], {BAD}, 0, 0)",
    "sendfile": "syscall('sendfile', os.open('/dev/null', 1), os.open('/etc/passwd', 0), None, 1)",
    "typing into the terminal": "syscall('ioctl', 0, 0x5412, b'x')",
    "typing into the terminal, high bits set": "syscall('ioctl', 0, 1 << 32 | 0x5412, b'x')",
    "a filter on its socket": "syscall('setsockopt', socket.socketpair()[0].fileno(), 1, 26, b'', 0)",
    "its peer's process": "syscall('getsockopt', socket.socketpair()[0].fileno(), 1, 77, bytes(4), b'\\4\\0\\0\\0')",
    "sending to an address": "syscall('sendto', socket.socketpair()[0].fileno(), b'x', 1, 0, b'\\1\\0/x', 4)",
    "the machine's disks": "syscall('sync')",
    "a descriptor in flight": "__import__('_socket').socket.sendmsg(socket.socketpair()[0], [b'x'], [(1, 1, bytes(4))])",
    "an epoll": "syscall('epoll_create1', 0)",
    "the kernel's keyrings": "syscall('keyctl', 0, -3, 0)",
    "a message queue": "syscall('msgget', 0, 0o1600)",
}

REFUSED_BY_SOME_MACHINES = frozenset({"io_uring", "userfaultfd", "a new user namespace"})
"""Sysctls and security modules turn these off for ordinary users; seen off, they prove nothing of the filter."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """What becomes of each action without and under the filter, each in a process of its own."""
    script = "import ctypes, fcntl, socket, threading\n"
    for action in ACTIONS.values():
        script += f"""
child = os.fork()
if child == 0:
    print(outcome(lambda: {action}), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    run = child_in(tmp_path_factory.mktemp("actions"))
    without, under = run(script).lines, run(script, filtered=True).lines
    return dict(zip(ACTIONS, without, strict=True)), dict(zip(ACTIONS, under, strict=True))


@each_row("what", ACTIONS)
@pytest.mark.conforms("Q-b1")
def test_an_action_the_kernel_would_consider_is_refused_under_the_filter(
    outcomes: tuple[dict[str, str], dict[str, str]], what: str
) -> None:
    without, under = outcomes

    assert under[what] == "EPERM"
    assert without[what] != under[what] or what in REFUSED_BY_SOME_MACHINES


def test_every_refused_call_is_refused_by_the_kernel(child: Child) -> None:
    numbers = SYSCALL_NUMBERS[os.uname().machine]
    # No filter is asked about the probes' own calls; from anywhere but their trampoline they are SIGILL.
    probes = ("uretprobe", "uprobe")
    names = [call for group in (*REFUSED, EPOLL) for call in group.calls if call in numbers and call not in probes]
    script = f"for call in {names!r}: print(call, outcome(syscall, call, -1, -1, -1, -1, -1, -1))"
    assert child(script, filtered=True).lines == [f"{call} EPERM" for call in names]


def test_a_device_node_is_refused_where_a_fifo_is_made(child: Child) -> None:
    script = """
        import stat
        print(outcome(os.mkfifo, "fifo"), outcome(os.mknod, "plain", 0o600 | stat.S_IFREG))
        print(outcome(os.mknod, "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3)))
        for each in os.listdir(): os.unlink(each)
    """
    without = child(script).lines
    assert without == ["ok ok", "ok" if os.geteuid() == 0 else "EPERM"]
    assert child(script, filtered=True).lines == ["ok ok", "EPERM"]


def test_starting_a_program_fails_like_a_missing_permission(child: Child) -> None:
    script = "import subprocess; print(outcome(subprocess.run, ['/bin/true']))"
    assert child(script).lines == ["ok"]
    assert child(script, filtered=True).lines == ["EPERM"]


INT_0X80 = """
    import ctypes, mmap
    # mov eax, 20 (getpid on i386); int 0x80; ret
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    print(call() == os.getpid(), flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="int 0x80 is x86's")
def test_a_32_bit_call_from_64_bit_code_kills_the_process(child: Child) -> None:
    without = child(INT_0X80)
    if without.killed_by is not None or without.lines != ["True"]:
        pytest.skip("this kernel has no IA32 emulation")
    assert child(INT_0X80, filtered=True).killed_by is signal.SIGSYS


def test_unknown_numbers_and_clone3_look_absent(child: Child) -> None:
    script = """
        numbers = [500, 1000, 0x40000000, 0x40000000 | 41, 0x40000000 | 520, 0x7fffffff]
        print({outcome(syscall, number, -1, -1, -1, -1, -1, -1) for number in numbers})
        print(outcome(syscall, "clone3", -1, 0))
    """
    assert child(script).lines[1] in ("EFAULT", "EINVAL", "E2BIG")
    assert child(script, filtered=True).lines == ["{'ENOSYS'}", "ENOSYS"]


def test_the_filter_reaches_threads_that_already_run(child: Child) -> None:
    script = """
        import threading
        go, ready, said = threading.Event(), threading.Event(), []
        def body():
            said.append(outcome(syscall, "personality", 0xffffffff))
            ready.set()
            go.wait()
            said.append(outcome(syscall, "personality", 0xffffffff))
        thread = threading.Thread(target=body)
        thread.start()
        ready.wait()
        filter_calls()
        go.set()
        thread.join()
        print(said)
    """
    assert child(script).lines == ["['ok', 'EPERM']"]


def test_the_filter_needs_no_new_privileges_first(child: Child) -> None:
    script = """
        from toolcell_bridge.isolation import seccomp
        if os.geteuid() == 0:
            os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
        print(outcome(seccomp.install, seccomp.guest_program()))
    """
    assert child(script).lines == ["EACCES"]


WORKS = {
    "threads": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(lambda n: n * n, range(100))) == 328350
    """,
    "asyncio": """
        import asyncio
        async def main():
            async with asyncio.timeout(30):
                queue = asyncio.Queue()
                await asyncio.gather(asyncio.sleep(0.001), asyncio.to_thread(queue.put_nowait, 1))
                left, right = __import__("socket").socketpair()
                reader, writer = await asyncio.open_connection(sock=left)
                right.send(b"hello\\n")
                assert await reader.readline() == b"hello\\n"
                writer.write(b"x" * 100_000)
                writer.close()
        asyncio.run(main())
    """,
    "fork, pipes and signals": """
        import signal
        pid = os.fork()
        if pid == 0:
            signal.pause()
        os.kill(pid, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        assert signal.sigwait({signal.SIGALRM}) == signal.SIGALRM
    """,
    "multiprocessing by fork": """
        import multiprocessing, tempfile
        context = multiprocessing.get_context("fork")
        left, right = context.Pipe()
        lock, total = context.Lock(), context.Value("i", 0)
        def work():
            with lock:
                total.value += 1
            right.send("done")
        process = context.Process(target=work)
        process.start()
        assert left.recv() == "done"
        process.join()
        assert total.value == 1
    """,
    "files": """
        import mmap, pathlib, shutil, tempfile
        with tempfile.TemporaryDirectory(dir=".") as home:
            one, two = pathlib.Path(home, "one"), pathlib.Path(home, "two")
            one.write_bytes(b"x" * 100_000)
            shutil.copy2(one, two)
            shutil.copytree(home, home + ".copy")
            shutil.rmtree(home + ".copy")
            with two.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
                mapped[:3] = b"abc"
                mapped.flush()
            os.link(one, home + "/hard"), os.symlink(one, home + "/soft"), os.rename(one, home + "/three")
            assert two.read_bytes()[:4] == b"abcx" and len(os.listdir(home)) == 4
            os.truncate(two, 10), os.utime(two, (1, 1)), os.chmod(two, 0o400)
            assert two.stat().st_size == 10 and shutil.disk_usage(home).total > 0
    """,
    "sqlite on disk": """
        import sqlite3
        base = sqlite3.connect("file:data.db?nolock=1", uri=True)
        base.execute("create table t (x)")
        base.executemany("insert into t values (?)", [(n,) for n in range(100)])
        base.commit()
        assert base.execute("select count(*) from t").fetchone() == (100,)
        base.close()
    """,
    "callbacks from C": """
        import ctypes
        compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
        numbers = (ctypes.c_int * 4)(3, 1, 4, 1)
        ctypes.CDLL(None).qsort(numbers, 4, 4, compare(lambda a, b: a[0] - b[0]))
        assert list(numbers) == [1, 1, 3, 4]
    """,
    "clocks, randomness and the terminal question": """
        import random, resource, time, uuid
        time.sleep(0.001), time.monotonic(), time.process_time(), time.thread_time(), uuid.uuid4(), os.urandom(8)
        assert not os.isatty(0) and resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0 and os.cpu_count() and os.times()
    """,
    "modules imported late": """
        import ssl, lzma, bz2, zlib, decimal, hashlib, unicodedata, zoneinfo, xml.etree.ElementTree, sqlite3, csv, json
        assert hashlib.sha256(b"").hexdigest().startswith("e3b0")
    """,
}


@pytest.mark.parametrize("what", WORKS)
def test_ordinary_python_works_under_the_filter(child: Child, what: str) -> None:
    assert child(WORKS[what]).lines == []
    assert child("for each in os.listdir(): os.unlink(each)").lines == []
    assert child(WORKS[what], filtered=True).lines == []


@pytest.mark.slow
def test_numpy_and_pandas_are_imported_and_compute_under_the_filter(child: Child) -> None:
    pytest.importorskip("numpy")
    pytest.importorskip("pandas")
    script = """
        import numpy, pandas
        square = numpy.random.default_rng(1).random((400, 400))
        assert numpy.allclose(square @ numpy.linalg.inv(square), numpy.eye(400))
        frame = pandas.DataFrame({"a": range(1000), "b": ["x", "y"] * 500})
        assert frame.groupby("b").a.sum().to_dict() == {"x": 249500, "y": 250000}
        frame.to_csv("out.csv")
        assert len(pandas.read_csv("out.csv")) == 1000
    """
    assert child(script, filtered=True).lines == []


def test_a_system_call_that_this_machine_does_not_know_is_refused_as_by_the_kernel() -> None:
    with pytest.raises(OSError, match="no_such_call: ") as caught:
        syscall("no_such_call")
    assert caught.value.errno == errno.ENOSYS
