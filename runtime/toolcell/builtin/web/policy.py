"""What the program allows on the web: the public web but for some of it, or what an `Egress` allows.

Decides over plain data; nothing is sent here.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from toolcell._version import __version__
from toolcell.egress.addresses import IPAddress, IPNetwork, networks_of, refusal
from toolcell.egress.rules import readings
from toolcell.egress.urls import Target
from toolcell.errors import ToolError, UsageError
from toolcell.support.checks import check_count, check_kind, check_seconds
from toolcell.tools import ToolOptions

if TYPE_CHECKING:
    from toolcell.egress import Egress

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

    def matches(self, method: str, host: str, path: str) -> bool:
        named = self.methods is None or method in self.methods
        return named and fnmatch.fnmatchcase(host, self.host) and fnmatch.fnmatchcase(path, self.path)


Rules = Sequence[UrlRule | str]


def _rules(given: Rules, what: str) -> tuple[UrlRule, ...]:
    if isinstance(given, str):
        raise UsageError(f"{what} is a list of rules, not {given!r:.100}; write [...] around it")
    return tuple(each if isinstance(each, UrlRule) else UrlRule.parse(each) for each in given)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPolicy:
    """Which requests are allowed, and how large answers may be. The defaults allow the public web."""

    egress: Egress | None = None
    """With it, only what one of its rules allows is requested, with the secrets of the rule. It has ports and private
    addresses of its own, and robots.txt is not asked for."""
    deny: Rules = ()
    """Never requested. Texts are read by `UrlRule.parse`."""
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
        if self.egress is not None:
            from toolcell.egress import Egress  # needs httpx

            check_kind("WebPolicy(egress)", self.egress, Egress, cure='write Egress(Allow("api.example.com"))')
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
        paths = readings(target) if self.deny else ()
        if any(rule.matches(method, host, path) for rule in _rules(self.deny, "deny") for path in paths):
            raise _not_permitted(f"{method} {target.origin}{target.path} is refused by a rule of the program")
        if self.egress is not None:
            return
        if self.ports is not None and target.port not in self.ports:
            allowed = ", ".join(map(str, sorted(self.ports)))
            raise _not_permitted(f"port {target.port} of {host} is not allowed; allowed are {allowed}")
        is_local = any(host == name or host.endswith(f".{name}") for name in LOCAL_NAMES)
        if is_local and not self.is_private_host(host) and not self.private_networks:
            raise _not_permitted(f"{host} is a name of the own network, and only public hosts can be fetched")
        if target.address is not None:
            self.check_address(host, target.address)

    def labelled(self, options: ToolOptions) -> ToolOptions:
        """Return the options of a tool with the data-flow labels of the rules added."""
        if self.egress is None:
            return options
        sends, reads = self.egress.labels
        return replace(options, sends=options.sends | sends, reads=options.reads | reads)

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
