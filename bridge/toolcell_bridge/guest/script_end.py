"""End a script as the interpreter ends one: wait for threads, run exit hooks, destroy what is left, write files out.

A script that has none of these pays a few microseconds. Everything here runs code of the script; nothing it raises
changes how the run ended.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import threading
import time
from _weakref import ref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from types import FrameType, ModuleType
from typing import Any, Final

from toolcell_bridge.guest import tracebacks
from toolcell_bridge.guest.scripts import is_script

MOST: Final = 20
NAME_CHARS: Final = 100
"""Most characters of what is named while it is waited for."""

HERE: Final = "at the end of the script"

LOGGING: Final = "logging"
PROCESSES: Final = "multiprocessing.process"

IMPORTS: Final = "<frozen importlib._bootstrap>"

IS_HEAP_TYPE: Final = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: a script may give such a class a destructor later."""

_flags: Final = type.__dict__["__flags__"].__get__
"""Reads a class's flags, whatever its metaclass says."""

_harmless: Final = set[type]()
"""Classes whose objects do nothing when they are destroyed. Rehearsals fill it."""


end_session: Callable[[], None]
"""Ends the session that this sandbox serves. Only such a sandbox has it."""

keep_session: Callable[[int], None]
"""Sends the state of the session to the host, as a returned file; its result names what is lost. Takes the bytes of
memory that there are for it."""

bring_session_back: Callable[[], None]
"""Brings a state back that the host has sent."""


