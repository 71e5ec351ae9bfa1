"""Programs that behave under toolcell as under plain Python, for every backend. Each sets True, or what went wrong."""

from __future__ import annotations

from toolcell.results import ErrorInfo


def died_of(signal: int) -> ErrorInfo:
    """Return the error of a script that ended by a signal."""
    return ErrorInfo("Killed", f"the sandbox died of signal {signal}", signal=signal)


LIBRARIES = """
import ctypes, joblib, threading
libc = ctypes.CDLL(None)
libc.open_memstream.restype = ctypes.c_void_p
ready, done = threading.Barrier(9), threading.Event()
def work():
    libc.malloc(100_000)
    ready.wait(30)
    done.wait(30)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
ready.wait(30)
text, size = ctypes.c_char_p(), ctypes.c_size_t()
stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
libc.malloc_info(0, stream)
libc.fclose(stream)
done.set()
joblib.cpu_count(only_physical_cores=True)
set_result(text.value.count(b"<heap nr="))
"""
"""Results in the number of glibc's heaps for nine threads. Joblib counts physical processors, if need be with `lscpu`."""

JOBS = """
import joblib, threading
from multiprocessing.pool import ThreadPool
both = threading.Barrier(2)
def meet(number):
    both.wait(30)
    return number
jobs = {backend: [joblib.delayed(meet)(number) for number in range(2)] for backend in (None, "loky", "threading")}
assert joblib.Parallel(n_jobs=-1)(joblib.delayed(abs)(-number) for number in range(2)) == [0, 1]
jobs["multiprocessing"] = [joblib.delayed(abs)(-number) for number in range(2)]
found = [joblib.Parallel(n_jobs=2, backend=backend)(each) for backend, each in jobs.items()]
with ThreadPool(2) as pool:
    set_result([*found, pool.map(meet, range(2), 1)])
"""
"""Jobs that meet, as only two at once can."""

