"""What the program allows on the web: hosts, methods, paths, ports, sizes, and the credentials that it attaches.

Decides over plain data; nothing is sent here.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from toolcell import __version__
from toolcell.egress.addresses import IPAddress, IPNetwork, networks_of, refusal
from toolcell.egress.urls import Target, decoded_path
from toolcell.errors import ToolError, UsageError
from toolcell.tools import Secrets, check_count, check_seconds

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

LOCAL_NAMES: Final = ("localhost", "localdomain", "local", "internal", "home.arpa")
"""Names of one's own network, and everything below them. Source: RFC 6761, RFC 6762, RFC 8375, ICANN on `.internal`."""

USER_AGENT: Final = f"Mozilla/5.0 (compatible; toolcell/{__version__})"


@dataclass(frozen=True, slots=True)
class UrlRule:
    """Which requests a rule is about. `*` stands for any text, `*.example.com` for every host below example.com."""

    host: str = "*"
    path: str = "*"
    methods: frozenset[str] | None = None
    """None: every method."""

    @classmethod
    def parse(cls, text: str) -> UrlRule:
        """Read `[METHOD,METHOD ]host[/path]`, such as `GET,HEAD api.example.com/v1/*`.

        Raises:
            UsageError: it is not of this form.
        """
        methods, space, rest = text.strip().rpartition(" ")
        host, slash, path = rest.partition("/")
        names = frozenset(name.strip().upper() for name in methods.split(",")) if space else None
        if not host or ":" in host or (names is not None and not names <= set(METHODS)):
            form = '"[METHOD,METHOD ]host[/path]", such as "GET api.example.com/v1/*"'
            raise UsageError(f"a rule about URLs is written {form}, not {text!r:.100}")
        return cls(host.lower().rstrip("."), f"/{path}" if slash else "*", names)

    def is_about_host(self, host: str) -> bool:
        """True when the rule is about some request to `host`."""
        return fnmatch.fnmatchcase(host, self.host)

    def matches(self, method: str, host: str, path: str) -> bool:
        """True when the rule is about this request."""
        named = self.methods is None or method in self.methods
        return named and self.is_about_host(host) and fnmatch.fnmatchcase(path, self.path)


Rules = Sequence[UrlRule | str]


def _rules(given: Rules, what: str) -> tuple[UrlRule, ...]:
    if isinstance(given, str):
        raise UsageError(f"{what} is a list of rules, not {given!r:.100}; write [...] around it")
    return tuple(each if isinstance(each, UrlRule) else UrlRule.parse(each) for each in given)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPolicy:
    """Which requests are allowed, and how much they may bring. The defaults allow the public web."""

    allow: Rules = ()
    """With rules here, only what one of them is about is requested. Texts are read by `UrlRule.parse`."""
    deny: Rules = ()
    """Never requested, whatever `allow` says."""
    ports: frozenset[int] | None = frozenset({80, 443, 8080, 8443})
    """None: every port."""
    private: Sequence[str] = ()
    """Addresses, networks and names of hosts that may be reached although they are not public."""
    max_redirects: int = 5
    timeout_s: float = 15.0
    """For one fetch: robots.txt, redirects, waiting for its host's turn and reading the body included."""
    max_body_bytes: int = 1024 * 1024
    """Most bytes of one body after decompression. The rest is not read."""
    robots: bool = True
    """Ask the host's robots.txt (RFC 9309). Requests with a credential are made without asking."""
    interval_s: float = 0.1
    """Between the starts of two requests to one host."""
    user_agent: str = USER_AGENT

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow", _rules(self.allow, "WebPolicy(allow)"))
        object.__setattr__(self, "deny", _rules(self.deny, "WebPolicy(deny)"))
        if isinstance(self.private, str):
            raise UsageError(f"WebPolicy(private) is a list, not {self.private!r:.100}; write [...] around it")
        object.__setattr__(self, "private", tuple(name.lower().rstrip(".") for name in self.private))
        object.__setattr__(self, "ports", None if self.ports is None else frozenset(self.ports))
        check_count("WebPolicy(max_redirects)", self.max_redirects, 0)
        check_count("WebPolicy(max_body_bytes)", self.max_body_bytes, 1)
        check_seconds("WebPolicy(timeout_s)", self.timeout_s)
        if not 0 <= self.interval_s < math.inf:
            raise UsageError(f"WebPolicy(interval_s) must be a number of seconds from 0, not {self.interval_s!r:.80}")

    @property
    def private_networks(self) -> tuple[IPNetwork, ...]:
        """Those of `private` that are addresses or networks."""
        return networks_of(self.private)

    def is_private_host(self, host: str) -> bool:
        """True when `private` names this host: its addresses are not checked."""
        return host in self.private

    def check(self, method: str, target: Target) -> None:
        """Check what can be known before an address is looked up.

        Raises:
            ToolError: this request is not allowed.
        """
        host = target.host
        if self.ports is not None and target.port not in self.ports:
            allowed = ", ".join(map(str, sorted(self.ports)))
            raise _not_permitted(f"port {target.port} of {host} is not allowed; allowed are {allowed}")
        is_local = any(host == name or host.endswith(f".{name}") for name in LOCAL_NAMES)
        if is_local and not self.is_private_host(host) and not self.private_networks:
            raise _not_permitted(f"{host} is a name of the own network, and only public hosts can be fetched")
        if target.address is not None:
            self.check_address(host, target.address)
        paths = {target.path, decoded_path(target.path)}
        if any(rule.matches(method, host, path) for rule in _rules(self.deny, "deny") for path in paths):
            raise _not_permitted(f"{method} {target.origin}{target.path} is refused by a rule of the program")
        allow = _rules(self.allow, "allow")
        if allow and not all(any(rule.matches(method, host, path) for rule in allow) for path in paths):
            hosts = ", ".join(sorted({rule.host for rule in allow})[:10])
            raise _not_permitted(f"{method} {target.origin}{target.path} is not among what the program allows: {hosts}")

    def check_address(self, host: str, address: IPAddress) -> None:
        """Check an address of `host`.

        Raises:
            ToolError: it is not public, and the program allows neither it nor the host.
        """
        reason = None if self.is_private_host(host) else refusal(address, self.private_networks)
        if reason is not None:
            shown = host if host == str(address) else f"{host} ({address})"
            raise _not_permitted(f"the address of {shown} is refused: {reason}")