class ScriptFinalizer:
    """What the interpreter had before the first script, and how a script is ended."""

    def __init__(self, workspace: str) -> None:
        self._workspace = workspace
        self._hooks = -1
        self._handlers = 0
        self._has_own_hooks = False

    def begin(self) -> None:
        """Note what exit hooks there are. From here on, what the collector tracks is the script's."""
        gc.freeze()
        self._hooks = atexit._ncallbacks()
        if self._hooks == 1 and LOGGING in sys.modules:
            self._hooks = 0  # logging.shutdown, which has nothing to do until the script adds a handler
        self._handlers = self._handler_count()

    def has_hooks(self) -> bool:
        """Whether a script has registered something to call at the end."""
        count = atexit._ncallbacks()
        return self._logs() or (count != self._hooks and (self._hooks > 0 or count > (LOGGING in sys.modules)))

    def _logs(self) -> bool:
        """Whether logging has something to do at the end, with packages that were imported before or without them."""
        return self._handler_count() > self._handlers

    def _handler_count(self) -> int:
        """Return how many handlers there are that may have something to do at the end."""
        if (logging := sys.modules.get(LOGGING)) is None:
            return 0
        try:
            handlers = [each() for each in logging._handlerList]
            idle = logging.NullHandler, type(logging.lastResort)
            return sum(handler is not None and type(handler) not in idle for handler in handlers)
        except Exception:  # a script has changed it, or has a module of this name
            return self._handlers

    def note_hooks(self) -> None:
        """Distinguish from here on the hooks of scripts from those of modules, which importing these brings back."""
        register: Any = atexit.register

        @wraps(register)
        def noting(hook: Any, /, *args: Any, **options: Any) -> Any:
            self._has_own_hooks = self._has_own_hooks or not self._is_of_import(sys._getframe(1))
            return register(hook, *args, **options)

        atexit.register = noting

    def _is_of_import(self, frame: FrameType | None) -> bool:
        """Whether a module that is not of the workspace does it while it is imported."""
        while frame is not None and (name := frame.f_code.co_filename) != IMPORTS:
            if is_script(name) or name.startswith(self._workspace + "/"):
                return False
            frame = frame.f_back
        return frame is not None

    def has_own_hooks(self) -> bool:
        """Whether a script has registered something, as far as it can be told from what modules do when imported."""
        weakref: Any = sys.modules.get("weakref")
        has_finalizers = weakref is not None and bool(weakref.finalize._registry)
        return self.has_hooks() and (self._has_own_hooks or has_finalizers or self._logs())

    def run(
        self, take_main: Callable[[], ModuleType], kept: Container[str], wait_for: Callable[[list[str]], object]
    ) -> None:
        """End the script. `take_main` returns its module, which nothing outside of the script refers to afterwards.
        `kept`: names that stay. `wait_for` is told what is waited for, before it is.

        Never raises. Before `begin`, in a rehearsal, it looks for the same and ends nothing.
        """
        if self._is_over():
            return
        if self._hooks < 0:
            _has_finalizers(gc.get_objects())
            return
        try:
            self._join(wait_for)
        except BaseException as exc:  # a KeyboardInterrupt of the script's own, or memory is short
            tracebacks.report_ignored(HERE, exc)
        try:
            self._call_exit_hooks(wait_for)
        except BaseException as exc:
            tracebacks.report_ignored(HERE, exc)
        try:
            self._destroy(take_main, kept)
        except BaseException as exc:
            tracebacks.report_ignored(HERE, exc)

    def _is_over(self) -> bool:
        """Whether there is certainly nothing to end, as after nearly all scripts."""
        try:
            return (
                not self.has_hooks()
                and len(threading._active) == 1  # type: ignore[attr-defined]
                and _harmless.issuperset(map(type, gc.get_objects()))
            )
        except BaseException:  # memory is short, or the script has changed one of these; the steps below report it
            return False

    @staticmethod
    def _join(wait_for: Callable[[list[str]], object]) -> None:
        """Wait for the threads that are not daemons."""
        if len(threading._active) == 1:  # type: ignore[attr-defined]
            return
        me = threading.current_thread()
        if names := [each.name for each in threading.enumerate() if each is not me and not each.daemon]:
            wait_for([f"thread {str(name)[:NAME_CHARS]!r}" for name in names[:MOST]])
            threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does: thread pools are told first

    def _call_exit_hooks(self, wait_for: Callable[[list[str]], object]) -> None:
        if not self.has_hooks():
            return
        names = []
        if (processes := sys.modules.get(PROCESSES)) is not None:
            names = [
                f"process {str(each.name)[:NAME_CHARS]!r}" for each in processes.active_children() if not each.daemon
            ]
        wait_for(names[:MOST])
        atexit._run_exitfuncs()

    def _destroy(self, take_main: Callable[[], ModuleType], kept: Container[str]) -> None:
        """Destroy the script's objects, if destroying them does anything, and write out what files hold."""
        if not _has_finalizers(gc.get_objects()):
            return
        if len(threading._active) == 1:  # type: ignore[attr-defined]  # a daemon goes on with these names
            left = _let_go([take_main(), *self._modules()])
            gc.collect()  # destructors find the script's names as they are
            for mark in left:
                if (each := mark()) is not None:  # a hook, a handler or a library refers to the script
                    for referrer in gc.get_referrers(each):
                        if type(referrer) is dict:
                            _clear(referrer, kept)
            each = None
            gc.collect()
        write_out_files()

    def _modules(self) -> list[ModuleType]:
        """Return the modules that came from the workspace, the last imported last."""
        found = []
        for module in list(sys.modules.values()):
            name = vars(module).get("__file__") if type(module) is ModuleType else None
            if type(name) is str and name.startswith(self._workspace + "/"):
                found.append(module)
        return found


class _Mark:
    """A name of each module that was let go. It shows whether the module's names are still there."""


def _let_go(modules: list[ModuleType]) -> list[ref[_Mark]]:
    """Drop the references to modules, the last one first. Returns a mark of each."""
    marks = []
    while modules:
        module = modules.pop()
        module.__dict__["__mark__"] = mark = _Mark()
        marks.append(ref(mark))
        for name in [name for name, each in sys.modules.items() if each is module]:
            del sys.modules[name]
    return marks


def _has_finalizers(objects: list[object]) -> bool:
    found = False
    for kind in set(map(type, objects)) - _harmless:
        if any("__del__" in vars(base) for base in type.mro(kind)):
            found = True
        elif not _flags(kind) & IS_HEAP_TYPE or str(vars(kind).get("__module__")).startswith("toolcell_bridge."):
            _harmless.add(kind)
    return found


def _clear(namespace: dict[str, Any], kept: Container[str]) -> None:
    """Take the values from a module's names: objects first, which may use the others in their destructors. Of both,
    those whose names begin with one underscore come first, as in the interpreter."""
    for objects, private in ((True, True), (True, False), (False, True), (False, False)):
        for name in list(namespace):
            if type(name) is not str or name == "__builtins__" or name in kept:
                continue
            kind = type(namespace.get(name))
            is_object = bool(_flags(kind) & IS_HEAP_TYPE) and not issubclass(kind, type)
            is_private = name.startswith("_") and not name.startswith("__")
            if is_object is objects and is_private is private:
                try:
                    namespace[name] = None
                except BaseException as exc:
                    tracebacks.report_ignored(HERE, exc)


