"""The built-in packages by name: their tools, and what each package needs. Makes no package."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from toolcell.builtin.package import ToolPackage, offered_by
from toolcell.errors import UsageError
from toolcell.support.checks import did_you_mean

PACKAGES: Mapping[str, str] = {
    "knowledge": "Knowledge",
    "remember": "Remember",
    "search": "WebSearch",
    "schedule": "Schedule",
    "shell": "Shell",
    "file": "Files",
    "http": "Http",
    "data": "DataTools",
    "skill": "Skills",
}
"""Name to class in `toolcell.builtin`, in the order in which they are listed."""

MODULES: Mapping[str, tuple[str, ...]] = {
    "search": ("httpx", "trafilatura", "semchunk"),
    "http": ("httpx", "trafilatura"),
    "schedule": ("dateutil",),
    "data": ("polars",),
}
"""What has to be importable for the tools of a package."""


@dataclass(frozen=True, slots=True)
class PackageInfo:
    """What a person wants to know before using a package."""

    name: str
    class_name: str
    tools: tuple[str, ...]
    needs: tuple[str, ...]
    """What the constructor takes."""
    extra: str
    """The extra to install; empty when there is none."""
    missing: tuple[str, ...]
    """Modules of the extra that are not installed."""
    about: str


def package_class(name: str) -> type[ToolPackage]:
    """Return the class of a package.

    Raises:
        UsageError: there is no such package; lists those there are.
    """
    if name not in PACKAGES:
        near = did_you_mean(name, PACKAGES, quote="")
        raise UsageError(f"no built-in package is called {name!r}{near}; there are: {', '.join(PACKAGES)}")
    found: type[ToolPackage] = getattr(importlib.import_module("toolcell.builtin"), PACKAGES[name])
    return found


def package_info(name: str) -> PackageInfo:
    """Describe a package.

    Raises:
        UsageError: there is no such package.
    """
    kind = package_class(name)
    modules = MODULES.get(name, ())
    return PackageInfo(
        name=name,
        class_name=kind.__name__,
        tools=tuple(tool for tool, _ in offered_by(kind)),
        needs=kind.needs,
        extra=kind.extra,
        missing=tuple(module for module in modules if importlib.util.find_spec(module) is None),
        about=(kind.__doc__ or "").partition("\n")[0],
    )


def all_packages() -> list[PackageInfo]:
    return [package_info(name) for name in PACKAGES]
