"""Make the interpreter look to a script as it does under `python script.py`.

What a library decides when it is imported is changed right after its import: importing it ahead would cost every
sandbox's cold start.
"""

from __future__ import annotations

import builtins
import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, NoReturn

from toolcell_bridge.guest import output, tracebacks
from toolcell_bridge.guest.errors import refuse
from toolcell_bridge.guest.scripts import SCRIPT, SCRIPTS
from toolcell_bridge.guest.tools import TOOLS_MODULE

RECURSION_LIMIT = 1000
"""What an interpreter begins with."""

COUNTED_CALLS = 4
"""Frames between here and the script, and calls of C functions, which Python 3.11 counts as well."""

NO_MANAGER = (
    "multiprocessing managers listen on a socket, and a sandbox has none; share data with multiprocessing.Queue, Pipe, "
    "Value or Array"
)

SERIAL_JOBS = "joblib will operate in serial mode"


def install() -> None:
    """Prepare what is the same for every script. Runs before the fork."""
    import _sitebuiltins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()
    tracebacks.install()
    output.install()
    sys.argv = sys.orig_argv = [SCRIPT]
    sys.meta_path.insert(0, AfterImport)
    sys.meta_path.append(TOOLS_MODULE)
    for name, change in CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])


def enter(workspace: str) -> None:
    """Prepare what only a sandbox may have: the workspace to import from, and room for the frames below the script."""
    SCRIPTS.workspace = workspace
    if workspace not in sys.path:
        sys.path.insert(0, workspace)
    sys.setrecursionlimit(RECURSION_LIMIT + _depth() + COUNTED_CALLS)


def _depth() -> int:
    frame: FrameType | None = sys._getframe()
    depth = 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def show_source(source: str, workspace: str, name: str = SCRIPT) -> None:
    """Give `inspect` and `linecache` the text of the script. `name`: of its code."""
    _script.source, _script.names = source, (name, os.path.join(workspace, SCRIPT))
    if "linecache" in sys.modules:
        _fill_linecache(sys.modules["linecache"], dict.fromkeys(_script.names, source))


def show_earlier_sources() -> None:
    """Do so for the scripts that another sandbox has run."""
    if "linecache" in sys.modules:
        _fill_linecache(sys.modules["linecache"], SCRIPTS.texts)


class _Script:
    source = ""
    names: tuple[str, ...] = ()


_script = _Script()


