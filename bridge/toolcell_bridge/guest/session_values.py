"""Write the state of a session as bytes, by value, and bring it back in another sandbox.

The bytes are read by a sandbox of the same session and by nobody else. Names, files and what scripts have set in a few
modules are kept. What cannot be pickled is named, and why.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import random
import stat
import sys
import time
import typing
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, resolve_bases
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from toolcell_bridge.guest import determinism, surroundings
from toolcell_bridge.guest.output import LogStream
from toolcell_bridge.guest.scripts import SCRIPTS
from toolcell_bridge.guest.tools import Toolbox, ToolFunction, ToolNamespace

HEADER_BYTES: Final = 8
"""Length of the first pickle, in front of it."""

WHY_CHARS: Final = 200

VERSION: Final = tuple(sys.version_info[:2])
"""Code is kept as bytecode, which another version cannot run."""

IDLE_FOLDERS: Final = frozenset({"__pycache__", ".cache"})
"""Folders that libraries fill again by themselves."""

FILTERS: Final = "warnings.filters"
"""Stands among the names: what is filtered may be a class of the script or of a module in the workspace."""

Parts = list["bytes | memoryview"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the state of a session is: its namespace, and what the sandbox itself has put there."""

    namespace: dict[str, Any]
    own: dict[str, Any]
    """Names that every script finds."""
    inputs: list[str]
    """Names of the input files so far."""
    workspace: str
    environ: dict[str, str]
    """As the session found it."""
    path: list[str]
    """`sys.path` as the session found it."""
    cloudpickle: bytes
    """Source of the module that pickles code. Used where there is no package of this name."""


_place: Place
"""Place of the state that is brought back just now. What a pickle names is looked up there."""
_roots: list[str]
"""Its roots."""


# Keeping


def keep(place: Place, room: int) -> tuple[dict[str, str], Parts]:
    """Return the names that cannot be kept, each with why, and the bytes of all others in parts, in order.

    `room`: bytes of memory for what is not the content of an array.

    Raises:
        Exception: nothing can be kept.
    """
    roots = _roots_of(place)
    entries: list[Any] = sys.path  # of any type: the import system skips what is not text
    names = {
        name: value
        for name, value in place.namespace.items()
        if name not in ("__builtins__", "__loader__", "__spec__", "__name__")
        and not (name in place.own and value is place.own[name])
    } | {FILTERS: warnings.filters}
    process_state = {
        "inputs": place.inputs,
        "files": list(_files(roots)),
        "environ": {
            name: value and [_placed(each, roots) for each in value.split(os.pathsep)]
            for name, value in _changed(dict(os.environ), place.environ).items()
        },
        "path": [_placed(each, roots) for each in entries if isinstance(each, str) and each not in place.path],
        "cwd": _placed(_current_folder(place.workspace), roots),
        "texts": dict(SCRIPTS.texts),
        "random": random.getstate(),
        "determinism": determinism.state(),
        "libraries": {name: get(sys.modules[name]) for name, (get, _) in LIBRARIES.items() if name in sys.modules},
    }
    pickler = _pickler_class(place, roots)
    before, lost = _parts(pickler, process_state, room), dict[str, str]()
    while True:
        try:
            return lost, [*before, *_parts(pickler, names, room)]
        except MemoryError:
            raise
        except Exception:
            bad = {name: why for name, value in names.items() if (why := _why_not(pickler, value, room))}
            if not bad:
                raise
            lost |= bad
            names = {name: value for name, value in names.items() if name not in bad}


def _why_not(pickler: Any, value: object, room: int) -> str:
    try:
        _parts(pickler, value, room)
    except MemoryError:
        raise
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"[:WHY_CHARS]
    return ""


def _parts(pickler: Any, value: object, room: int) -> Parts:
    """Pickle something. Contents of arrays are not copied."""
    found: list[pickle.PickleBuffer] = []
    file = _Bounded(room)
    pickler(file, protocol=5, buffer_callback=found.append).dump(value)
    views = [each.raw() for each in found]
    head = pickle.dumps((VERSION, file.getbuffer().nbytes, [(view.nbytes, view.readonly) for view in views]))
    return [len(head).to_bytes(HEADER_BYTES, "big"), head, file.getbuffer(), *views]


