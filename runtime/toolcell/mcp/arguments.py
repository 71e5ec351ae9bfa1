"""What a caller of `add_mcp_server` gives, checked: where the server is, which tools of it, which labels."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx2

from toolcell.errors import UsageError
from toolcell.mcp.login import MIN_SECRET_CHARS, Login
from toolcell.mcp.oauth import auth_of
from toolcell.mcp.transports import HttpTransport, ProcessTransport
from toolcell.support.checks import check_kind
from toolcell.support.secrets import search_for

if TYPE_CHECKING:
    from toolcell.egress import Egress

Transport = ProcessTransport | HttpTransport

VARIABLE = re.compile(r"\$\{[\s{]*[A-Za-z_][^{}$]*\}+|\$\{\s*(?i:env|input):[^{}]*$")
"""What the files of MCP clients have in place of a value: `${NAME}`, `${{NAME}}`, `${env:NAME}`, `${input:NAME}`; also
one of the last two without its end."""


def transport_of(
    name: str,
    command: Sequence[str] | None,
    url: str | None,
    headers: Mapping[str, str] | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    login: Login | None = None,
    egress: Egress | None = None,
) -> Callable[[], Transport]:
    """Return what makes the transport of each connection.

    Raises:
        UsageError: there is no command and no URL, or both, or one of them is wrong.
    """
    if (command is None) == (url is None):
        raise UsageError(f"MCP server {name}: give it command=[...] or url=..., and not both")
    if command is not None:
        words = _words(command)
        if not words:
            raise UsageError(f"MCP server {name}: command is a list such as ['npx', 'server'], not {command!r}")
        if headers is not None or login is not None:
            what = "headers are" if headers is not None else "auth is"
            raise UsageError(f"MCP server {name}: {what} for url=...; a command has env=...")
        if egress is not None:
            raise UsageError(f"MCP server {name}: egress is for url=...; a command is not watched")
        variables = _texts(f"MCP server {name}: env", env)
        return lambda: ProcessTransport(words, variables, cwd, hiding(variables))
    check_kind("url", url, str)
    if egress is not None:
        from toolcell.egress import Egress  # needs httpx

        check_kind("egress", egress, Egress, cure='write Egress(Allow("mcp.example.com", methods=["*"]))')
    fields = _texts(f"MCP server {name}: headers", headers)
    if env is not None or cwd is not None:
        raise UsageError(f"MCP server {name}: env and cwd are for command=[...]; a URL has headers=...")
    place = str(url)
    parsed = httpx2.URL(place)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"MCP server {name}: a URL begins with http:// or https://, and this is {place[:80]!r}")
    if login is not None and "authorization" in (field.lower() for field in fields):
        raise UsageError(f"MCP server {name}: headers have an Authorization already; leave it out, or auth")
    return lambda: HttpTransport(place, fields, login, egress)


def login_of(name: str, url: object, auth: object) -> Login | None:
    """Return the login that `auth=` asks for.

    Raises:
        UsageError: `auth` or the URL is wrong.
    """
    known = auth_of(auth)
    if known is None:
        return None
    if not isinstance(url, str):
        raise UsageError(f"MCP server {name}: auth is for url=...; a command has env=...")
    return Login(name, url, known)


def _texts(what: str, given: Mapping[Any, Any] | None) -> Mapping[str, str]:
    """Return texts by name, without a value of them in any error: they hold tokens."""
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"{what} must be a dict of texts, not of type {type(given).__name__}")
    for key, value in (given or {}).items():
        if value is None:
            raise UsageError(f"{what} has no text for {key!r}: it is None; is the variable that it comes from set?")
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"{what} maps text to text, and {key!r} to {type(value).__name__}; write str(...)")
        if (left := VARIABLE.search(value)) is not None:
            raise UsageError(f"{what}: {key!r} holds {left[0][:80]}, and nothing replaces that here; write the value")
    return given or {}


def hiding(
    given: Mapping[str, str] | None, login: Login | None = None, egress: Egress | None = None
) -> Callable[[str], str]:
    """Return what hides tokens and secrets in a text that a model may read, and the values of variables or headers
    unless they are paths.

    A server that fails may say which token it was given.
    """
    values = {part for value in (given or {}).values() for part in (str(value), *str(value).split())}
    secrets = frozenset(each for each in values if len(each) >= MIN_SECRET_CHARS and not os.path.exists(each))

    def hide(text: str) -> str:
        text = search_for(secrets).hide(text)[0]
        text = egress.allowed.echoes.clean_text(text) if egress is not None else text
        return login.hide(text) if login is not None else text

    return hide


def _words(command: object) -> list[str]:
    """Return a command as its words; none when it is not a list of words."""
    words = [] if isinstance(command, str) or not isinstance(command, Sequence) else list(command)
    return words if words and all(isinstance(word, str) for word in words) and words[0] else []


def globs(what: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise UsageError(f"{what} takes a list of names or globs, not {given!r}; write [{given!r}]")
    globs = tuple(given)
    for each in globs:
        check_kind(f"{what}: each", each, str)
    return globs


def labels_of(labels: Any) -> dict[str, Any]:
    """Return `reads` and `sends`. One label or a list of them is both: what a server gives, and what it gets."""
    if isinstance(labels, Mapping):
        if unknown := labels.keys() - {"reads", "sends"}:
            raise UsageError(f"labels has {sorted(map(str, unknown))}; write {{'reads': ..., 'sends': ...}}")
        return dict(labels)
    return {"reads": labels, "sends": labels} if labels else {}
