"""`--mcp` and `--mcp-config`: the tools of MCP servers for a command."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from toolcell.cli.arguments import MAX_WARNING_CHARS
from toolcell.cli.terminal import safe, stderr
from toolcell.errors import UsageError
from toolcell.support.text import one_line

if TYPE_CHECKING:
    from toolcell.tools import ToolRegistry

MAX_CONFIG_BYTES = 1024 * 1024
URL_SCHEMES = ("http://", "https://")
LOOPBACK = ("localhost", "127.0.0.1", "::1")

_VARIABLE = re.compile(
    r"\$\{\s*(?:[eE][nN][vV]:|(?P<other>[A-Za-z][A-Za-z0-9_]*):(?!-))?(?P<name>[A-Za-z_][A-Za-z0-9_.-]*?)"
    r"(?::-(?P<default>[^}]{0,1000})|\s*)\}"
)
_UNREADABLE = re.compile(r"\$\{\{.*?(?:\}\}|$)|\$\{\s*[A-Za-z_][^{}$]*$")
"""What is meant for a variable and cannot be one: in two braces, or in braces that are not closed."""
_STRING = r'(?P<string>"(?:[^"\\]|\\.)*+")'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_COMMA = re.compile(_STRING + r"|,(?=\s*+[}\]])", re.DOTALL)
MAX_NAME_CHARS = 32
_ALIASES = {"httpUrl": "url", "serverUrl": "url", "endpoint": "url", "environment": "env", "workingDirectory": "cwd"}
"""Other names that clients have for the same field."""
_OF_COMMANDS, _OF_URLS = frozenset({"stdio", "local"}), frozenset({"sse", "remote"})
"""Types of servers in clients' files. Those with `http` in their name have a URL, too."""
_FIELDS: Mapping[str, type] = {"command": str, "args": list, "env": dict, "cwd": str, "url": str, "headers": dict}
"""Fields of a server in a client's file, that are used; clients add others of their own."""


@dataclass(frozen=True, slots=True)
class McpFlags:
    """Flags that give a command the tools of MCP servers."""

    mcp: Annotated[
        list[str] | None,
        typer.Option("--mcp", metavar="NAME=COMMAND|URL", help="An MCP server; its tools are called NAME.tool."),
    ] = None
    mcp_config: Annotated[
        list[str] | None,
        typer.Option("--mcp-config", metavar="FILE", help='MCP servers of a JSON file with "mcpServers".'),
    ] = None
    mcp_approve: Annotated[
        Literal["destructive", "all", "none"],
        typer.Option("--mcp-approve", help="Which calls need approval; refused where nobody can approve."),
    ] = "destructive"

    def servers(self) -> dict[str, dict[str, Any]]:
        """Return the options of each server for `add_mcp_server`, by name. One of a file that cannot be used is named.

        Raises:
            UsageError: a value cannot be read, a file is not there or not of that form, a name is given twice, or none
                of the servers can be used.
        """
        servers, problems = self._read()
        _go_on_without(problems, are_all=not servers)
        return servers

    def _read(self) -> tuple[dict[str, dict[str, Any]], list[Exception]]:
        problems: list[Exception] = []
        found = [each for path in self.mcp_config or () for each in read_config(path, problems.append)]
        found += [read_server(text) for text in self.mcp or ()]
        servers = dict(found)
        if len(servers) < len(found):
            raise UsageError(f"--mcp: two servers have one name: {', '.join(name for name, _ in found)}")
        return servers, problems

    def with_registry(self, registry: ToolRegistry | None) -> ToolRegistry | None:
        """Return the registry that the servers' tools are added to, if there are any."""
        if registry is not None or not (self.mcp or self.mcp_config):
            return registry
        from toolcell.tools import ToolRegistry

        return ToolRegistry()

    @asynccontextmanager
    async def connected(self, registry: ToolRegistry | None, asks: bool | None = None) -> AsyncIterator[bool]:
        """Connect with all servers at once, until the end of the block. One of a file that fails is named; then the
        block gets False.

        `asks`: whether a person is asked to log in where a server wants that. None: when there is a terminal.

        Raises:
            McpServerError: one of `--mcp`, or each of them, cannot be started or reached.
            UsageError: the extra `mcp` is not installed, or a flag is wrong.
        """
        servers, unreadable = self._read()
        if registry is None or not (servers or unreadable):
            yield True
            return
        may_ask = sys.stdin.isatty() and sys.stderr.isatty() if asks is None else asks
        import anyio

        problems: dict[str, Exception] = {}

        async def connect(name: str, options: dict[str, Any]) -> None:
            try:
                options = options | login_of(options, may_ask)
                await registry.add_mcp_server(name, approve=self.mcp_approve, **options)
            except Exception as exc:
                problems[name] = exc

        try:
            async with anyio.create_task_group() as tasks:
                for name, options in servers.items():
                    tasks.start_soon(connect, name, options)
            named = {read_server(text)[0] for text in self.mcp or ()}
            failed = sorted(problems, key=lambda name: name not in named)
            refused = not named.isdisjoint(problems) or len(problems) == len(servers)
            _go_on_without([*(problems[name] for name in failed), *unreadable], are_all=refused)
            yield not (problems or unreadable)
        finally:
            with anyio.CancelScope(shield=True):
                await registry.close()


