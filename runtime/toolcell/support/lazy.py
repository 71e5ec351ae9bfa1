"""Public names that a package imports when they are first used, and imports of many modules at once."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def importing() -> Iterator[None]:
    """Import without passes of the garbage collector: nothing that a module makes is garbage. A tenth of the time.

    What was imported counts as old. As young, the next pass would look through all of it: another tenth.
    """
    was_enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()  # moves what is young to a place of its own,
            gc.unfreeze()  # and then to what is old
        if was_enabled:
            gc.enable()


def lazy_names(package: str, *modules: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `package`, whose `__all__` lists its public names.

    A name is looked up in `modules`, in their order. List modules that import little first: a name from one of them
    is found before the others are loaded.
    """

    def get_name(name: str) -> Any:
        namespace = vars(sys.modules[package])
        if name in namespace["__all__"]:
            for module in modules:
                home = vars(importlib.import_module(module))
                if name in home:
                    namespace[name] = home[name]
                    return home[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        return list(vars(sys.modules[package])["__all__"])

    return get_name, list_names
