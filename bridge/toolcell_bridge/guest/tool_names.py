"""How a tool's name is written in Python: `github.create-issue` is `tools.github.create_issue`.

The guest finds tools by it, and the host writes its stubs with it. `github__create-issue` is what a provider takes.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable

IN_PLACE_OF_DOT = "__"
"""Replaces a dot in the names that providers get, which allow none."""


def provider_name(name: str) -> str:
    """Return a tool's name as providers take it: Gemini takes none that begins with a digit or a dash."""
    begins_well = name[:1] == "_" or name[:1].isalpha()
    return ("" if begins_well else "_") + name.replace(".", IN_PLACE_OF_DOT)


def name_meant(name: str, names: Iterable[str]) -> str:
    """Return the one of `names` behind one that a provider was given in its place; else `name` itself."""
    if name in names or not (name.startswith("_") or IN_PLACE_OF_DOT in name):
        return name
    return next((each for each in names if provider_name(each) == name), name)


def python_name(text: str) -> str:
    """Return a Python name that looks like `text`: other signs become `_`, and a keyword gets one at its end."""
    name = "".join(sign if sign.isalnum() else "_" for sign in text)
    if not name or name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) else name


def python_path(name: str) -> str:
    """Return a tool's name as it is written after `tools.`, each part of it as a Python name."""
    return ".".join(map(python_name, name.split(".")))
