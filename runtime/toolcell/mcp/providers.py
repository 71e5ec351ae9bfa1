"""The SDK's OAuth providers, with what they leave to a client: tokens that stay, and who gets a secret."""

from __future__ import annotations

import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
from mcp import MCPDeprecationWarning
from mcp.client.auth import OAuthClientProvider, OAuthFlowError
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider, PrivateKeyJWTOAuthProvider
from mcp.client.auth.extensions.identity_assertion import IdentityAssertionOAuthProvider
from mcp.client.auth.utils import issuers_match, union_scopes
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata

from toolcell.errors import McpServerError
from toolcell.mcp.oauth import ClientCredentials, IdentityAssertion, OAuth
from toolcell.mcp.requests import called
from toolcell.mcp.tokens import KeptLogin

S256 = "S256"


class _Remembering(OAuthClientProvider):
    """Begins where an earlier process left off, and sends a secret only to the authorization server that it is of."""

    _login: KeptLogin
    _scopes: str | None
    _only_issuer: str | None
    _has_own_secret: bool

    def configure(self, login: KeptLogin, auth: OAuth | ClientCredentials) -> None:
        """Take over what the SDK has no place for."""
        self._login, self._scopes = login, " ".join(auth.scopes) or None
        self._only_issuer = auth.issuer
        self._has_own_secret = isinstance(auth, ClientCredentials) or auth.client_secret is not None

    async def recall(self, refused: str | None, may_refresh: bool) -> None:
        """Load what is kept. A token that the server refused counts as expired, so that it is refreshed first."""
        kept = await self._login.load()
        await super()._initialize()
        self._initialized = True
        context = self.context
        context.oauth_metadata = kept.metadata
        context.protected_resource_metadata = kept.resource
        context.token_expiry_time = kept.expires_at
        if kept.tokens is not None and kept.tokens.access_token == refused and may_refresh:
            context.token_expiry_time = time.time() - 1
        elif not may_refresh:
            context.token_expiry_time = None
        self._set_client()

    def _set_client(self) -> None:
        """Use a client that was registered by hand."""

    def _select_authorization_server(self, advertised: list[str]) -> str:
        if self._only_issuer is None:
            return advertised[0]
        for each in advertised:
            if issuers_match(each, self._only_issuer):
                return each
        raise OAuthFlowError(f"the server names other authorization servers than {self._only_issuer}")

    async def _perform_authorization(self) -> httpx2.Request:
        self._check_receiver()
        self.context.client_metadata.scope = union_scopes(self._scopes, self.context.client_metadata.scope)
        methods = self.context.oauth_metadata and self.context.oauth_metadata.code_challenge_methods_supported
        if methods and S256 not in methods and self.context.redirect_handler is not None:
            raise OAuthFlowError("the authorization server does not support PKCE with S256")
        self._login.kept.metadata = self.context.oauth_metadata  # kept before the tokens that come from it
        self._login.kept.resource = self.context.protected_resource_metadata
        return await super()._perform_authorization()

    async def _refresh_token(self) -> httpx2.Request:
        self._check_receiver()
        return await super()._refresh_token()

    def _check_receiver(self) -> None:
        """Check that the client's own secret goes where it belongs: the MCP server names the receiver.

        Raises:
            OAuthFlowError: it would go elsewhere.
        """
        metadata = self.context.oauth_metadata
        if self._only_issuer is not None:
            if metadata is None or not issuers_match(str(metadata.issuer), self._only_issuer):
                raise OAuthFlowError(f"there is no metadata of the issuer {self._only_issuer}")
        elif self._has_own_secret and metadata is not None:  # without metadata, the receiver is the server itself
            receiver = httpx2.URL(str(metadata.token_endpoint)).host
            if receiver != httpx2.URL(self.context.server_url).host:
                raise OAuthFlowError(f"the client's secret would go to {receiver}; give issuer= if that is right")


class PersonProvider(_Remembering):
    """Authorization code with PKCE."""

    own_client: OAuthClientInformationFull | None = None

    def _set_client(self) -> None:
        if self.own_client is not None:
            self.context.client_info = self.own_client.model_copy()


class SecretProvider(_Remembering, ClientCredentialsOAuthProvider):
    """Client credentials with a secret."""


class SignedProvider(_Remembering, PrivateKeyJWTOAuthProvider):
    """Client credentials with a signed assertion."""


Provider = PersonProvider | SecretProvider | SignedProvider | IdentityAssertionOAuthProvider


def person_provider(url: str, login: KeptLogin, auth: OAuth, redirect_uri: str) -> PersonProvider:
    metadata = OAuthClientMetadata.model_validate(
        {
            "client_name": auth.client_name,
            "redirect_uris": [redirect_uri],
            "scope": " ".join(auth.scopes) or None,
        }
    )
    provider = PersonProvider(url, metadata, login, client_metadata_url=auth.client_metadata_url)
    provider.configure(login, auth)
    if auth.client_id is not None:
        method = "client_secret_basic" if auth.client_secret else "none"
        provider.own_client = OAuthClientInformationFull.model_validate(
            {
                "client_id": auth.client_id,
                "client_secret": auth.client_secret,
                "redirect_uris": [redirect_uri],
                "token_endpoint_auth_method": method,
            }
        )
    return provider


def program_provider(url: str, login: KeptLogin, auth: ClientCredentials | IdentityAssertion) -> Provider:
    scope = " ".join(auth.scopes) or None
    if isinstance(auth, IdentityAssertion):
        return IdentityAssertionOAuthProvider(
            url,
            login,
            auth.client_id,
            auth.client_secret,
            auth.issuer,
            _asserting(auth.assertion),
            scope,
            auth.method,
        )
    known: dict[str, Any] = {"server_url": url, "storage": login, "client_id": auth.client_id, "scope": scope}
    known["issuer"] = auth.issuer
    made: SecretProvider | SignedProvider
    with warnings.catch_warnings(action="ignore", category=MCPDeprecationWarning):  # `_check_receiver` does without one
        if auth.client_secret is not None:
            made = SecretProvider(client_secret=auth.client_secret, token_endpoint_auth_method=auth.method, **known)
        else:
            assert auth.assertion is not None
            made = SignedProvider(assertion_provider=_asserting(auth.assertion), **known)
    made.configure(login, auth)
    return made


def _asserting(function: Callable[..., Any]) -> Callable[..., Awaitable[str]]:
    async def ask(*args: str) -> str:
        try:
            given = await called(function, *args, purpose="providers of tokens")
        except Exception as exc:
            raise McpServerError(f"the login: its assertion was not made: {type(exc).__name__}") from None
        if not isinstance(given, str):
            raise McpServerError(f"the login: assertion returned {type(given).__name__}, and not a text")
        return given

    return ask
