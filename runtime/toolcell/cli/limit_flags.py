"""A command-line flag for every field of `Limits`, made from the model: names, help and defaults live there alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from toolcell.config import GIB, KIB, MIB, Limits
from toolcell.errors import UsageError

_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)


def with_limit_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command`, which takes `limits: Limits`, a flag per field and `--limits FILE` instead."""

    def flagged(**given: Any) -> None:
        flags = {name: given.pop(name) for name in Limits.model_fields}
        limits = make_limits(given.pop("limits_file"), flags)
        command(**given, limits=limits)

    own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "limits"]
    parameters = [*own, _file_flag(), *(_flag(name, field) for name, field in Limits.model_fields.items())]
    by_keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    flagged.__name__, flagged.__doc__ = command.__name__, command.__doc__
    flagged.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
    flagged.__annotations__ = {each.name: each.annotation for each in by_keyword}
    return flagged


def make_limits(file: Path | None, flags: dict[str, Any]) -> Limits:
    """Combine the model's defaults, a TOML file and the flags; each goes before the one before.

    Raises:
        UsageError: a value is out of range; names the flag, the value and the bound.
    """
    base = Limits.from_toml(file).model_dump() if file else {}
    try:
        return Limits(**base | {name: value for name, value in flags.items() if value is not None})
    except ValidationError as exc:
        first = exc.errors()[0]
        raise UsageError(f"{flag_name(str(first['loc'][0]))} {first['input']!r}: {first['msg']}") from exc


def flag_name(field: str) -> str:
    """The flag that sets `field`."""
    return "--" + field.replace("_", "-")


def parse_size(text: str) -> int:
    """Read a number of bytes such as 65536, 64k, 1.5GiB."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size such as 65536, 512k, 64MiB or 1.5g")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def show_size(size: int) -> str:
    """Write a number of bytes as `parse_size` reads it."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return str(size)


def _file_flag() -> inspect.Parameter:
    option = typer.Option("--limits", metavar="FILE", help="Limits from a TOML file; flags override it.", **_PANEL)
    return _parameter("limits_file", Path | None, option)


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    about = " ".join((field.description or "").split()).replace("`", "")
    if name.endswith("bytes"):
        about += f" Default {show_size(field.default)}."
        return _parameter(name, int | None, typer.Option(help=about, parser=parse_size, metavar="SIZE", **_PANEL))
    about += f" Default {field.default:g}."
    return _parameter(
        name, float | None if field.annotation is float else int | None, typer.Option(help=about, **_PANEL)
    )


_PANEL: dict[str, Any] = {"rich_help_panel": "Limits", "show_default": False}


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])