def write_out_files() -> None:
    """Write what the script's open files hold in memory."""
    for each in gc.get_objects():
        # Not isinstance(), which asks the object.
        if issubclass(type(each), io.IOBase) and type(each).__module__ != "toolcell_bridge.guest.output":
            try:
                if not each.closed and each.writable():
                    each.flush()
            except BaseException:  # the file of a closed descriptor, or a class of the script's own
                pass


# End what a script of a session left running: its processes at once, its threads at their next line.
#
# Nothing here isolates: a script can evade all of it, and what it gains is a thread that shares its own sandbox.
# The point is that one script's remains do not disturb the next one unnoticed.

"""Most characters of what is named in a report."""

RETRY_S = 0.005

REAP_S = 0.5
"""How long the kernel may take to end killed processes."""


def end_leftovers(end_s: float) -> tuple[list[str], list[str]]:
    """End processes and threads; return what was ended, and what does not end. Threads have `end_s` seconds."""
    count = _end_processes()
    threads = _threads()
    if not count and not threads:
        return [], []
    alive = _ended_threads(threads, time.perf_counter() + end_s)
    ended = [threads[ident] for ident in threads if ident not in alive]
    if count:
        ended.append(f"{count} process{'es' if count > 1 else ''}")
    return ended[:MOST], [threads[ident] for ident in alive][:MOST]


def _threads() -> dict[int, str]:
    """Return the threads besides this one that run Python code, with their names."""
    idents = sys._current_frames().keys() - {threading.get_ident()}
    names = {thread.ident: thread.name for thread in threading.enumerate()} if idents else {}
    return {ident: f"thread {str(names.get(ident, ident))[:NAME_CHARS]!r}" for ident in sorted(idents)}


def _ended_threads(threads: dict[int, str], until: float) -> list[int]:
    """Tell threads to end until they have, or until the time is over. Return those that go on."""
    alive = list(threads)
    pools = sys.modules.get("concurrent.futures.thread")
    with nullcontext() if pools is None else _closed_executors(pools):
        for ident in (alive := _running(alive)):
            with suppress(Exception):  # it is raised at the thread's next line of Python
                import ctypes

                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
        while alive and time.perf_counter() < until:
            time.sleep(RETRY_S)
            alive = _running(alive)
    return alive


def _running(idents: list[int]) -> list[int]:
    return [ident for ident in idents if ident in sys._current_frames()] if idents else []


@contextmanager
def _closed_executors(pools: Any) -> Iterator[None]:
    """Let the idle threads of thread pools end: they wait for work, and notice nothing else.

    One that is slow to wake is told to end as well, and must not report that as a fault of its pool.
    """
    for thread in threading.enumerate():
        arguments = getattr(thread, "_args", ())
        executor = arguments[0]() if getattr(thread, "_target", None) is pools._worker and arguments else None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
    time.sleep(RETRY_S)
    logger = pools._base.LOGGER
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _end_processes() -> int:
    """Kill every process of this sandbox but this one; return how many still ran."""
    count, is_killing = 0, False
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        for process in multiprocessing.active_children():
            with suppress(Exception):
                process.kill()
                process.join(1)
                count += 1
    for pid in [-1] if _may_kill_all() else _children():  # -1: every process that this one may signal
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            is_killing = True
    until = time.perf_counter() + REAP_S
    while time.perf_counter() < until:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except OSError:
            break
        if pid:
            count += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        elif is_killing:
            time.sleep(RETRY_S)
        else:
            break
    return count


def _may_kill_all() -> bool:
    """Whether a signal to all stays in this sandbox: in a pid namespace of its own, or where Landlock keeps it in."""
    if os.getpid() == 1:
        return True
    parent = os.getppid()
    try:
        os.kill(parent, 0)
    except PermissionError:
        return parent > 1
    except OSError:
        pass
    return False


def _children() -> list[int]:
    """Return the processes below this one, where /proc tells."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                    waiting += (below := [int(each) for each in file.read().split()])
                    found += below
    return found
