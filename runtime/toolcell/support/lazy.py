"""Public names that a package imports when they are first used, and imports of many modules at once."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from toolcell.support.collector import has_frozen_objects, make_all_old


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
        if len(sys.modules) > modules and not has_frozen_objects():
            make_all_old()
        if was_enabled:
            gc.enable()


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
        with importing():
            namespace[name] = value = getattr(importlib.import_module(home), name)
        return value

    def list_names() -> list[str]:
        return list(vars(sys.modules[package])["__all__"])

    return get_name, list_names