class _Bounded(io.BytesIO):
    """Takes so many bytes. With more, the kernel would end the sandbox, and the state that is to be kept with it."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self._room:
            raise MemoryError(f"pickled it takes more than the {self._room} bytes of memory that are left for it")
        return super().write(data)


def _changed(now: dict[str, str], before: dict[str, str]) -> dict[str, str | None]:
    gone: dict[str, str | None] = dict.fromkeys(before.keys() - now.keys())
    return gone | {name: value for name, value in now.items() if before.get(name) != value}


def _roots_of(place: Place) -> list[str]:
    """Return the folders with the files of scripts: the workspace, and that for temporary files. Other sandboxes may
    have them elsewhere."""
    found = os.path.realpath(place.workspace), os.path.realpath(place.environ.get("TMPDIR", "/tmp"))
    return [each for each in found if each == found[0] or not _is_below(found[0], each)]


def _current_folder(workspace: str) -> str:
    """Return the working directory; the workspace where the script has removed it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return workspace


def _is_below(path: str, folder: str) -> bool:
    return (path + "/").startswith(folder + "/")


def _placed(path: str, roots: list[str]) -> tuple[int, str]:
    """Return a path as the number of a root, and where it is below that; (-1, path) when it is below none."""
    for number, root in enumerate(roots):
        if _is_below(path, root):
            return number, os.path.relpath(path, root)
    return -1, path


def _path(placed: tuple[int, str], roots: list[str]) -> str:
    number, name = placed
    return name if number < 0 else os.path.normpath(os.path.join(roots[number], name))


def _files(roots: list[str]) -> Iterator[tuple[tuple[int, str], int, tuple[int, str] | pickle.PickleBuffer | None]]:
    """Yield everything below these folders: its place, its mode, and what it is: the place of a link's target, the
    content of a file, None for a folder."""
    opened = []
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = [each for each in folders if each not in IDLE_FOLDERS]
            for name in [*folders, *names]:
                path = os.path.join(folder, name)
                status = os.lstat(path)
                if status.st_uid != os.getuid():
                    continue
                mode, placed = stat.S_IMODE(status.st_mode), _placed(path, roots)
                if stat.S_ISLNK(status.st_mode):
                    yield placed, mode, _placed(os.readlink(path), roots)
                elif stat.S_ISDIR(status.st_mode):
                    if mode & stat.S_IRWXU != stat.S_IRWXU:
                        os.chmod(path, stat.S_IRWXU)  # the walk goes on in it
                        opened.append((path, mode))
                    yield placed, mode, None
                elif stat.S_ISREG(status.st_mode):
                    if not mode & stat.S_IRUSR:
                        os.chmod(path, mode | stat.S_IRUSR)
                    with open(path, "rb") as file:
                        yield placed, mode, pickle.PickleBuffer(file.read())
                    if not mode & stat.S_IRUSR:
                        os.chmod(path, mode)
    for path, mode in reversed(opened):
        os.chmod(path, mode)


def _gone_modules(roots: list[str]) -> set[str]:
    """Return the modules that another sandbox could not import: their file was removed, or there never was one."""
    found = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if type(module) is not ModuleType or name == MAIN or name.partition(".")[0] == "cloudpickle":
            continue
        if file is None:
            if module.__spec__ is None:
                found.add(name)
        elif any(_is_below(str(file), root) for root in roots) and not os.path.exists(file):
            found.add(name)
    return found


