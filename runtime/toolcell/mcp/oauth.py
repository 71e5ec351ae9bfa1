"""How a client logs in at an MCP server over HTTP: `add_mcp_server(..., auth=OAuth())`, or without a person.

Plain data, checked. `login` carries it out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit

from toolcell.errors import UsageError
from toolcell.support.checks import check_kind, check_seconds

LOGIN_TIMEOUT_S = 300.0

Redirect = Callable[[str], Awaitable[str] | str]
"""`redirect(url)`, awaited or plain: sends a person to `url`; returns the URL that their browser came back to."""
Assertion = Callable[[str], Awaitable[str] | str]
"""`assertion(audience)`, awaited or plain: a signed JWT that names the client to this issuer."""
IdentityGrant = Callable[[str, str], Awaitable[str] | str]
"""`assertion(audience, resource)`, awaited or plain: the identity provider's grant for this issuer and this server."""


class LoginStore(Protocol):
    """Where tokens and the client's registration are kept, as one text. Both may be async, or plain."""

    def load(self) -> Awaitable[str | None] | str | None:
        """Return what was saved last; None when nothing was."""
        ...

    def save(self, text: str) -> Awaitable[None] | None:
        """Keep `text`. It holds secrets."""
        ...


Store = LoginStore | str | Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuth:
    """A person logs in, in a browser: authorization code with PKCE. The client registers itself, if it has no id."""

    redirect: Redirect | None = None
    """None: the URL is printed and opened in a browser, which comes back to a server on loopback."""
    redirect_uri: str | None = None
    """Where the browser comes back to, with a `redirect` of your own."""
    port: int = 0
    """Port of the server on loopback; 0 takes a free one. A client that was registered by hand needs a fixed one."""
    open_browser: bool = True
    ask: bool = True
    """False: nobody is asked. Tokens of an earlier login are used and refreshed, and without any the login fails."""
    client_id: str | None = None
    """Id of a client that was registered before."""
    client_secret: str | None = field(default=None, repr=False)
    client_metadata_url: str | None = None
    """An https URL with the client's metadata: its id, where the authorization server takes such ids."""
    client_name: str = "toolcell"
    issuer: str | None = None
    """The only authorization server to log in at. Without it, the one that the MCP server names; a `client_secret`
    then goes only to one on the MCP server's own host."""
    scopes: Sequence[str] = ()
    """Asked for beside those that the server asks for."""
    private: Sequence[str] = ()
    """Addresses, networks and hosts that an authorization server may have although they are not public."""
    store: Store = None
    """A file, or an object with `load` and `save`. None: a file of the user, which only they may read."""
    timeout_s: float = LOGIN_TIMEOUT_S
    """How long a person is waited for."""

    def __post_init__(self) -> None:
        if (self.redirect is None) != (self.redirect_uri is None):
            raise UsageError("OAuth: redirect and redirect_uri belong together; give both, or neither")
        if self.client_secret is not None and self.client_id is None:
            raise UsageError("OAuth: a client_secret needs its client_id")
        document = self.client_metadata_url
        if document is not None and not _is_document(document):
            raise UsageError(f"OAuth: client_metadata_url is an https URL with a path, not {document!r:.100}")
        check_kind("OAuth(port)", self.port, int)
        check_seconds("OAuth(timeout_s)", self.timeout_s)
        _check_common("OAuth", self.issuer, self.scopes, self.private)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCredentials:
    """A program logs in as itself, with a secret or a signed assertion; no person is asked."""

    client_id: str
    client_secret: str | None = field(default=None, repr=False)
    assertion: Assertion | None = None
    """In place of a secret: `private_key_jwt`. See `signed_assertion`."""
    method: Literal["client_secret_basic", "client_secret_post"] = "client_secret_basic"
    issuer: str | None = None
    """Whose client this is. Without it, credentials go only to an authorization server on the MCP server's own host."""
    scopes: Sequence[str] = ()
    private: Sequence[str] = ()
    store: Store = None
    """None: tokens are kept as long as the connection."""

    def __post_init__(self) -> None:
        if (self.client_secret is None) == (self.assertion is None):
            raise UsageError("ClientCredentials: give a client_secret or an assertion, and not both")
        _check_common("ClientCredentials", self.issuer, self.scopes, self.private)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityAssertion:
    """A company's identity provider knows the user: its grant is exchanged for a token (SEP-990)."""

    client_id: str
    client_secret: str = field(repr=False)
    issuer: str
    assertion: IdentityGrant
    method: Literal["client_secret_basic", "client_secret_post"] = "client_secret_post"
    scopes: Sequence[str] = ()
    private: Sequence[str] = ()
    store: Store = None
    """None: tokens are kept as long as the connection."""

    def __post_init__(self) -> None:
        if not self.client_secret:
            raise UsageError("IdentityAssertion: a client_secret is needed")
        _check_common("IdentityAssertion", self.issuer, self.scopes, self.private)


Auth = OAuth | ClientCredentials | IdentityAssertion


def auth_of(given: object) -> Auth | None:
    """Return what `auth=` means.

    Raises:
        UsageError: it means nothing.
    """
    if given is None or isinstance(given, OAuth | ClientCredentials | IdentityAssertion):
        return given
    if given == "oauth":
        return OAuth()
    kinds = '"oauth", OAuth(...), ClientCredentials(...) or IdentityAssertion(...)'
    raise UsageError(f"auth is {kinds} of toolcell.mcp.oauth, not of type {type(given).__name__}")


def signed_assertion(client_id: str, private_key: str, algorithm: str = "RS256") -> Assertion:
    """Return an `assertion` that signs with a key in PEM format. It needs the extra `mcp`."""
    from mcp.client.auth.extensions.client_credentials import SignedJWTParameters

    signing = SignedJWTParameters(
        issuer=client_id, subject=client_id, signing_key=private_key, signing_algorithm=algorithm
    )
    return signing.create_assertion_provider()


def _is_document(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" and bool(parts.hostname) and parts.path not in ("", "/")


def _check_common(what: str, issuer: str | None, scopes: Sequence[str], private: Sequence[str]) -> None:
    if issuer is not None and urlsplit(issuer).scheme not in ("http", "https"):
        raise UsageError(f"{what}: issuer is the https URL of an authorization server, not {issuer!r:.100}")
    for name, given in (("scopes", scopes), ("private", private)):
        if isinstance(given, str):
            raise UsageError(f"{what}: {name} is a list of texts, not {given!r:.100}; write [...] around it")
