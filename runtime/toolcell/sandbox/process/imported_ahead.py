"""Which modules of a package environment the zygote imports before a script asks for them."""

from __future__ import annotations

from pathlib import Path

AHEAD: dict[str, tuple[str, ...]] = {
    "numpy": ("numpy", "numpy.random"),
    "pandas": ("pandas",),
    # The font manager looks through every font of the machine, once here instead of in each script.
    "matplotlib": ("matplotlib.pyplot", "matplotlib.font_manager"),
    "PIL": ("PIL.Image",),
    "requests": ("requests",),
    "yaml": ("yaml",),
    "bs4": ("bs4",),
    "lxml": ("lxml.etree",),
    "openpyxl": ("openpyxl",),
    "dateutil": ("dateutil.parser",),
}
"""What is often used, takes long to import, and starts no thread: a thread of the zygote would be in no sandbox."""


def imported_ahead(packages: Path | None) -> tuple[str, ...]:
    """Return the modules to import ahead from an environment; one that cannot be imported is left to the script."""
    if packages is None:
        return ()
    return tuple(each for top, modules in AHEAD.items() if (packages / top).is_dir() for each in modules)
