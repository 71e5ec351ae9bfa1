"""`Allow`: which requests to one host are allowed. Decides over plain data; nothing is sent here."""

from __future__ import annotations

import fnmatch
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final
from urllib.parse import unquote, unquote_to_bytes

from toolcell.egress.addresses import IPAddress, networks_of, refusal
from toolcell.egress.failures import refused
from toolcell.egress.urls import DEFAULT_PORTS, Target, decoded_path, parse_url
from toolcell.errors import ToolError, UsageError
from toolcell.support.checks import check_count, check_kind

SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing: a dry run makes them."""

NEVER: Final = frozenset({"CONNECT", "TRACE", "TRACK"})
"""CONNECT makes a tunnel, the others return what was sent. Source: forbidden methods of the Fetch standard."""

PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Stands for the secret of this name."""

BODY: Final = "body"
"""The key of `secrets` that is not a header."""

MAX_DECODED: Final = 4
"""How often a path may be percent-encoded."""

OF_CONNECTION: Final = frozenset({
    "alt-used", "connection", "content-length", "expect", "host", "http2-settings", "keep-alive", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip
"""Headers that scripts cannot be allowed to send."""

_HEADER = re.compile(r"[!#$%&'+.^`|~0-9a-z-]+\*?")
_METHOD = re.compile(r"[A-Z][A-Z0-9-]{0,31}")
_PARAMETERS = re.compile(r";[^/]*")
_QUERY = re.compile(r"[?#].*", re.DOTALL)
"""Of a path that was decoded before it was divided."""
_OVERLONG = re.compile(rb"[\xc0\xc1][\x80-\xbf]|\xe0[\x80-\x9f][\x80-\xbf]|\xf0[\x80-\x8f][\x80-\xbf]{2}")
_PADDED = re.compile(r"(?<=/)\.\.[\s.]+(?=/|\Z)")
_ALIKE = {0x2044: "/", 0x2215: "/", 0x2216: "\\", 0xA5: "\\", 0x20A9: "\\"}
"""What Windows makes of letters that a code page does not have. Source: its tables of best fit."""
_WIDE = re.compile(r"%u([0-9A-Fa-f]{4})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Allow:
    """A rule that allows requests to one host, or with a wildcard (`*.example.com`) to all hosts below a name."""

    host: str
    """A name or an address; `http://` before it allows requests that everybody on the way can read."""
    _: KW_ONLY
    methods: Sequence[str] = ("GET", "HEAD", "OPTIONS")
    paths: Sequence[str] = ("*",)
    """`*` in it stands for any text. Every way in which a server may read the path has to fit."""
    ports: Sequence[int] = ()
    """Empty: the one of the scheme. Ports that are listed allow http, too."""
    headers: Sequence[str] = ()
    """Headers that a script may send besides the ordinary ones. `X-Acme-*` stands for all that begin so."""
    secrets: Mapping[str, str] | Sequence[str] = field(default=(), repr=False)
    """Headers that every request gets, with `{NAME}` for a secret; or names of secrets which the script may write as
    `{NAME}` in a header. The key `body` lists those that it may write in a body."""
    approval: str | Sequence[str] = ()
    """Methods for which somebody has to approve each request."""
    max_bytes: int | None = None
    """Most bytes of one body, sent or received."""
    rate: float | None = None
    """Requests in a second, of all runs together."""
    private: Sequence[str] = ()
    """Addresses and networks that the host may have although they are not public."""
    sends: str = "public"
    """Label of where requests go; a `Flow` decides which runs may send them."""
    reads: str | Sequence[str] = ()
    """Labels of what answers hold."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        scheme, host = _written(self.host)
        put(self, "host", f"{scheme}://{host}" if scheme == "http" else host)
        put(self, "methods", _methods("methods", self.methods))
        put(self, "approval", _methods("approval", self.approval))
        if isinstance(self.paths, str) or not all(each == "*" or each.startswith("/") for each in self.paths):
            raise UsageError(f'Allow(paths) is a list of paths such as "/repos/*", not {self.paths!r:.100}')
        put(self, "paths", tuple(self.paths))
        if isinstance(self.ports, int):
            put(self, "ports", (self.ports,))
        put(self, "ports", tuple(self.ports))
        for port in self.ports:
            check_count("Allow(ports): each", port, 1)
        check_count("Allow(max_bytes)", self.max_bytes, 0, optional=True)
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise UsageError(f"Allow(rate) is a number of requests per second, not {self.rate!r:.80}")
        if isinstance(self.private, str) or len(networks_of(self.private)) != len(self.private):
            raise UsageError(f"Allow(private) is a list of addresses and networks, not {self.private!r:.100}")
        put(self, "headers", _header_names(self.headers))
        if isinstance(self.secrets, str):
            raise UsageError('Allow(secrets) is {"Authorization": "Bearer {NAME}"} or ["NAME"], not a text')

    @classmethod
    def parse(cls, text: str) -> Allow:
        """Read `[METHOD,METHOD ]host[:port][/path][ +HEADER][ @ADDRESS]`, such as `GET,PUT *.example.com/* +X-Tenant`.

        `@10.0.0.0/8`: addresses that the host may have although they are not public.

        Raises:
            UsageError: it is not of this form.
        """
        words = text.split()
        headers, private = ([word[1:] for word in words if word[0] == mark] for mark in "+@")
        methods, _, place = " ".join(word for word in words if word[0] not in "+@").rpartition(" ")
        scheme, mark, rest = place.rpartition("://")
        host, slash, path = rest.partition("/")
        name, colon, port = host.rpartition(":")
        has_port = bool(colon) and port.isascii() and port.isdigit()
        options: dict[str, Any] = {}
        if methods:
            options["methods"] = tuple(each.strip().upper() for each in methods.split(","))
        if slash and path:
            options["paths"] = (f"/{path}",)
        own = f"{scheme}{mark}{(name if has_port else host).strip('[]')}"
        ports = (int(port),) if has_port else ()
        return cls(own, headers=headers, private=tuple(private), ports=ports, **options)

    def to_plain(self) -> dict[str, Any]:
        """Return what it says, as plain data. Of secrets, and of headers with them, it has the names."""
        fields = ("host", "methods", "paths", "ports", "headers", "approval", "max_bytes", "rate", "private", "sends")
        plain = {name: getattr(self, name) for name in fields} | {"reads": self.reads}
        plain["secret_names"] = sorted(self.header_secrets | self.body_secrets)
        plain["secret_headers"] = sorted(self.added_headers)
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
        return {name: value for name, value in lists.items() if value not in (None, [], "")}

    @property
    def name(self) -> str:
        """The host without its scheme."""
        return self.host.removeprefix("http://")

    @property
    def is_plain(self) -> bool:
        """True when the rule says http."""
        return self.host.startswith("http://")

    def is_for(self, host: str) -> bool:
        """True when the rule is about this host."""
        name = self.name
        return host.endswith(name[1:]) and len(host) > len(name) - 1 if name.startswith("*.") else host == name

    def problem(self, method: str, target: Target, paths: Iterable[str]) -> str:
        """Return why a request to its host is not one of these; empty when it is. `paths`: how it can be read."""
        ports = self.ports or (DEFAULT_PORTS["http" if self.is_plain else "https"],)
        if target.port not in ports:
            return f"port {target.port} is not allowed (ports={[*ports]})"
        if target.scheme == "http" and not (self.is_plain or self.ports):
            return 'only https is allowed (write Allow("http://...") for http)'
        if "*" not in self.methods and method not in self.methods:
            return f"the method {method} is not allowed (methods={[*self.methods]})"
        if not all(any(fnmatch.fnmatchcase(path, each) for each in self.paths) for path in paths):
            return f"the path is not allowed (paths={[*self.paths]})"
        return ""

    def needs_approval(self, method: str) -> bool:
        """True when somebody has to approve the request."""
        return method in self.approval or "*" in self.approval

    def allows_header(self, key: str) -> bool:
        """True when a script may send the header of this key."""
        return any(key.startswith(each[:-1]) if each.endswith("*") else key == each for each in self.headers)

    @property
    def added_headers(self) -> Mapping[str, str]:
        """What every request gets."""
        given = self.secrets if isinstance(self.secrets, Mapping) else {}
        return {name: value for name, value in given.items() if name != BODY}

    @property
    def header_secrets(self) -> frozenset[str]:
        """Names of secrets that headers may have."""
        given = self.added_headers.values() if isinstance(self.secrets, Mapping) else ()
        named = () if isinstance(self.secrets, Mapping) else self.secrets
        return frozenset({*named, *(name for value in given for name in PLACEHOLDER.findall(value))})

    @property
    def body_secrets(self) -> frozenset[str]:
        """Names of secrets that a body may have."""
        given = self.secrets.get(BODY, "") if isinstance(self.secrets, Mapping) else ""
        return frozenset(PLACEHOLDER.findall(given))


_ALLOWED_BY = "Allow(private=[...]), or @ADDRESS after the host on the command line, would allow it"


class RuleBook:
    """All rules of an `Egress`. The first that allows a request is the one that counts for it."""

    def __init__(self, rules: Sequence[Allow]) -> None:
        self._rules = tuple(rules)

    def judge(self, method: str, target: Target) -> Allow:
        """Return the rule that allows a request.

        Raises:
            ToolError: none does; its text says why, and how to allow it.
        """
        shown = f"{method} {target.origin}{target.path}"
        if not _METHOD.fullmatch(method) or method in NEVER:
            raise refused(f"the method {method!r:.40} is refused: {target.origin}")
        paths = readings(target)
        own = [rule for rule in self._rules if rule.is_for(target.host)]
        if not own:
            hosts = ", ".join(dict.fromkeys(rule.host for rule in self._rules)) or "none"
            raise refused(f'{shown}: no rule is about this host; Allow("{target.host}") would be one. Hosts: {hosts}')
        problems = [rule.problem(method, target, paths) for rule in own]
        for rule, problem in zip(own, problems, strict=True):
            if not problem:
                return rule
        raise refused(
            f"{shown}: {'; '.join(dict.fromkeys(problems))}. Its program can allow it: Egress(Allow(...)), or --allow"
        )

    def check_address(self, host: str, address: IPAddress) -> None:
        """Check an address of `host`.

        Raises:
            ToolError: it is not public, and no rule about the host allows it.
        """
        own = [rule for rule in self._rules if rule.is_for(host)]
        if any(rule.name == str(address) for rule in own):
            return
        reason = refusal(address, networks_of([each for rule in own for each in rule.private]))
        if reason is not None:
            shown = host if host == str(address) else f"{host} ({address})"
            raise refused(f"the address of {shown} is refused: {reason}; {_ALLOWED_BY}")


def readings(target: Target) -> list[str]:
    """Return every way in which a server may read the path: decoded once or more often, without parameters or query.

    Raises:
        ToolError: it is encoded too often, or has a control character.
    """
    found, path = [target.path], target.path
    for _ in range(MAX_DECODED):
        if (decoded := decoded_path(path)) == path:
            break
        found.append(path := decoded)
    else:
        raise refused(f"the path is percent-encoded more than {MAX_DECODED} times: {target.origin}{target.path[:200]}")
    found += [other for each in found for other in _other_readings(each)]
    if any(map(_CONTROL.search, found)):
        raise refused(f"the path has an encoded control character: {target.origin}{target.path[:200]}")
    found += [decoded_path(_QUERY.sub("", each)) for each in found if "?" in each or "#" in each]
    found += [decoded_path(_PARAMETERS.sub("", each)) for each in found if ";" in each]
    return [*dict.fromkeys(found)]


def _other_readings(path: str) -> Iterator[str]:
    """Yield what lenient servers make of a path: of bytes that UTF-8 forbids, `%u002e`, look-alikes, `... /`."""
    raw = unquote_to_bytes(path)
    short = _OVERLONG.sub(lambda match: _code(match[0]).encode("utf-8", "replace"), raw)
    if short != raw:
        yield decoded_path(short.decode("utf-8", "replace"))
    wide = _WIDE.sub(lambda match: chr(int(match[1], 16)), path)
    alike = _PADDED.sub("..", unicodedata.normalize("NFKC", unquote(wide)).translate(_ALIKE))
    if alike != unquote(path):
        yield decoded_path(alike)


def _code(letter: bytes) -> str:
    """Return the letter that more bytes than it needs stand for."""
    code = letter[0] & 0x03 if len(letter) == 2 else 0
    for byte in letter[1:]:
        code = code << 6 | byte & 0x3F
    return chr(code)


def _written(host: str) -> tuple[str, str]:
    """Return scheme and normal form of a host as a rule has it.

    Raises:
        UsageError: it is none.
    """
    form = 'a host such as "api.example.com", "*.example.com" or "http://10.0.0.7"'
    check_kind("Allow(host)", host, str)
    scheme, _, name = host.rpartition("://")
    is_wild, is_bare = name.startswith("*."), name.count(":") > 1 and not name.startswith("[")
    try:
        target = parse_url(f"https://{name[2:] if is_wild else f'[{name}]' if is_bare else name}/")
    except ToolError as exc:
        raise UsageError(f"Allow takes {form}, not {host!r:.100}: {exc}") from None
    is_plain_host = target.port == DEFAULT_PORTS["https"] and target.path == "/" and not target.query
    if scheme not in ("", "http", "https") or not is_plain_host or "/" in name or name.endswith(":443"):
        raise UsageError(f"Allow takes {form}, not {host!r:.100}; ports= and paths= are arguments of their own")
    if is_wild and (target.address is not None or "." not in target.host):
        raise UsageError(f"Allow: {host!r:.100} would be about too many hosts; name a domain below the top level")
    return scheme, f"*.{target.host}" if is_wild else target.host


def _methods(what: str, given: str | Sequence[str]) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name != "*" and (not _METHOD.fullmatch(name) or name in NEVER):
            raise UsageError(f'Allow({what}) has methods such as "GET", or "*" for all, not {name!r:.80}')
    return names


def header_key(name: str) -> str:
    """Return the name of a header as many servers read it: `_` and `-` are one."""
    return name.lower().replace("_", "-")


def is_of_connection(key: str) -> bool:
    """True for a header that is about the connection, which is the host's own, and not about the request."""
    return key in OF_CONNECTION or key.startswith("proxy-")


def _header_names(given: str | Sequence[str]) -> tuple[str, ...]:
    keys = tuple(map(header_key, (given,) if isinstance(given, str) else given))
    for key in keys:
        if not _HEADER.fullmatch(key):
            raise UsageError(f'Allow(headers) has names such as "X-Tenant" or "X-Acme-*", not {key!r:.80}')
        if is_of_connection(key):
            raise UsageError(f"Allow(headers): {key!r:.80} is about the connection, which is the host's own")
    return keys


def label_set(given: str | Sequence[str]) -> frozenset[str]:
    """Return labels of which one may be written as a text."""
    return frozenset((given,) if isinstance(given, str) else given)
