"""Read what a command is given: a script, inputs, files, tools, and limits."""

from __future__ import annotations

import ast
import errno
import inspect
import io
import itertools
import json
import keyword
import os
import stat
import sys
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolcell import config
from toolcell.cli.terminal import safe, stderr
from toolcell.config import Limits
from toolcell.errors import UsageError
from toolcell.settings import Setting
from toolcell.support.text import one_line, size

if TYPE_CHECKING:
    from toolcell.tools import ToolRegistry

MAX_WARNING_CHARS = 500
"""Most characters of a warning about a tool's description, which may quote the description."""


def read_script(name: str) -> str:
    """Return the text of a file, or of stdin for `-`.

    Raises:
        UsageError: the file cannot be read, or is neither UTF-8 nor what its `coding` line says.
    """
    try:
        data = sys.stdin.buffer.read() if name == "-" else _content(name)
        return data.decode(_encoding(data))
    except OSError as exc:
        raise UsageError(f"cannot read the script {name}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        found = f"byte {exc.object[exc.start]:#04x} at {exc.start}"
        raise UsageError(f"the script {name} is not {exc.encoding.upper()}: {found}") from exc
    except SyntaxError as exc:
        raise UsageError(f"the script {name} cannot be read: {exc}") from exc


def _encoding(data: bytes) -> str:
    """Return the encoding that a script names in a `coding` line; UTF-8 without one.

    Raises:
        SyntaxError: there is no such encoding.
    """
    try:
        return tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    except SyntaxError as exc:
        if "unknown encoding" in str(exc):
            raise
        return "utf-8-sig"


def parse_inputs(given: Iterable[str]) -> dict[str, Any]:
    """Read `name=json` pairs.

    Raises:
        UsageError: a name is not an identifier, or a value is not JSON.
    """
    inputs: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(f"--input {text!r}: want name=json, with a name a script can use")
        try:
            inputs[name] = json.loads(value)
        except (ValueError, RecursionError) as exc:
            raise UsageError(
                f"--input {name}: {value!r:.80} is not JSON ({exc}); text wants quotes: {name}='\"...\"'"
            ) from exc
    return inputs


def read_files(given: Iterable[str]) -> list[tuple[str, bytes]]:
    """Read `PATH` or `NAME=PATH` into (name in the workspace, content).

    Raises:
        UsageError: a file cannot be read.
    """
    return [_read_file(text) for text in given]


def _read_file(text: str) -> tuple[str, bytes]:
    name, equals, path = text.partition("=")
    if not equals or os.path.exists(text):
        name, path = os.path.basename(text), text
    try:
        return name, _content(path)
    except OSError as exc:
        raise UsageError(f"--file {text}: {exc.strerror}") from exc


def _content(path: str) -> bytes:
    """Return what is in a file or a pipe. Of a device, such as /dev/zero, there may be no end."""
    if not path or stat.S_ISCHR(os.stat(path).st_mode) or stat.S_ISBLK(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a file or a pipe")
    return Path(path).read_bytes()


def read_token(path: Path | None, variable: str) -> str:
    """Return the token in the file of `--token-file`, or in an environment variable; empty without one.

    Raises:
        UsageError: the file cannot be read.
    """
    if path is None:
        return os.environ.get(variable, "")
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise UsageError(f"--token-file {path} cannot be read: {why}") from exc


def load_registry(sources: Sequence[str]) -> ToolRegistry:
    """Collect the tools of files and modules into one registry.

    Raises:
        UsageError: a source cannot be loaded or offers no tool.
        RegistrationError: a tool's definition is wrong.
    """
    from toolcell.tools import load_tools

    loaded = []
    for source in sources:
        with _plain_warnings(source):
            loaded.append(load_tools(source))
    first, *others = loaded
    return first.merged(*others) if others else first


@contextmanager
def _plain_warnings(source: str) -> Iterator[None]:
    """Show a warning about a tool's description in one line that names its file. Other warnings are not changed."""
    from toolcell.calls.definition import ToolDescriptionWarning

    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        for each in caught:
            if issubclass(each.category, ToolDescriptionWarning):
                stderr().print(safe(one_line(f"warning: {source}: {each.message}", MAX_WARNING_CHARS), "yellow"))
            else:
                warnings.showwarning(each.message, each.category, each.filename, each.lineno, line=each.line)


# Limits


LIMITS_FILE = "limits_file"
"""The parameter of `--limits FILE`."""


def limit_flags() -> tuple[inspect.Parameter, ...]:
    """Return `--limits FILE` and a flag for each field of `Limits`. `described_limits` has their help."""
    return (_file_flag(), *(_flag(name, field) for name, field in Limits.model_fields.items()))


def make_limits(file: Path | None, flags: dict[str, Any]) -> Limits:
    """Combine the model's defaults, a TOML file and the flags. Flags override the file, and the file the defaults.

    Raises:
        UsageError: a value is out of range; names the flag, the value and the bound.
    """
    base = Limits.from_toml(file).model_dump() if file else {}
    try:
        return Limits(**base | {name: value for name, value in flags.items() if value is not None})
    except UsageError as exc:
        raise UsageError(as_flag(exc)) from exc


def as_flag(exc: UsageError) -> str:
    """Return what is wrong with a setting, with the name of its flag."""
    from pydantic import ValidationError  # takes a tenth of a second

    if not isinstance(exc.__cause__, ValidationError):
        return str(exc)
    first = exc.__cause__.errors()[0]
    return f"{flag_name(str(first['loc'][0]))} {first['input']!r}: {first['msg']}"


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def parse_size(text: str) -> int:
    """Read the value of a flag for a number of bytes."""
    try:
        return config.parse_size(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


def _file_flag() -> inspect.Parameter:
    option = typer.Option("--limits", metavar="FILE", help="Limits from a TOML file; flags override it.", **_PANEL)
    return _parameter(LIMITS_FILE, Path | None, option)


def _flag(name: str, field: Setting) -> inspect.Parameter:
    if name.endswith("bytes"):
        return _parameter(name, int | None, typer.Option(parser=parse_size, metavar="SIZE", **_PANEL))
    kind = float | None if "float" in field.annotation else int | None
    return _parameter(name, kind, typer.Option(**_PANEL))


def described_limits() -> dict[str, str]:
    """Return what each field of `Limits` means, with its default. Reads the source, so only help calls this."""
    body = ast.parse(inspect.getsource(Limits)).body[0].body  # type: ignore[attr-defined]  # of the class
    found = {}
    for field, about in itertools.pairwise(body):
        match field, about:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split()).replace("`", "") + _default(name)
    return found


def _default(name: str) -> str:
    value = Limits.model_fields[name].default
    if value is None:
        return ""
    return (
        f" Default {size(value) if name.endswith('bytes') else format(value, ',' if isinstance(value, int) else 'g')}."
    )


_PANEL: dict[str, Any] = {"rich_help_panel": "Limits", "show_default": False}


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])