PROGRAMS = {
    "its user has a name": """
        import getpass, grp, os, pwd
        own = pwd.getpwuid(os.getuid())
        assert (own.pw_uid, own.pw_gid) == (os.getuid(), os.getgid())
        assert pwd.getpwnam(own.pw_name) == own and grp.getgrgid(os.getgid()).gr_gid == os.getgid()
        set_result(getpass.getuser() == own.pw_name)""",
    "the locale is C.UTF-8": """
        import locale
        set_result(locale.setlocale(locale.LC_ALL, "") == "C.UTF-8" == locale.setlocale(locale.LC_CTYPE))""",
    "sys.argv has no arguments": """
        import argparse, sys
        parser = argparse.ArgumentParser()
        parser.add_argument("--times", type=int, default=3)
        set_result(len(sys.argv) == 1 and parser.parse_args().times == 3)""",
    "unittest.main runs the script's tests": """
        import unittest
        class Sums(unittest.TestCase):
            def test_sum(self):
                self.assertEqual(sum([1, 2]), 3)
        program = unittest.main(exit=False)
        set_result(program.result.testsRun == 1 and program.result.wasSuccessful())""",
    "a module in the workspace is imported": """
        import pathlib
        pathlib.Path("helper.py").write_text("def double(x): return 2 * x")
        pathlib.Path("package").mkdir()
        pathlib.Path("package/__init__.py").write_text("from .inner import name")
        pathlib.Path("package/inner.py").write_text("name = __name__")
        import helper, package
        set_result(helper.double(4) == 8 and package.name == "package.inner")""",
    "__file__ is in the workspace": """
        import os, pathlib
        pathlib.Path("data.csv").write_text("a")
        set_result(pathlib.Path(__file__).with_name("data.csv").read_text() == "a"
                   and os.path.samefile(os.path.dirname(__file__), "."))""",
    "exit ends it": "set_result(True)\nexit()",
    "quit ends it": "set_result(True)\nquit(0)",
    "stdout can be reconfigured": """
        import sys
        sys.stdout.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
        sys.stderr.reconfigure(errors="strict")
        assert (sys.stdout.errors, sys.stdout.encoding, sys.stdout.mode) == ("replace", "utf-8", "w")
        try:
            sys.stdout.reconfigure(encoding="no such encoding")
        except LookupError:
            set_result(True)""",
    "the source of functions and classes is known": """
        import inspect
        def double(x):
            return 2 * x
        class Shape:
            sides = 4
        set_result(inspect.getsource(double) == "def double(x):\\n    return 2 * x\\n" and "sides = 4" in inspect.getsource(Shape))""",
    "the recursion limit is the script's": """
        def depth(n):
            return n if n == 0 else depth(n - 1)
        set_result(depth(990) == 0)""",
    "shared memory": """
        from multiprocessing.shared_memory import ShareableList, SharedMemory
        import os
        memory = SharedMemory(create=True, size=64)
        if os.fork() == 0:
            other = SharedMemory(memory.name)
            other.buf[:2] = b"ok"
            os._exit(0)
        os.wait()
        found = bytes(memory.buf[:2])
        memory.close()
        memory.unlink()
        numbers = ShareableList([1, "two"])
        set_result(found == b"ok" and list(numbers) == [1, "two"])""",
    "pools of processes": """
        from concurrent.futures import ProcessPoolExecutor
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool, ProcessPoolExecutor(2, pool._ctx) as executor:
            set_result(pool.map(abs, [-1, 2]) == list(executor.map(abs, [-1, 2])) == [1, 2])""",
    "a manager says why there is none": """
        import multiprocessing
        try:
            multiprocessing.Manager()
        except PermissionError as error:
            set_result("socket" in str(error) and "Queue" in str(error))""",
    "starting a program is refused in words, also by multiprocessing": """
        import multiprocessing, subprocess
        told = []
        for start in (lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
                      lambda: subprocess.run(["true"])):
            try:
                start()
            except PermissionError as error:
                told.append("nothing can be executed" in str(error))
        set_result(told == [True, True])""",
    "a full disk": """
        import errno
        try:
            with open("big", "wb") as file:
                while True:
                    file.write(bytes(1 << 20))
        except OSError as error:
            set_result(error.errno == errno.ENOSPC)""",
    "sqlite, flushed to disk": """
        import os, sqlite3
        with sqlite3.connect("data.db") as base:
            base.execute("create table t (x)")
            base.execute("insert into t values (1)")
        with open("note", "w") as file:
            file.write("x")
            os.fsync(file)
        set_result(sqlite3.connect("data.db").execute("select x from t").fetchall() == [(1,)])""",
    "asyncio: streams, timers, executors, queues": """
        import asyncio, concurrent.futures, os, signal, socket
        async def echo(reader, writer):
            while data := await reader.read(1 << 16):
                writer.writelines([data[:10], data[10:]])
                await writer.drain()
            writer.close()
        async def main():
            left, right = socket.socketpair()
            served = asyncio.create_task(echo(*await asyncio.open_connection(sock=left)))
            reader, writer = await asyncio.open_connection(sock=right)
            writer.writelines([b"x" * 1_000_000, b"end"])
            writer.write_eof()
            echoed = await reader.read()
            await served
            loop, fired, queue = asyncio.get_running_loop(), asyncio.Event(), asyncio.Queue(1)
            loop.call_later(0.001, fired.set)
            loop.add_signal_handler(signal.SIGUSR1, queue.put_nowait, "signal")
            await fired.wait()
            os.kill(os.getpid(), signal.SIGUSR1)
            told = await queue.get()
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                in_thread = await loop.run_in_executor(pool, sum, [1, 2])
            read, write = os.pipe()
            pipe = asyncio.StreamReader()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), os.fdopen(read, "rb"))
            os.write(write, b"line\\n")
            line = await pipe.readline()
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                tasks = [group.create_task(asyncio.sleep(0.001, number)) for number in range(50)]
            return (len(echoed), told, in_thread, line, sum(task.result() for task in tasks))
        set_result(asyncio.run(main()) == (1_000_003, "signal", 3, b"line\\n", 1225))""",
    "a signal that is blocked waits": """
        import os, signal
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.pthread_sigmask(signal.SIG_BLOCK, [number])
            os.kill(os.getpid(), number)
            assert signal.sigpending() == {number} and signal.sigwait([number]) == number
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGUSR1])
        set_result(True)""",
    "selectors": """
        import selectors, socket
        left, right = socket.socketpair()
        with selectors.DefaultSelector() as selector:
            selector.register(left, selectors.EVENT_READ, "data")
            right.send(b"x")
            set_result([key.data for key, _ in selector.select(30)] == ["data"])""",
    "file locks": """
        import fcntl, mailbox, sqlite3
        box = mailbox.mbox("box")
        box.lock()
        box.add("From: a\\n\\nhello")
        box.unlock()
        with open("a.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_UN)
        with sqlite3.connect("a.db") as db:
            db.execute("create table t (a)")
        set_result(len(box) == 1)""",
}