def _fill_linecache(linecache: ModuleType, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        # Without a modification time it is never compared with a file.
        linecache.cache[name] = (len(text), None, [f"{line}\n" for line in text.split("\n")], name)


def _begin_linecache(linecache: ModuleType) -> None:
    """Python 3.13 notes the text of `python -c`, which started this interpreter, as that of `exec("...")`, too."""
    linecache.cache.pop("<string>", None)
    getattr(linecache, "_interactive_cache", {}).clear()
    _fill_linecache(linecache, SCRIPTS.texts | dict.fromkeys(_script.names, _script.source))


def _hide_our_code(warnings: ModuleType) -> None:
    """What warns with nothing of the script's below it would name our file. The interpreter names `sys` then."""
    nowhere = ("<sys>", 0) if sys.version_info >= (3, 13) else ("sys", 1)
    show, shown = warnings._showwarnmsg, set[str]()

    def _showwarnmsg(message: Any) -> None:
        text = str(message.message)
        if text.endswith(SERIAL_JOBS):  # `_allow_threads` sees to it that they are not
            return
        if message.filename.startswith(tracebacks.OWN_FOLDER):
            if text in shown:  # as of a figure that the script has saved, and that is drawn once more
                return
            message.filename, message.lineno, message.line = *nowhere, None
        shown.add(text)
        show(message)

    warnings.__dict__["_showwarnmsg"] = _showwarnmsg


def _hide_frames(traceback: ModuleType) -> None:
    """`print_stack`, and what `logging` and `asyncio` print of a stack."""

    def walk_stack(f: FrameType | None) -> Iterator[tuple[FrameType, int]]:
        """Yield the frames of a stack, the innermost first, each with its line number."""
        lines = dict(walk(sys._getframe(1) if f is None else f))
        return iter([(frame, lines[frame]) for frame in tracebacks.frames_of_script(list(lines))])

    walk = traceback.walk_stack
    traceback.__dict__["walk_stack"] = walk_stack


def _hide_frames_of_task(base_tasks: ModuleType) -> None:
    """The same for `asyncio.Task.print_stack`. A task that has failed has a traceback, which is trimmed already."""

    def _task_get_stack(task: Any, limit: int | None) -> list[FrameType]:
        if task.done():
            return found(task, limit)  # type: ignore[no-any-return]
        return tracebacks.frames_of_script(found(task, None)[::-1])[:limit][::-1]

    found = base_tasks._task_get_stack
    base_tasks.__dict__["_task_get_stack"] = _task_get_stack


def _hide_outer_frames(inspect: ModuleType) -> None:
    """The same for `inspect.stack`."""

    def getouterframes(frame: FrameType, context: int = 1) -> list[Any]:
        """Return what is known of a frame and of those that called it."""
        found = {each.frame: each for each in outer(frame, context)}
        return [found[each] for each in tracebacks.frames_of_script(list(found))]

    outer = inspect.getouterframes
    inspect.__dict__["getouterframes"] = getouterframes


def _do_without_tracker(resource_tracker: ModuleType) -> None:
    """The tracker is a program that removes what a process left behind. A sandbox is removed as a whole."""
    tracker = resource_tracker.ResourceTracker
    tracker.ensure_running = tracker._send = lambda self, *_: None
    resource_tracker.__dict__["getfd"] = refuse  # whoever asks for its pipe is about to start a program


def _explain_managers(managers: ModuleType) -> None:
    def start(*_args: Any, **_options: Any) -> NoReturn:
        raise PermissionError(errno.EPERM, NO_MANAGER)

    managers.BaseManager.start = start


def _do_without_semaphores(pool: ModuleType) -> None:
    """A pool of threads makes a queue for processes, whose locks need semaphores. Locks of threads do for it."""
    import threading
    from multiprocessing.queues import SimpleQueue

    class Context:
        Lock = staticmethod(threading.Lock)

        def SimpleQueue(self) -> Any:
            return SimpleQueue(ctx=self)

    def begin(self: Any, processes: int | None = None, initializer: Any = None, initargs: Any = ()) -> None:
        pool.Pool.__init__(self, processes, initializer, initargs, context=Context())

    pool.ThreadPool.__init__ = begin


def _allow_threads(helpers: ModuleType) -> None:
    """Joblib starts no thread where there are no semaphores, although its threads need none."""
    if helpers.mp is None and os.environ.get("JOBLIB_MULTIPROCESSING", "1") != "0":
        import multiprocessing
        from multiprocessing.context import assert_spawning

        helpers.__dict__.update(mp=multiprocessing, assert_spawning=assert_spawning, has_no_semaphores=True)


def _use_threads(parallel: ModuleType) -> None:
    """Joblib's default starts programs. Its threads work, and call tools."""
    parallel.register_parallel_backend("loky", parallel.ThreadingBackend, make_default=True)
    if hasattr(sys.modules["joblib._multiprocessing_helpers"], "has_no_semaphores"):
        parallel.register_parallel_backend("multiprocessing", parallel.ThreadingBackend)


def _show_charts(renderers: ModuleType) -> None:
    """`show()` of plotly opens a browser."""

    class Displayed(renderers.ExternalRenderer):  # type: ignore[misc, name-defined]
        def render(self, figure: Any) -> None:
            from plotly.graph_objects import Figure  # type: ignore[import-not-found, import-untyped, unused-ignore]

            _display(Figure(figure, skip_invalid=True))

    renderers.renderers["display"] = Displayed()
    renderers.renderers.default = "display"


def _show_images(viewers: ModuleType) -> None:
    """`show()` of Pillow's images starts a program."""

    class Displayed(viewers.Viewer):  # type: ignore[misc, name-defined]
        def show(self, image: Any, **_options: Any) -> int:
            _display(image)
            return 1

    viewers.register(Displayed, 0)


def _display(value: object) -> None:
    builtins.__dict__["display"](value)


def _draw_without_window(pyplot: ModuleType) -> None:
    """Figures for a window are drawn without one."""
    switch = pyplot.switch_backend

    def switch_backend(newbackend: Any) -> None:
        try:
            switch(newbackend)
        except ImportError:
            if str(newbackend).startswith("module://"):
                raise
            switch(os.environ.get("MPLBACKEND", "agg"))

    pyplot.__dict__["switch_backend"] = switch_backend


def _know_processors(context: ModuleType) -> None:
    """Loky runs `lscpu` to count physical cores, and reads files of cgroups."""
    context.__dict__["physical_cores_cache"] = os.cpu_count() or 1
    context.__dict__["_cpu_count_cgroup"] = lambda count: count


def _skip_refused_files(mimetypes: ModuleType) -> None:
    """The machine's lists of types may be there and refused, as in the profile `container`. Python's own list stays."""
    read = mimetypes.MimeTypes.read

    def read_if_allowed(self: Any, filename: Any, strict: bool = True) -> None:
        try:
            read(self, filename, strict)
        except PermissionError:
            if filename not in mimetypes.knownfiles:
                raise

    mimetypes.MimeTypes.read = read_if_allowed


def _find_libraries_without_maps(controllers: ModuleType) -> None:
    """Threadpoolctl reads /proc/self/maps where that is there, although it may be refused."""
    if "_HAS_PROCFS" in vars(controllers):
        controllers.__dict__["_HAS_PROCFS"] = False


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "asyncio.base_tasks": _hide_frames_of_task,
    "inspect": _hide_outer_frames,
    "joblib._multiprocessing_helpers": _allow_threads,
    "joblib.externals.loky.backend.context": _know_processors,
    "joblib.externals.loky.backend.resource_tracker": _do_without_tracker,
    "joblib.parallel": _use_threads,
    "linecache": _begin_linecache,
    "matplotlib.pyplot": _draw_without_window,
    "PIL.ImageShow": _show_images,
    "traceback": _hide_frames,
    "warnings": _hide_our_code,
    "mimetypes": _skip_refused_files,
    "plotly.io._renderers": _show_charts,
    "threadpoolctl": _find_libraries_without_maps,
    "multiprocessing.resource_tracker": _do_without_tracker,
    "multiprocessing.pool": _do_without_semaphores,
    "multiprocessing.managers": _explain_managers,
}
"""What is done to a module after its import."""


class AfterImport:
    """Finds the modules of `CHANGES` as the import system would, and changes each when it was executed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a module that is to be changed; None for all others."""
        if name not in CHANGES:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute, change = spec.loader.exec_module, CHANGES[name]

            def exec_module(module: ModuleType) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
