"""How a tool's name is written in Python: `github.create-issue` is `tools.github.create_issue`.

The guest finds tools by it, and the host writes its stubs with it. `github__create-issue` is what a provider takes.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable

IN_PLACE_OF_DOT = "__"
"""Replaces a dot in the names that providers get, which allow none."""


def name_meant(name: str, names: Iterable[str]) -> str:
    """Return the one of `names` behind one that a provider was given in its place; else `name` itself."""
    if IN_PLACE_OF_DOT not in name or name in names:
        return name
    return next((each for each in names if "." in each and each.replace(".", IN_PLACE_OF_DOT) == name), name)


def python_name(text: str) -> str:
    """Return a Python name that looks like `text`: other signs become `_`, and a keyword gets one at its end."""
    name = "".join(sign if sign.isalnum() else "_" for sign in text)
    if not name or name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) else name


def python_path(name: str) -> str:
    """Return a tool's name as it is written after `tools.`, each part of it as a Python name."""
    return ".".join(map(python_name, name.split(".")))
