"""Load the tools of a Python file or module: its registry, its tool objects, or its public functions."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from toolcell.errors import RegistrationError, UsageError
from toolcell.tools.adapters import AgentTool, FunctionTool
from toolcell.tools.registry import ToolRegistry


def load_tools(source: str) -> ToolRegistry:
    """Return the registry of a file or a module, written as `FILE`, `MODULE` or either with `:NAME`.

    Raises:
        UsageError: it cannot be loaded or offers no tool.
        RegistrationError: a tool's definition is wrong.
    """
    target, _, attribute = source.rpartition(":")
    if not (target and attribute.isidentifier()):
        target, attribute = source, ""
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


def _load(target: str) -> ModuleType:
    """Import a file or a module. As with `python`, its folder or the current one is on the import path."""
    path = Path(target)
    is_file = target.endswith(".py") or path.is_file()
    folder = str(path.resolve().parent) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if is_file and not path.exists():
        raise UsageError(f"--tools {target}: no such file")
    try:
        return _load_file(path) if is_file else importlib.import_module(target)
    except (RegistrationError, UsageError) as exc:
        kind = RegistrationError if isinstance(exc, RegistrationError) else UsageError
        raise kind(f"--tools {target}: {exc}{_line_in(exc)}") from exc
    except ModuleNotFoundError as exc:
        is_own = not is_file and exc.name is not None and f"{target}.".startswith(f"{exc.name}.")
        cure = f"{_line_in(exc)}; install it for {sys.executable}, which loads the tools"
        raise UsageError(f"--tools {target}: {exc}{'; a file is named with .py' if is_own else cure}") from exc
    except SystemExit as exc:
        cure = 'what only a program does belongs under if __name__ == "__main__"'
        raise UsageError(
            f"--tools {target}: loading it ended with sys.exit({exc.code}){_line_in(exc)}; {cure}"
        ) from exc
    except Exception as exc:  # the file's own code may raise anything
        cure = "; check the name, and which version is installed" if isinstance(exc, ImportError) else ""
        said = f"loading it raised {type(exc).__name__}: {exc}{_line_in(exc)}"
        raise UsageError(f"--tools {target}: {said}{cure}") from exc


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--tools {path}: a Python file is wanted")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle find a module by its name
    spec.loader.exec_module(module)
    return module


def _line_in(exc: BaseException) -> str:
    """The last line of somebody's own file that led to `exc`, as a suffix for a message: not one of a library."""
    if isinstance(exc, SyntaxError):
        return ""  # its text has both
    files = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(exc.__traceback__)]
    others = [each for each in files if not each[0].startswith(("<", _OWN))]
    own = [each for each in others if not each[0].startswith(_LIBRARIES)] or others
    return f" ({os.path.basename(own[-1][0])}, line {own[-1][1]})" if own else ""


_OWN = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")})


def _registry_from(module: ModuleType, source: str) -> ToolRegistry:
    """Make a registry of a module's tool objects, or of its public functions if it has no tool objects."""
    made = [value for name, value in vars(module).items() if not name.startswith("_") and _is_tool(value)]
    registry = ToolRegistry()
    for tool in made or _public_functions(module):
        try:
            registry.add(tool)
        except RegistrationError as exc:
            code = getattr(tool, "__code__", None)
            where = f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})" if code is not None else ""
            cure = "" if made else "; begin the name of a function that is not a tool with _"
            raise RegistrationError(f"--tools {source}: {exc}{where}{cure}") from exc
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