def _pickler_class(place: Place, roots: list[str]) -> Any:
    cloudpickle, gone = _cloudpickle(place.cloudpickle), _gone_modules(roots)
    pathlib: Any = sys.modules.get("pathlib")
    path_types = (pathlib.PosixPath, pathlib.PurePosixPath) if pathlib is not None else ()
    own = {id(value): name for name, value in place.own.items() if isinstance(value, type | FunctionType | MethodType)}
    streams = {id(getattr(sys, name)): name for name in ("stdout", "stderr", "stdin", "__stdout__", "__stderr__")}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        """Keeps functions of scripts with the names that they share, and what the sandbox itself provides by name."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._cells: dict[int, CellType] = {}
            """Cells of functions that were kept, by id."""

        def reducer_override(self, value: Any) -> Any:
            kind: Any = type(value)
            if gone and (kind is ModuleType or isinstance(value, type | FunctionType)):
                home = value.__name__ if kind is ModuleType else value.__module__
                if home in gone:
                    raise TypeError(f"of module {home}, which cannot be imported any more")
            if id(value) in streams:
                return getattr, (sys, streams[id(value)])
            if name := own.get(id(value)):
                return _own, (name,)
            if kind is FunctionType:
                if value.__module__ == "toolcell_bridge.guest.runner" and value.__name__ in place.own:
                    return _own, (value.__name__,)  # of an earlier script
                if value.__globals__ is place.namespace:
                    return self._function(value)
            elif kind is CodeType:  # cloudpickle drops the name of its file, by which its source is found
                make, arguments, *_ = self.dispatch_table[CodeType](value)
                return _code, (make, arguments, value.co_filename)
            elif kind is CellType and id(value) in self._cells:
                return CellType, ()
            elif kind is MethodType and type(value.__self__) is Toolbox:
                return _own, (value.__name__,)
            elif kind is ToolNamespace:
                return _tools, (value._ToolNamespace__prefix,)
            elif kind is ToolFunction:
                return _tool, (value._tool,)
            elif kind in path_types and (placed := _placed(str(value), roots))[0] >= 0:
                return _placed_path, (kind, placed)
            elif issubclass(kind, LogStream):
                return getattr, (sys, "stdout")
            elif issubclass(kind, io.IOBase) and not issubclass(kind, io.BytesIO | io.StringIO):
                raise TypeError("an open file")
            elif kind is memoryview:
                if not value.readonly or value.format != "B" or value.ndim != 1:
                    raise TypeError("a view of the memory of another object")
                return memoryview, (value.tobytes(),)
            elif kind is functools._lru_cache_wrapper and not _has_home(value):
                return _cached, (value.__wrapped__, value.cache_parameters())
            elif kind is functools.cached_property:
                return _cached_property, (value.func, value.attrname)
            elif kind is typing.NewType and not _has_home(value):
                return kind, (value.__name__, value.__supertype__)
            elif kind in TYPE_PARAMETERS and not _has_home(value):
                return kind, (value.__name__,)
            elif kind is TYPE_ALIAS and not _has_home(value):
                return _alias, (value.__name__, value.__value__, value.__type_params__)
            elif kind in (WeakKeyDictionary, WeakValueDictionary):
                return kind, (), None, None, iter(list(value.items()))
            elif issubclass(kind, BaseException) and kind.__reduce__ is BaseException.__reduce__:
                state = dict(vars(value)), value.__cause__, value.__context__, value.__suppress_context__
                return _exception, (kind, value.args), state, None, None, _set_exception
            elif kind.__module__ == MAIN and kind.__reduce__ is not object.__reduce__:
                reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
                # A name of the script is found by nobody who does not have the script's names yet.
                return (object.__new__, (kind,), vars(value)) if isinstance(reduced, str) else reduced
            elif self._is_named(value):
                raise TypeError("of its own it is only a name of the script")
            if isinstance(value, type) and value.__module__ not in (MAIN, *sys.modules):
                with suppress(Exception):  # what is not there is kept as the class itself
                    # Of a class that was made elsewhere, as numpy's `recarray` was: cloudpickle only looks there.
                    importlib.import_module(value.__module__)
            reduced = super().reducer_override(value)
            if isinstance(reduced, tuple) and reduced[0] is cloudpickle._make_skeleton_class:
                return _class, reduced[:2], *reduced[2:]
            return reduced

        def _is_named(self, value: Any) -> bool:
            """Whether it would be looked up in the script, which has no names yet. Classes and functions are not."""
            if getattr(value, "__module__", None) != MAIN or isinstance(value, type | FunctionType):
                return False
            kind: Any = type(value)
            is_own = kind.__module__ == MAIN or kind in self.dispatch_table
            return not is_own and isinstance(value.__reduce_ex__(pickle.HIGHEST_PROTOCOL), str)

        def _function(self, value: FunctionType) -> Any:
            cells = value.__closure__ or ()
            self._cells.update((id(each), each) for each in cells)
            fields = {name: getattr(value, name) for name in FUNCTION_FIELDS if hasattr(value, name)}
            state = fields, dict(vars(value)), cells, [_content(each) for each in cells]
            return _function, (value.__code__, value.__name__, cells), state, None, None, _set_function

    return Pickler


def _cloudpickle(source: bytes) -> Any:
    try:
        return importlib.import_module("cloudpickle.cloudpickle")
    except ImportError:
        name = "cloudpickle.cloudpickle"
        package, module = ModuleType("cloudpickle"), ModuleType(name)
        package.__path__ = []
        package.__dict__["cloudpickle"] = module
        sys.modules["cloudpickle"], sys.modules[name] = package, module
        exec(compile(source, name, "exec"), module.__dict__)
        return module


# What pickles name

FUNCTION_FIELDS: Final = (
    "__annotations__",
    "__defaults__",
    "__doc__",
    "__kwdefaults__",
    "__module__",
    "__qualname__",
    "__type_params__",
)


MAIN: Final = "__main__"

TYPE_PARAMETERS: Final = typing.ParamSpec, typing.TypeVarTuple
TYPE_ALIAS: Final[Any] = getattr(typing, "TypeAliasType", None)  # from Python 3.12


def _has_home(value: Any) -> bool:
    """Whether a module that is not the script has this under its name."""
    found = sys.modules.get(value.__module__) if value.__module__ not in (None, MAIN) else None
    for name in getattr(value, "__qualname__", value.__name__).split("."):
        found = getattr(found, name, None)
    return found is value


def _class(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Make a class that is filled later. What the script has written for the making of its classes has run already."""
    metaclass, _, bases, *_ = arguments
    hooks = [(kind, name) for kind in metaclass.__mro__ for name in ("__prepare__", "__new__", "__init__")]
    hooks += [(kind, "__init_subclass__") for base in resolve_bases(bases) for kind in base.__mro__]
    ran = [(kind, name, vars(kind)[name]) for kind, name in hooks if kind.__module__ == MAIN and name in vars(kind)]
    for kind, name, _ in ran:
        if name in vars(kind):  # two bases may share it
            type.__delattr__(kind, name)
    try:
        return make(*arguments)
    finally:
        for kind, name, hook in ran:
            type.__setattr__(kind, name, hook)


