"""Load the tools of a Python file or module: its registry, its tool objects, or its public functions."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from toolcell.errors import UsageError
from toolcell.tools.adapters import AgentTool, FunctionTool
from toolcell.tools.registry import ToolRegistry


def load_tools(source: str) -> ToolRegistry:
    """Return the registry of a file or a module, written as `FILE`, `MODULE` or either with `:NAME`.

    Raises:
        UsageError: it cannot be loaded or offers no tool.
        RegistrationError: a tool's definition is wrong.
    """
    target, attribute = _split(source)
    module = _load(target)
    if attribute:
        value = getattr(module, attribute, None)
        if not isinstance(value, ToolRegistry):
            found = "missing" if value is None else f"a {type(value).__name__}, not a ToolRegistry"
            raise UsageError(f"--tools {source}: {attribute} is {found}; --tools {target} takes all that is there")
        return value
    registries = {name: value for name, value in vars(module).items() if isinstance(value, ToolRegistry)}
    distinct = {id(value): value for value in registries.values()}
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    if distinct:
        raise UsageError(f"--tools {source}: it has several registries; name one as {target}:{next(iter(registries))}")
    return _registry_from(module, source)


def _split(source: str) -> tuple[str, str]:
    target, _, attribute = source.rpartition(":")
    return (target, attribute) if target and attribute.isidentifier() else (source, "")


def _load(target: str) -> ModuleType:
    """Import a file or a module. As with `python`, its folder or the current one is on the import path."""
    path = Path(target)
    is_file = target.endswith(".py") or path.is_file()
    folder = str(path.resolve().parent) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _load_file(path) if is_file else importlib.import_module(target)
    except UsageError:
        raise
    except FileNotFoundError as exc:
        raise UsageError(f"--tools {target}: no such file") from exc
    except ModuleNotFoundError as exc:
        raise UsageError(f"--tools {target}: {exc}") from exc
    except Exception as exc:  # the file's own code may raise anything
        raise UsageError(
            f"--tools {target}: loading it raised {type(exc).__name__}: {exc}{_line_in(exc, path)}"
        ) from exc


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--tools {path}: a Python file is wanted")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle find a module by its name
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
    """Make a registry of a module's tool objects, or of its public functions if it has no tool objects."""
    made = [value for name, value in vars(module).items() if not name.startswith("_") and _is_tool(value)]
    registry = ToolRegistry()
    for tool in made or _public_functions(module):
        registry.add(tool)
    if not registry.definitions():
        raise UsageError(f"--tools {source}: it has no ToolRegistry, no tool and no public function")
    return registry


def _is_tool(value: object) -> bool:
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
        return False
    return isinstance(value, FunctionTool | AgentTool) or (
        callable(getattr(value, "execute", None)) and hasattr(value, "definitions")
    )


def _public_functions(module: ModuleType) -> list[Any]:
    """Return the functions that the module defines; if it has `__all__`, only those listed there."""
    wanted = getattr(module, "__all__", None)
    return [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and (name in wanted if wanted is not None else not name.startswith("_"))
    ]
