"""What a command is given by name: a script, inputs, files, a registry of tools."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import keyword
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from toolcell.cli.output import safe, stderr
from toolcell.errors import UsageError
from toolcell.text import one_line

if TYPE_CHECKING:
    from toolcell.tools import ToolRegistry

MAX_WARNING_CHARS = 500
"""Of what is wrong with a tool's description, which may quote it."""


def read_script(name: str) -> str:
    """Return the text of a file, or of stdin for `-`.

    Raises:
        UsageError: it cannot be read or is not UTF-8.
    """
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as exc:
        raise UsageError(f"cannot read the script {name}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"the script {name} is not UTF-8: byte {exc.object[exc.start]:#04x} at {exc.start}") from exc


def parse_inputs(given: Iterable[str]) -> dict[str, Any]:
    """Read `name=json` pairs.

    Raises:
        UsageError: a name is no identifier, or a value is no JSON.
    """
    inputs: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(f"--input {text!r}: want name=json, with a name a script can use")
        try:
            inputs[name] = json.loads(value)
        except ValueError as exc:
            raise UsageError(
                f"--input {name}: {value!r} is no JSON ({exc}); text wants quotes: {name}='\"...\"'"
            ) from exc
    return inputs


def read_files(given: Iterable[str]) -> list[tuple[str, bytes]]:
    """Read `PATH` or `NAME=PATH` into (name in the workspace, content).

    Raises:
        UsageError: a file cannot be read.
    """
    return [_read_file(text) for text in given]


def _read_file(text: str) -> tuple[str, bytes]:
    name, equals, path = text.partition("=")
    if not equals or os.path.exists(text):
        name, path = os.path.basename(text), text
    try:
        return name, Path(path).read_bytes()
    except OSError as exc:
        raise UsageError(f"--file {text}: {exc.strerror}") from exc


def load_registry(sources: Sequence[str]) -> ToolRegistry:
    """Collect the tools of files and modules into one registry.

    Raises:
        UsageError: a source cannot be loaded or offers no tool.
        RegistrationError: a tool's definition is wrong.
    """
    loaded = []
    for source in sources:
        with _plain_warnings(source):
            loaded.append(_registry_of(source))
    first, *others = loaded
    return first.merged(*others) if others else first


@contextmanager
def _plain_warnings(source: str) -> Iterator[None]:
    """Say what is wrong with a tool's description in a line that names its file; other warnings come as ever."""
    from toolcell.tools import ToolDescriptionWarning

    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        for each in caught:
            if issubclass(each.category, ToolDescriptionWarning):
                stderr().print(safe(one_line(f"warning: {source}: {each.message}", MAX_WARNING_CHARS), "yellow"))
            else:
                warnings.showwarning(each.message, each.category, each.filename, each.lineno, line=each.line)


def _registry_of(source: str) -> ToolRegistry:
    from toolcell.tools import ToolRegistry

    place, attribute = _split(source)
    module = _load(place)
    if attribute:
        value = getattr(module, attribute, None)
        if not isinstance(value, ToolRegistry):
            raise UsageError(f"--tools {source}: {attribute} is {_kind(value)}, not a ToolRegistry")
        return value
    registries = {name: value for name, value in vars(module).items() if isinstance(value, ToolRegistry)}
    distinct = {id(value): value for value in registries.values()}
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    if distinct:
        raise UsageError(f"--tools {source}: it has several registries; name one as {place}:{next(iter(registries))}")
    return _registry_from(module, source)


def _split(source: str) -> tuple[str, str]:
    place, _, attribute = source.rpartition(":")
    return (place, attribute) if place and attribute.isidentifier() else (source, "")


def _kind(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def _load(place: str) -> ModuleType:
    """Import a file or a module, with its folder (or the current one) on the path as `python` would have it."""
    path = Path(place)
    is_file = place.endswith(".py") or path.is_file()
    folder = str(path.resolve().parent) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _load_file(path) if is_file else importlib.import_module(place)
    except UsageError:
        raise
    except FileNotFoundError as exc:
        raise UsageError(f"--tools {place}: no such file") from exc
    except ModuleNotFoundError as exc:
        raise UsageError(f"--tools {place}: {exc}") from exc
    except Exception as exc:  # the file's own code may raise anything
        raise UsageError(
            f"--tools {place}: loading it raised {type(exc).__name__}: {exc}{_line_in(exc, path)}"
        ) from exc


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--tools {path}: a Python file is wanted")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module


def _line_in(exc: BaseException, path: Path) -> str:
    """The last line of `path` that led to `exc`, as a suffix for a message."""
    trace, line = exc.__traceback__, None
    while trace is not None:
        if os.path.basename(trace.tb_frame.f_code.co_filename) == path.name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""


def _registry_from(module: ModuleType, source: str) -> ToolRegistry:
    """Make a registry of a module's tools: those made as such if there are any, else its own public functions."""
    from toolcell.tools import ToolRegistry

    made = [value for name, value in vars(module).items() if not name.startswith("_") and _is_tool(value)]
    registry = ToolRegistry()
    for tool in made or _public_functions(module):
        registry.add(tool)
    if not registry.definitions():
        raise UsageError(f"--tools {source}: it has no ToolRegistry, no tool and no public function")
    return registry


def _is_tool(value: object) -> bool:
    from toolcell.tools.adapters import AgentTool, FunctionTool

    if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
        return False
    return isinstance(value, FunctionTool | AgentTool) or (
        callable(getattr(value, "execute", None)) and hasattr(value, "definitions")
    )


def _public_functions(module: ModuleType) -> list[Any]:
    """Functions defined here, not imported; `__all__` narrows them down where there is one."""
    wanted = getattr(module, "__all__", None)
    return [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and (name in wanted if wanted is not None else not name.startswith("_"))
    ]