def _go_on_without(problems: Sequence[Exception], are_all: bool) -> None:
    """Name what keeps servers of a file from being used, or raise it if there are no others."""
    if problems and are_all:
        raise problems[0]
    for each in problems:
        stderr().print(safe(one_line(f"warning: {each}; going on without this server", MAX_WARNING_CHARS), "yellow"))


def login_of(options: Mapping[str, Any], may_ask: bool) -> dict[str, Any]:
    """Return the login for a server at a URL, should it want one; none where a token is given, or would go in clear."""
    url = urlsplit(options.get("url", ""))
    is_safe = url.scheme == "https" or url.hostname in LOOPBACK
    if not is_safe or "authorization" in (name.lower() for name in options.get("headers", ())):
        return {}
    try:
        from toolcell.mcp.oauth import OAuth
    except ImportError:
        return {}  # `add_mcp_server` says what is not installed
    return {"auth": OAuth(ask=may_ask)}


def read_server(text: str) -> tuple[str, dict[str, Any]]:
    """Read the value of `--mcp`: a name, and a command line or a URL.

    Raises:
        UsageError: it is none.
    """
    name, _, place = text.partition("=")
    if not name.strip() or not place.strip():
        raise UsageError(f"--mcp {text!r}: write NAME=COMMAND or NAME=URL, such as docs=https://example.com/mcp")
    if place.strip().startswith(URL_SCHEMES):
        return name.strip(), {"url": place.strip()}
    try:
        return name.strip(), {"command": shlex.split(place)}
    except ValueError as exc:
        raise UsageError(f"--mcp {text!r}: {exc}") from exc


def read_config(path: str, on_problem: Callable[[UsageError], object]) -> list[tuple[str, dict[str, Any]]]:
    """Read the servers of a file that MCP clients have. `${NAME}` and `${NAME:-default}` are of the environment.

    `on_problem` is told of a server that cannot be used as it stands there, or whose variable is not set.

    Raises:
        UsageError: the file is not there, too large or not of that form, or two servers would have one name.
    """
    where = f"--mcp-config {path}"
    try:
        if (size := Path(path).stat().st_size) > MAX_CONFIG_BYTES:
            raise UsageError(f"{where}: {size} bytes, limit {MAX_CONFIG_BYTES}")
        document = _with_comments(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as exc:
        if isinstance(exc, UsageError):
            raise
        raise UsageError(f"{where}: {exc.strerror if isinstance(exc, OSError) else exc}") from exc
    servers = _servers_of(document)
    if servers is None:
        raise UsageError(f'{where}: it has no "mcpServers" object')
    names = dict[str, str]()
    found = []
    for name, entry in servers.items():
        if isinstance(entry, dict) and (entry.get("disabled") is True or entry.get("enabled") is False):
            continue
        short = short_name(name)
        if (other := names.setdefault(short, name)) != name:
            raise UsageError(f"{where}: {other!r} and {name!r} would both be called {short!r}; rename one of them")
        try:
            found.append((short, _server(f"{where}: {name}", entry)))
        except UsageError as exc:
            on_problem(exc)
    return found


def short_name(name: str) -> str:
    """Return the name of a server as its tools begin with it: 32 letters, digits, `_` and `-` at most."""
    from toolcell.calls.definition import RESERVED

    plain = re.sub("__+", "_", re.sub(r"[^A-Za-z0-9_-]", "_", name)).strip("_") or "server"
    if plain.casefold() == RESERVED:
        return f"{plain}_server"
    if name.isascii() and len(plain) <= MAX_NAME_CHARS:
        return plain
    mark = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:6]
    return f"{plain[: MAX_NAME_CHARS - 7].rstrip('_-')}_{mark}"


