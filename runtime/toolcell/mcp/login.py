"""`Login`: gives each request to an MCP server its token, and gets one when the server asks for it.

The SDK's provider makes the steps of a login; requests that have a token do not wait for each other here, as they would
there. A login that fails fails the request that needed it, and not the connection.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import time
import warnings
import webbrowser
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio
import httpx2
from mcp import MCPDeprecationWarning
from mcp.client.auth import (
    AuthorizationCodeResult,
    OAuthClientProvider,
    OAuthFlowError,
    OAuthRegistrationError,
    OAuthTokenError,
)
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider, PrivateKeyJWTOAuthProvider
from mcp.client.auth.extensions.identity_assertion import IdentityAssertionOAuthProvider
from mcp.client.auth.utils import extract_field_from_www_auth, extract_scope_from_www_auth, issuers_match, union_scopes
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata
from pydantic import ValidationError

from toolcell.errors import McpServerError
from toolcell.mcp.address_guard import FAILED, OF_LOGIN, AddressGuard
from toolcell.mcp.oauth import Auth, ClientCredentials, IdentityAssertion, OAuth
from toolcell.mcp.requests import called
from toolcell.mcp.tokens import KeptLogin, store_of
from toolcell.support import daemon_threads
from toolcell.support.foreign_definitions import safe_text
from toolcell.support.log import quiet_loggers
from toolcell.support.secrets import search_for

# The SDK's OAuth providers, with what they leave to a client: tokens that stay, and who gets a secret.


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


# Send a person to a login page, and wait on loopback for their browser to come back with the code (RFC 8252).


PATH = "/callback"
MAX_REQUEST_LINE_BYTES = 16 * 1024
REQUEST_S = 10.0
MAX_CONNECTIONS = 32
"""At once; a login needs one."""

_PAGE = (
    b"HTTP/1.1 %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nCache-Control: no-store\r\n"
    b"X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n%s"
)


class Loopback:
    """A server on 127.0.0.1 that takes one answer: the one whose `state` is that of the login."""

    def __init__(self, name: str, open_browser: bool) -> None:
        self._name, self._open_browser = name, open_browser
        self._server: asyncio.Server | None = None
        self._state = ""
        self._answer: asyncio.Future[str] | None = None
        self._connections = 0

    async def listen(self, port: int) -> str:
        """Listen, on a free port for 0, and return the redirect URI.

        Raises:
            OSError: the port is taken.
        """
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=MAX_REQUEST_LINE_BYTES)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{PATH}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def ask(self, url: str) -> str:
        """Show `url` to the person, and return the URL that their browser came back to."""
        self._state = parse_qs(urlsplit(url).query).get("state", [""])[0]
        self._answer = asyncio.get_running_loop().create_future()
        sys.stderr.write(f"Log in at the MCP server {self._name}: open this page in a browser:\n\n  {url}\n\n")
        sys.stderr.flush()
        if self._open_browser and _has_browser():
            daemon_threads.start(lambda: webbrowser.open(url), name="toolcell-browser")
        return await self._answer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_S):
                    await self._answer_browser(await reader.readline(), writer)
        except (OSError, ValueError, TimeoutError):
            pass
        finally:
            self._connections -= 1
            writer.close()

    async def _answer_browser(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        method, _, rest = line.decode("ascii", "replace").partition(" ")
        target = rest.rpartition(" ")[0]
        state = parse_qs(urlsplit(target).query).get("state", [""])[0]
        # Any web page can make a browser send a request here; only the login page knows the state.
        is_ours = bool(self._state) and secrets.compare_digest(state.encode(), self._state.encode())
        if method != "GET" or urlsplit(target).path != PATH or not is_ours:
            status, text = b"400 Bad Request", b"This is not the answer of the login that is waited for.\n"
        else:
            status, text = b"200 OK", b"toolcell has got the answer of the login. You can close this window.\n"
        writer.write(_PAGE % (status, len(text), text))
        await writer.drain()
        if is_ours and self._answer is not None and not self._answer.done():
            self._answer.set_result(f"http://127.0.0.1{target}")


def _has_browser() -> bool:
    """Return whether a browser would open a window: in a terminal alone, it would take the terminal."""
    if sys.platform in ("win32", "darwin"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def read_answer(url: str) -> tuple[str, str | None, str | None]:
    """Return code, state and issuer of the URL that a browser came back to.

    Raises:
        McpServerError: the login was refused, or there is no code.
    """
    query = parse_qs(urlsplit(url).query)

    def first(name: str) -> str | None:
        return next(iter(query.get(name, ())), None)

    if (error := first("error")) is not None:
        raise McpServerError(f"the login was refused: {error[:80]}")
    code = first("code")
    if not code:
        raise McpServerError("the login came back without a code")
    return code, first("state"), first("iss")


MAX_TRIES = 3
"""Most tries of one request: as it is, with a refreshed token, after a login."""
MAX_STEP_UPS = 10
"""Logins for more rights, of one client: a server could ask without end."""
MIN_SECRET_CHARS = 8
"""Fewest characters of a value that is hidden; a shorter one, such as a port, would be found in many texts."""
MAX_SCOPE_CHARS = 2_000
MAX_PROBLEM_CHARS = 500

_NOWHERE = "http://127.0.0.1/callback"
"""Where nobody comes back to: nobody is asked."""
_NOBODY = 'nobody is logged in there; log in first, with "toolcell mcp login --mcp NAME=URL" or a program that asks'
_USELESS = "it refuses the token that it was logged in for"

_TELLING = ("mcp.client.auth.oauth2", "mcp.client.auth.utils")
"""The SDK logs tracebacks of logins that fail, with what servers sent: codes and secrets among it."""
_ERROR = re.compile(r'"error"\s*:\s*"([A-Za-z0-9_-]{1,60})"')


class Login(httpx2.Auth):
    """The login of one client at one server. It outlives connections."""

    def __init__(self, name: str, url: str, auth: Auth) -> None:
        """Prepare; nothing is sent.

        Raises:
            UsageError: tokens would be sent to the server in clear.
        """
        self._name, self._url, self._auth = name, url, auth
        self.guard = AddressGuard(url, auth.issuer, auth.private)
        self._kept = KeptLogin(url, store_of(auth.store, url, isinstance(auth, OAuth)))
        self._bearer: str | None = None
        self._is_loaded = False
        self._lock = anyio.Lock()
        self._granted = set[str]()
        """Scopes that were logged in for: a server that asks for them again would ask forever."""
        self._step_ups = 0
        self._asked_in_vain = False
        self._last_answer: httpx2.Response | None = None
        self.problem = ""
        """Why the last login failed; empty when it did not."""

    def begin_connection(self, *, by_person: bool = False) -> None:
        """Try again after a failure. Where a person was asked in vain, only if a person wants it."""
        self._asked_in_vain = self._asked_in_vain and not by_person
        if not self._asked_in_vain:
            self.problem = ""

    def hide(self, text: str) -> str:
        """Replace the tokens in a text that a model may read."""
        kept = self._kept.kept
        secrets = [kept.tokens.access_token, kept.tokens.refresh_token] if kept.tokens else []
        secrets += [kept.client.client_secret] if kept.client else []
        return search_for(frozenset(each for each in secrets if each and len(each) >= MIN_SECRET_CHARS)).hide(text)[0]

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Send a request with a token, and again with another one when the server wants that."""
        if not self._is_loaded:
            await self._load()
        for attempt in range(MAX_TRIES):
            refused = self._bearer
            if refused is not None:
                request.headers["Authorization"] = f"Bearer {refused}"
            response = yield request
            problem = self._refusal(response, attempt)
            if problem is None:
                return
            try:
                if problem:
                    raise McpServerError(problem)
                async with self._lock, self._kept.locked():
                    if self._bearer == refused:  # otherwise another request has logged in meanwhile
                        steps = self._steps(request, response, may_refresh=not attempt)
                        try:
                            outgoing = await anext(steps)
                            while True:
                                outgoing = await steps.asend((yield outgoing))
                        except StopAsyncIteration:
                            pass
                        finally:
                            await steps.aclose()
            except McpServerError as exc:
                if response.status_code == 401:
                    self.problem = str(exc)
                request.extensions = {**request.extensions, FAILED: str(exc)}
                yield request
                return

    def _refusal(self, response: httpx2.Response, attempt: int) -> str | None:
        """Return "" for an answer that a login is made for, why there is none, or None for every other answer."""
        if response.status_code == 401:
            return self.problem or (_USELESS if attempt == MAX_TRIES - 1 else "")
        if response.status_code != 403 or extract_field_from_www_auth(response, "error") != "insufficient_scope":
            return None
        wanted = set((extract_scope_from_www_auth(response) or "")[:MAX_SCOPE_CHARS].split())
        named = safe_text(" ".join(sorted(wanted)), MAX_PROBLEM_CHARS)
        if not wanted - self._granted:
            return f"it wants the scopes {named!r}, for which it was logged in already"
        if self._step_ups >= MAX_STEP_UPS:
            return f"it wants the scopes {named!r}; it has asked for more {MAX_STEP_UPS} times, and no more is given"
        self._granted |= wanted
        self._step_ups += 1
        return ""

    async def _load(self) -> None:
        try:
            kept = await self._kept.load()
        except McpServerError as exc:
            self.problem = str(exc)
        else:
            self._bearer = kept.tokens.access_token if kept.tokens is not None else None
        self._is_loaded = True

    async def _steps(
        self, request: httpx2.Request, refusal: httpx2.Response, may_refresh: bool
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Yield the requests of a login, until there is a token.

        Raises:
            McpServerError: it failed, and why.
        """
        auth = self._auth
        loopback = None
        if isinstance(auth, OAuth) and auth.ask and auth.redirect is None:
            loopback = Loopback(self._name, auth.open_browser)
        try:
            provider = await self._provider(loopback, may_refresh and refusal.status_code == 401)
            flow = provider.async_auth_flow(request)
            try:
                before = request.headers.get("Authorization")
                with self._translated():
                    outgoing = await anext(flow)
                is_refresh = outgoing is not request
                while outgoing is not request or request.headers.get("Authorization") == before:
                    if outgoing is request:
                        if isinstance(auth, OAuth) and not auth.ask:
                            raise McpServerError(_NOBODY)
                        answer, is_refresh = refusal, False
                    else:
                        outgoing.extensions[OF_LOGIN] = True
                        answer = yield outgoing
                        self._last_answer = answer
                        if (problem := answer.extensions.get(FAILED)) is not None:
                            raise McpServerError(problem)
                    if is_refresh and (answer.status_code >= 500 or answer.status_code == 429):
                        raise McpServerError(f"its token cannot be refreshed now: HTTP {answer.status_code}")
                    with self._translated():
                        outgoing = await flow.asend(answer)
            finally:
                with quiet_loggers(*_TELLING):
                    await flow.aclose()
        finally:
            if loopback is not None:
                loopback.close()
        self._bearer, self.problem = request.headers["Authorization"].partition(" ")[2], ""
        self._asked_in_vain = False
        if isinstance(provider, PersonProvider) and provider.context.current_tokens is not None:
            self._granted |= set((provider.context.current_tokens.scope or "").split())

    async def _provider(self, loopback: Loopback | None, may_refresh: bool) -> Provider:
        """Return a provider that knows what is kept."""
        auth, made = self._auth, None
        if not isinstance(auth, OAuth):
            made = program_provider(self._url, self._kept, auth)
            if isinstance(made, IdentityAssertionOAuthProvider):
                return made
        else:
            kept = await self._kept.load()
            redirect_uri = auth.redirect_uri or _NOWHERE
            if loopback is not None:
                known = [str(uri) for uri in (kept.client and kept.client.redirect_uris) or ()]
                redirect_uri = await _listening(loopback, auth.port, known)
                if known and redirect_uri not in known:
                    kept.client = None  # the server would refuse another port than the registered one
                    await self._kept.save()
            made = person_provider(self._url, self._kept, auth, redirect_uri)
            self._set_handlers(made, auth, loopback)
        await made.recall(self._bearer, may_refresh)
        return made

    def _set_handlers(self, provider: PersonProvider, auth: OAuth, loopback: Loopback | None) -> None:
        """Let the provider ask the person: the URL goes out, and the answer comes back, in one step."""
        answers: list[AuthorizationCodeResult] = []

        async def redirect(url: str) -> None:
            await self.guard.addresses(httpx2.URL(url))
            self._asked_in_vain = True
            ask = loopback.ask if loopback is not None else auth.redirect
            assert ask is not None
            try:
                with anyio.fail_after(auth.timeout_s):
                    code, state, issuer = read_answer(str(await called(ask, url, purpose="logins")))
            except TimeoutError:
                raise McpServerError(f"nobody logged in within {auth.timeout_s:g} s") from None
            except McpServerError:
                raise
            except Exception as exc:  # a function of the host program: its text may hold the code
                raise McpServerError(f"the login's redirect failed: {type(exc).__name__}") from None
            if state != httpx2.URL(url).params.get("state"):  # the SDK's error would show both
                raise McpServerError("the login failed: the login's state is wrong")
            answers.append(AuthorizationCodeResult(code=code, state=state, iss=issuer))

        async def answer() -> AuthorizationCodeResult:
            return answers.pop()

        provider.context.redirect_handler, provider.context.callback_handler = redirect, answer

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what a login can raise into an error of ours, without what servers said in it."""
        try:
            with quiet_loggers(*_TELLING):
                yield
        except StopAsyncIteration:
            raise McpServerError("the login gave no token") from None
        except (OAuthTokenError, OAuthRegistrationError, ValidationError) as exc:
            what = "register the client" if isinstance(exc, OAuthRegistrationError) else "give a token"
            raise McpServerError(f"the authorization server did not {what}{self._last_answer_text()}") from None
        except OAuthFlowError as exc:
            raise McpServerError(f"the login failed: {safe_text(self.hide(str(exc)), MAX_PROBLEM_CHARS)}") from None
        except (ValueError, TypeError, httpx2.InvalidURL) as exc:
            raise McpServerError(f"the login failed: {type(exc).__name__}") from None

    def _last_answer_text(self) -> str:
        """Return status and error code of the last answer: its text could hold what was sent."""
        if self._last_answer is None:
            return ""
        error = _ERROR.search(self._last_answer.text[:MAX_SCOPE_CHARS])
        return f": HTTP {self._last_answer.status_code}" + (f", {error[1]}" if error is not None else "")


async def _listening(loopback: Loopback, port: int, known: list[str]) -> str:
    """Listen where the client was registered, else on a free port.

    Raises:
        McpServerError: the port that the user wants is taken.
    """
    registered = next((httpx2.URL(uri).port for uri in known if httpx2.URL(uri).host == "127.0.0.1"), None)
    try:
        return await loopback.listen(port or registered or 0)
    except OSError as exc:
        if port or not registered:
            raise McpServerError(f"the login cannot listen on port {port} of 127.0.0.1: {exc.strerror}") from None
        return await loopback.listen(0)
