"""Descriptions out of docstrings: the prose for the tool, the Args section for its parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
_GOOGLE_PARAM = re.compile(r"^(?P<name>\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(?P<text>.*)$")
_SPHINX_PARAM = re.compile(r"^:param\s+(?:[\w\[\], .|]+\s+)?(?P<name>\w+):\s*(?P<text>.*)$")
_SPHINX_FIELD = re.compile(r"^:\w+[^:]*:")


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Shape: (description, parameter name -> description). Understands Google and Sphinx style."""
    lines = (inspect.getdoc(function) or "").splitlines()
    prose: list[str] = []
    parameters: dict[str, str] = {}
    section, last = "", None
    for line in lines:
        stripped = line.strip()
        if heading := _SECTION.match(stripped):
            section, last = heading[1], None
        elif sphinx := _SPHINX_PARAM.match(stripped):
            section, last = "sphinx", sphinx["name"]
            parameters[last] = sphinx["text"]
        elif section in ("Args", "Arguments", "Parameters"):
            last = _read_google_line(line, last, parameters)
        elif section == "sphinx" and last and stripped and not _SPHINX_FIELD.match(stripped):
            parameters[last] += f" {stripped}"
        elif not section:
            prose.append(line)
    return "\n".join(prose).strip(), parameters


def _read_google_line(line: str, last: str | None, parameters: dict[str, str]) -> str | None:
    stripped = line.strip()
    indent = len(line) - len(line.lstrip())
    found = _GOOGLE_PARAM.match(stripped)
    if found and (last is None or indent <= 4):
        name = found["name"].lstrip("*")
        parameters[name] = found["text"]
        return name
    if stripped and last is not None:
        parameters[last] = f"{parameters[last]} {stripped}".strip()
    return last
