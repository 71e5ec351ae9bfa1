"""Public names that a package imports when they are first used, and modules that an extra brings."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from toolcell.errors import MissingPackage


class _Absent(type):
    """Class of what stands for a name whose package is not installed: it is there, and nothing can be done with it."""

    missing: MissingPackage

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingPackage(str(cls.missing)) from cls.missing

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingPackage(str(cls.missing)) from cls.missing


def _absent(name: str, missing: MissingPackage) -> Any:
    """Return what stands for a name whose package is not installed."""
    return _Absent(name, (), {"missing": missing, "__doc__": str(missing)})


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `package`, whose `__all__` lists its public names.

    `homes` maps a module to the names that come from it, with spaces between them. A name of `__all__` that stands
    nowhere in `homes` is a module of the package. Only the module of a name is imported for it.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def get_name(name: str) -> Any:
        namespace = vars(sys.modules[package])
        if name not in namespace["__all__"]:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = home_of.get(name)
        if home is None:
            return importlib.import_module(f"{package}.{name}")
        try:
            value = getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as exc:
            if (exc.name or "").partition(".")[0] == "toolcell":
                raise
            extra = f"toolcell[{home.split('.')[1]}]"
            return _absent(name, MissingPackage(f"{name} needs {exc.name}: pip install {exc.name}, or {extra!r}"))
        except MissingPackage as exc:
            return _absent(name, exc)
        namespace[name] = value
        return value

    def list_names() -> list[str]:
        return list(vars(sys.modules[package])["__all__"])

    return get_name, list_names


def needed(module: str, who: str, extra: str = "builtin") -> Any:
    """Return a module that comes with an extra of toolcell.

    Raises:
        MissingPackage: it is not installed; `who` needs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingPackage(f"{who} needs {module}: pip install 'toolcell[{extra}]'") from None