def _alias(name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    return TYPE_ALIAS(name, value, type_params=parameters)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Callable[[Any], Any], name: str | None) -> Any:
    found = functools.cached_property(function)
    if name is not None:
        found.__set_name__(object, name)
    return found


def _own(name: str) -> Any:
    return _place.own[name]


def _tools(prefix: str) -> Any:
    found = _place.own["tools"]
    for name in prefix.split(".")[:-1]:
        found = found[name]
    return found


def _tool(name: str) -> Any:
    return _place.own["tools"][name]


def _placed_path(kind: Any, placed: tuple[int, str]) -> Any:
    return kind(_path(placed, _roots))


def _content(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty
        return ()


def _code(make: Callable[..., CodeType], arguments: tuple[Any, ...], filename: str) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


def _function(code: CodeType, name: str, cells: tuple[CellType, ...]) -> FunctionType:
    return FunctionType(code, _place.namespace, name, None, cells or None)


def _set_function(function: FunctionType, state: tuple[Any, ...]) -> None:
    fields, attributes, cells, contents = state
    for name, value in fields.items():
        setattr(function, name, value)
    vars(function).update(attributes)
    for cell, content in zip(cells, contents, strict=True):
        if content:
            (cell.cell_contents,) = content


def _exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    made: BaseException = kind.__new__(kind, *args)
    made.args = args
    return made


def _set_exception(value: BaseException, state: Any) -> None:
    attributes, value.__cause__, value.__context__, value.__suppress_context__ = state
    vars(value).update(attributes)


# Bringing back


def bring_back(place: Place, parts: list[bytes]) -> None:
    """Bring a state back into a sandbox that has run nothing. `parts`: its bytes, in any pieces; they are used up.

    Raises:
        Exception: it cannot be brought back.
    """
    global _place, _roots
    _place, _roots = place, _roots_of(place)
    reader = _Reader(parts)
    state = _value(reader, place)
    _bring_back_files(state["files"], _roots)
    place.inputs.extend(state["inputs"])
    os.chdir(_path(state["cwd"], _roots))
    for name, value in state["environ"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = os.pathsep.join(_path(each, _roots) for each in value)
    time.tzset()  # TZ may be another one
    sys.path += [path for each in state["path"] if (path := _path(each, _roots)) not in sys.path]
    SCRIPTS.texts.update(state["texts"])
    surroundings.show_earlier_sources()
    place.namespace.update(_value(reader, place))  # imports modules of the workspace
    for name, settings in state["libraries"].items():
        if (module := sys.modules.get(name)) is not None:  # else no name has loaded it
            LIBRARIES[name][1](module, settings)
    if (filters := place.namespace.pop(FILTERS, None)) is not None:  # now, as settings may warn
        warnings.resetwarnings()
        typing.cast("list[Any]", warnings.filters).extend(filters)
    random.setstate(state["random"])
    determinism.set_state(state["determinism"])


class _Reader:
    """Takes bytes from pieces, which it uses up."""

    def __init__(self, pieces: list[bytes]) -> None:
        pieces.reverse()
        self._pieces, self._at = pieces, 0

    def take(self, size: int) -> bytearray:
        """Return the next bytes. Raises EOFError when there are fewer."""
        found, at = bytearray(size), 0
        while at < size:
            if not self._pieces:
                raise EOFError(f"{size - at} bytes are missing")
            piece = self._pieces[-1]
            part = memoryview(piece)[self._at : self._at + size - at]
            found[at : at + len(part)] = part
            at, self._at = at + len(part), self._at + len(part)
            if self._at == len(piece):
                self._at = 0
                self._pieces.pop()
        return found


def _value(reader: _Reader, place: Place) -> Any:
    version, size, buffers = pickle.loads(reader.take(int.from_bytes(reader.take(HEADER_BYTES), "big")))
    if version != VERSION:
        raise RuntimeError(f"it was kept by Python {version[0]}.{version[1]}, and this is {VERSION[0]}.{VERSION[1]}")
    _cloudpickle(place.cloudpickle)
    stream = reader.take(size)
    views = [(memoryview(reader.take(length)), is_fixed) for length, is_fixed in buffers]
    return pickle.loads(stream, buffers=[view.toreadonly() if is_fixed else view for view, is_fixed in views])


def _bring_back_files(files: list[Any], roots: list[str]) -> None:
    folders = []
    for placed, mode, content in files:
        path = _path(placed, roots)
        if content is None:
            os.makedirs(path, exist_ok=True)
            folders.append((path, mode))
        elif isinstance(content, tuple):
            os.symlink(_path(content, roots), path)
        else:
            with open(path, "wb") as file:
                file.write(content)
            os.chmod(path, mode)
    for path, mode in reversed(folders):  # only now: one may be read only
        os.chmod(path, mode)


# What scripts set in modules


def _numpy_settings(numpy: Any) -> Any:
    return numpy.random.get_state(), numpy.get_printoptions()


def _set_numpy(numpy: Any, settings: Any) -> None:
    numpy.random.set_state(settings[0])
    numpy.set_printoptions(**settings[1])


def _set_matplotlib(matplotlib: Any, settings: dict[str, Any]) -> None:
    here = matplotlib.rcParams
    here.update({name: value for name, value in settings.items() if here.get(name) != value})


def _pandas_settings(pandas: Any) -> dict[str, Any]:
    return dict(_options(pandas.options))


def _options(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in dir(options):
        value = getattr(options, name)
        if type(value) is type(options):
            yield from _options(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _set_pandas(pandas: Any, settings: dict[str, Any]) -> None:
    here = _pandas_settings(pandas)
    for name, value in settings.items():
        if name in here and here[name] != value:
            pandas.set_option(name, value)


LIBRARIES: Final[dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]]] = {
    "numpy": (_numpy_settings, _set_numpy),
    "matplotlib": (lambda matplotlib: dict(matplotlib.rcParams), _set_matplotlib),
    "pandas": (_pandas_settings, _set_pandas),
    "decimal": (lambda decimal: decimal.getcontext(), lambda decimal, context: decimal.setcontext(context)),
    "sys": (lambda sys: sys.getrecursionlimit(), lambda sys, most: sys.setrecursionlimit(most)),
}
"""Module to what returns its settings, and what sets them again."""