def _with_comments(text: str) -> Any:
    """Read JSON as editors write it: with comments, and commas before a closing bracket."""
    try:
        return json.loads(text)
    except ValueError as exc:
        bare = _COMMENT.sub(lambda found: found["string"] or " ", text)
        try:
            return json.loads(_COMMA.sub(lambda found: found["string"] or "", bare))
        except ValueError:
            raise exc from None


def _servers_of(document: Any) -> dict[str, Any] | None:
    """Return the servers of a client's file, by whatever name they stand there."""
    if not isinstance(document, dict):
        return None
    inner = document.get("mcp")
    nested = inner.get("servers", inner) if isinstance(inner, dict) else None
    for found in (document.get("mcpServers"), document.get("servers"), document.get("context_servers"), nested):
        if isinstance(found, dict):
            return found
    return None


def _server(where: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: a server is an object, not {type(entry).__name__}")
    known = {str(_ALIASES.get(field, field)): value for field, value in entry.items() if value is not None}
    if isinstance(known.get("command"), list):  # the whole command line, as some clients write it
        known["command"], *before = known["command"] or [""]
        known["args"] = [*before, *known.get("args", [])]
    for field, kind in _FIELDS.items():
        if field in known and not isinstance(known[field], kind):
            raise UsageError(f"{where}: {field} is of the wrong type, {type(known[field]).__name__}")
    _choose_place(where, known)
    given = {field: _expanded(f"{where}: {field}", known[field]) for field in _FIELDS if field in known}
    args = given.pop("args", [])
    if "command" in given:
        given["command"] = [given["command"], *args]
    return given


def _choose_place(where: str, known: dict[str, Any]) -> None:
    """Leave either a command or a URL in an entry, with what belongs to it.

    Raises:
        UsageError: there is none, or it does not say which of them is meant.
    """
    is_command, is_url = bool(known.get("command")), bool(known.get("url"))
    if is_command and is_url:
        kind = str(known.get("type", known.get("transport", ""))).lower()
        is_command, is_url = kind in _OF_COMMANDS, "http" in kind or kind in _OF_URLS
        if is_command == is_url:
            raise UsageError(f'{where}: it has "command" and "url"; leave out one of them, or add "type"')
    if not is_command and not is_url:
        has = ", ".join(map(repr, known)) or "nothing"
        raise UsageError(f'{where}: write "command" or "url"; the entry has {has}')
    for field in ("url", "headers") if is_command else ("command", "args", "env", "cwd"):
        known.pop(field, None)


def _expanded(where: str, value: Any) -> Any:
    """Replace variables of the environment in a text, and in those of a list or an object. What is null is left out."""
    if isinstance(value, list):
        return [_expanded(where, each) for each in value if each is not None]
    if isinstance(value, dict):
        return {name: _expanded(f"{where}: {name}", each) for name, each in value.items() if each is not None}
    if isinstance(value, bool):
        return str(value).lower()

    def variable(match: re.Match[str]) -> str:
        if match["other"]:
            cure = f"set a variable of the environment and write ${{{match['name']}}}"
            raise UsageError(f"{where}: {match[0]} is for the client to fill in; {cure}, or write the value itself")
        found = os.environ.get(match["name"], match["default"])
        if found is None:
            raise UsageError(f"{where}: the variable {match['name']} is not set")
        return found

    text = str(value)
    if (found := _UNREADABLE.search(_VARIABLE.sub("", text))) is not None:
        raise UsageError(f"{where}: {found[0][:80]} is not a variable; write ${{NAME}}, or ${{NAME:-default}}")
    return _VARIABLE.sub(variable, text)