def _not_permitted(message: str) -> ToolError:
    return ToolError(message, code="not_permitted")


@dataclass(frozen=True, slots=True)
class Credential:
    """Headers that the host program adds to requests to one host. No script, model, log or error sees them."""

    host: str
    """A name, or `*.example.com` for every host below it."""
    headers: Mapping[str, str] = field(repr=False)
    path: str = "*"
    """Only for paths that match."""
    plain_http: bool = False
    """Sent over http too, where everybody on the way can read it."""

    def __post_init__(self) -> None:
        rule = UrlRule.parse(self.host)
        if rule.methods is not None or rule.path != "*" or rule.host.strip("*.") == "":
            raise UsageError(f"Credential(host) is the name of a host or *.name, not {self.host!r:.100}")
        object.__setattr__(self, "host", rule.host)
        for name, value in self.headers.items():
            if any(char in f"{name}{value}" for char in "\r\n\0") or not f"{name}{value}".isascii() or not name:
                raise UsageError(f"Credential for {self.host}: the header {name!r:.80} is not one line of ASCII")

    def is_for(self, target: Target) -> bool:
        """True when a request to `target` gets these headers."""
        paths = (target.path, decoded_path(target.path))
        rule = UrlRule(self.host, self.path)
        return (target.scheme == "https" or self.plain_http) and all(
            rule.matches("GET", target.host, path) for path in paths
        )


def headers_for(credentials: Sequence[Credential], target: Target) -> dict[str, str]:
    """Return what is attached to a request to `target`; later credentials win."""
    return {name: value for each in credentials if each.is_for(target) for name, value in each.headers.items()}


def secrets_of(credentials: Sequence[Credential]) -> Secrets:
    """Return every text by which a credential could be recognised in what a server sends back."""
    found = {part for each in credentials for value in each.headers.values() for part in _secret_parts(value)}
    return Secrets({str(number): part for number, part in enumerate(sorted(found)) if len(part) >= 4})


def _secret_parts(value: str) -> set[str]:
    """The header as it is; of `Bearer TOKEN` the token; of `Basic ...` what it encodes, and the password in that."""
    scheme, space, token = value.strip().partition(" ")
    parts = {value.strip(), token.strip() if space else value.strip()}
    if space and scheme.lower() == "basic":
        try:
            plain = base64.b64decode(token.strip(), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return parts
        parts |= {plain, plain.partition(":")[2]}
    return parts - {""}
