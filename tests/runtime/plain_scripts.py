"""Scripts that end, fail and return in every way: each does the same in CPython and in every backend."""

from __future__ import annotations

HELPER = {"helper.py": "def divide(x):\n    return 1 / x\n\n\nclass Failing:\n    value = 1\n"}

SCRIPTS: dict[str, str] = {
    "a thread that nobody joins": """
        import threading, time
        def work():
            time.sleep(0.05)
            print("worked", tools.add(a=1, b=2))
        threading.Thread(target=work).start()
        print("main has ended")""",
    "a daemon thread does not hold it up": """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("over")""",
    "a pool without shutdown": """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(1)
        for i in range(3):
            pool.submit(lambda i=i: print("job", i, call_tool("add", a=i)))""",
    "a process that nobody joins": """
        import multiprocessing
        def work():
            print("in a child", end=" ")
        multiprocessing.Process(target=work).start()""",
    "a thread that starts another": """
        import threading
        def second(): print("second")
        def first(): threading.Thread(target=second).start()
        threading.Thread(target=first).start()""",
    "a thread that fails": """
        import threading
        def work():
            raise KeyError("gone")
        threading.Thread(target=work, name="worker").start()""",
    "exit hooks, the last one first": """
        import atexit
        atexit.register(print, "first registered")
        @atexit.register
        def last():
            print("bye", call_tool("add", a=1))""",
    "exit hooks after an error": """
        import atexit
        atexit.register(print, "bye")
        1 / 0""",
    "exit hooks after sys.exit": """
        import atexit, sys
        atexit.register(print, "bye")
        sys.exit(3)""",
    "an exit hook that fails": """
        import atexit
        def fail():
            1 / 0
        atexit.register(print, "all the same")
        atexit.register(fail)""",
    "an exit hook that sets the result": """
        import atexit
        atexit.register(set_result, {"late": 1})""",
    "an exit hook that is taken back": """
        import atexit
        atexit.register(print, "never")
        atexit.unregister(print)""",
    "a finalizer": """
        import weakref
        class Thing: pass
        thing = Thing()
        weakref.finalize(thing, print, "finalized")""",
    "a temporary folder": """
        import os, tempfile
        folder = tempfile.TemporaryDirectory()
        print(os.path.isdir(folder.name))""",
    "a handler of logging that keeps records": """
        import logging, logging.handlers
        handler = logging.handlers.MemoryHandler(100, target=logging.StreamHandler())
        logging.getLogger().addHandler(handler)
        logging.warning("kept until the end")""",
    "a queue listener": """
        import logging, logging.handlers, queue, sys
        listener = logging.handlers.QueueListener(queue.Queue(), logging.StreamHandler(sys.stdout))
        listener.start()
        logging.getLogger().addHandler(logging.handlers.QueueHandler(listener.queue))
        logging.error("queued")
        listener.stop()""",
    "a hook for exceptions": """
        import sys
        def hook(kind, error, traceback):
            print("hook:", kind.__name__, error, traceback.tb_lineno)
        sys.excepthook = hook
        print("before")
        sys.stderr.flush()""",
    "a hook for exceptions that exits": """
        import sys
        sys.excepthook = lambda *error: sys.exit("of the hook")
        1 / 0""",
    "a hook for exceptions that exits without an error": """
        import sys
        sys.excepthook = lambda *error: sys.exit(0)
        1 / 0""",
    "a hook of threads": """
        import threading
        threading.excepthook = lambda args: print("hook:", args.exc_type.__name__)
        def work(): 1 / 0
        threading.Thread(target=work).start()""",
    "a text stream over stdout's bytes": """
        import io, sys
        stream = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
        stream.write("wr\\u00e4pped")""",
    "stdout replaced for good": """
        import io, sys
        sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", errors="replace")
        print("to the new stream", end="")""",
    "bytes to stdout": """
        import sys
        sys.stdout.buffer.write(b"raw ")
        sys.stdout.buffer.write("bytes \\u20ac\\n".encode())""",
    "a file that is not closed": """
        import csv
        writer = csv.writer(open("out.csv", "w"))
        writer.writerow(["a", 1])
        set_result(1, files=["out.csv"])
        writer.writerow(["b", 2])""",
    "files of every kind left open": """
        import gzip, io, zipfile
        plain, raw = open("a.txt", "w"), open("b.bin", "wb")
        plain.write("text")
        raw.write(b"bytes")
        archive = zipfile.ZipFile("c.zip", "w")
        archive.writestr(zipfile.ZipInfo("name"), "content")
        set_result(1, files=["a.txt", "b.bin", "c.zip"])""",
    "a file written after the result": """
        set_result("made", files=["late.txt"])
        with open("late.txt", "w") as file:
            file.write("late")""",
    "a file written by a thread after the result": """
        import threading, time
        def work():
            time.sleep(0.02)
            with open("late.txt", "w") as file:
                file.write("by a thread")
        threading.Thread(target=work).start()
        set_result(2, files=["late.txt"])""",
    "destructors of what is left": """
        class Thing:
            def __init__(self, name): self.name = name
            def __del__(self): print("deleted", self.name)
        _private, public = Thing("private"), Thing("public")
        cycle = Thing("cycle")
        cycle.itself = cycle""",
    "destructors of a script that a library refers to": """
        import json
        class Thing:
            def __del__(self): print("deleted")
        thing = Thing()
        json.default = lambda: thing""",
    "a destructor that fails": """
        class Thing:
            def __del__(self):
                raise ValueError("in __del__")
        thing = Thing()
        del thing
        print("went on")""",
    "a generator with finally": """
        def numbers():
            try:
                yield 1
            finally:
                print("closed")
        left = numbers()
        next(left)""",
    "an exit code": "import sys\nprint('x')\nsys.exit(7)",
    "an exit message": "import sys\nsys.exit('could not go on')",
    "an exit in a thread": """
        import sys, threading
        threading.Thread(target=sys.exit, args=(3,)).start()""",
    "a fork that exits": """
        import os, sys
        pid = os.fork()
        if pid == 0:
            sys.exit(5)
        print("child:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))""",
    "a fork that fails": """
        import os
        pid = os.fork()
        if pid == 0:
            raise ValueError("in the child")
        print("child:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))""",
    "a fork with exit hooks": """
        import atexit, os, sys
        pid = os.fork()
        if pid == 0:
            atexit.register(sys.stderr.write, "hook of the child\\n")
            sys.exit()
        os.waitpid(pid, 0)""",
    "every way to print without a newline": """
        import json, sys
        print("a", "b", sep="-", end=" ")
        print(end="")
        sys.stdout.write("c ")
        json.dump({"k": [1, 2.5, None]}, sys.stdout)
        print("", *range(3), sep=",")
        print(None, True, end=None, sep=None)
        sys.stdout.writelines(["x", "y"])""",
    "print with an object whose text fails": """
        class Bad:
            def __str__(self): raise ValueError("no text")
        try:
            print("x", Bad())
        except ValueError as error:
            print("caught", error)
        print("x", "y", file=None, flush=True)
        try:
            print("x", sep=3)
        except TypeError as error:
            print(error)""",
    "an error with notes": """
        error = ValueError("it failed")
        error.add_note("in row 3")
        error.add_note("of table x")
        raise error""",
    "an error in a function": """
        def inner(x):
            return 1 / x
        def outer():
            return [inner(n) for n in (1, 0)]
        outer()""",
    "a cause and a context": """
        try:
            try:
                {}["key"]
            except KeyError as error:
                raise ValueError("outer") from error
        except ValueError:
            raise RuntimeError("while handling")""",
    "a context that is suppressed": """
        try:
            1 / 0
        except ZeroDivisionError:
            raise ValueError("alone") from None""",
    "a group of exceptions": """
        import asyncio
        async def fail(kind):
            raise kind("in a task")
        async def main():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail(KeyError))
                tasks.create_task(fail(ValueError))
        asyncio.run(main())""",
    "an error in a module that was given": "import helper\nprint(helper.divide(1))\nhelper.divide(0)",
    "an error in runpy": """
        import runpy
        with open("part.py", "w") as file:
            file.write("x = 1\\nundefined_name\\n")
        runpy.run_path("part.py")""",
    "an error while a module is imported": """
        with open("broken.py", "w") as file:
            file.write("def check(x):\\n    assert x, 'not set'\\ncheck(0)\\n")
        import broken""",
    "an error of a module's syntax": """
        with open("broken.py", "w") as file:
            file.write("def f(:\\n    pass\\n")
        import broken""",
    "a traceback that the script prints": """
        import sys, traceback
        def fail():
            raise KeyError("shown")
        try:
            fail()
        except KeyError:
            traceback.print_exc(file=sys.stdout)
            print(traceback.format_exc().count("File"))""",
    "recursion without end": "def f(n):\n    return f(n + 1)\ntry:\n    f(0)\nexcept RecursionError as e:\n    print(e)",
    "an error of the library": "import json\njson.loads('{')",
    "an assertion": "x = 3\nassert x == 4, f'x is {x}'",
    "an exception of the script's own": "class AppError(Exception):\n    pass\nraise AppError('own', 1)",
    "an exception without a text": "raise ValueError",
    "a name that is not there": "value = 1\nprint(valeu)",
    "an error while another is printed": """
        class Odd(Exception):
            def __str__(self): return "text of its own\\nin two lines"
        raise Odd""",
    "a warning": "import warnings\nwarnings.warn('old', DeprecationWarning)\nprint('after')",
    "a task that nobody awaits": """
        import asyncio
        async def work(): print("never")
        async def main(): asyncio.ensure_future(work())
        asyncio.run(main())""",
    "a coroutine that nobody awaits": """
        async def work(): pass
        work()
        print("after")""",
    "builtins are a module": """
        print(type(__builtins__).__name__, __builtins__.len("ab"), __annotations__, __cached__)""",
    "the stack": """
        import inspect, logging, sys, traceback
        def inner():
            traceback.print_stack(file=sys.stdout)
            print(len(traceback.format_stack()), [each.function for each in inspect.stack()])
            logging.error("with its stack", stack_info=True)
        def outer():
            inner()
        outer()""",
    "the stack of a task": """
        import asyncio
        async def inner():
            for limit in (None, 1, 2):
                print([each.f_code.co_name for each in asyncio.current_task().get_stack(limit=limit)])
        async def outer():
            await inner()
        asyncio.run(outer())""",
    "the stack of a thread": """
        import threading, traceback
        def work(): print([each.name for each in traceback.extract_stack()][-1])
        threading.Thread(target=work).start()""",
    "a log record that cannot be formatted": """
        import logging
        logging.warning("%d rows", "many")""",
    "a character in two writes": """
        import sys
        for byte in "ä€🎉".encode():
            sys.stdout.buffer.write(bytes([byte]))
            sys.stdout.flush()
        sys.stdout.buffer.write(b"\\n")""",
    "stdout detached": """
        import io, sys
        sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-8")
        print("to the new stream", sys.stdout.write_through)""",
    "destructors that use the script's names": """
        import helper, os
        LIMIT = 5
        class Thing:
            def __init__(self, name): self.name = name
            def __del__(self):
                print("deleted", self.name, LIMIT, os.path.basename("a/b"), helper.Failing.value, later())
        def later(): return "later"
        _private, public = Thing("private"), Thing("public")""",
    "destructors in a module that was imported": """
        with open("part.py", "w") as file:
            file.write("import os\\nclass Thing:\\n    def __del__(self): print('deleted', os.sep)\\nthing = Thing()\\n")
        import part""",
    "an error in text that is executed": "exec('def fail():\\n    1 / 0')\nfail()",
    "the stream of bytes below stdout": """
        import io, sys
        stream = sys.stdout.buffer
        print(stream.mode, stream.name, isinstance(stream, io.BufferedIOBase), stream.readable(), flush=True)
        stream.raw.write(b"raw\\n")
        for wrong in ("text", 3):
            try:
                stream.write(wrong)
            except TypeError:
                print("refused")""",
}
