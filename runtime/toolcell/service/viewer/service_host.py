"""The viewer at `/` of `toolcell serve`: each person sees what is their tenant's, and may do what their token may."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from toolcell.audit import RecordedRun, load_verifiers
from toolcell.control import Replay
from toolcell.service.authentication import LoopbackAuthenticator, identified
from toolcell.service.endpoints import ApiRequest
from toolcell.service.idempotency import never
from toolcell.service.log_reader import LogReader
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem
from toolcell.service.revocations import AskWho
from toolcell.service.run_arguments import replay_context
from toolcell.service.running import under_way
from toolcell.service.service import Service
from toolcell.service.tenants import Tenant
from toolcell.service.viewer.live_runs import LiveRuns
from toolcell.service.viewer.protection import form_token
from toolcell.service.viewer.site import Visit
from toolcell.service.viewer.verification import Verifications
from toolcell.service.viewer.visitors import LINKS, Logins, Visitor

MORE_LINKS: Final = {"/waiting": "Approvals", "/sessions": "Sessions", "/pool": "Pool"}


class ServiceHost:
    """What the pages show of a service."""

    def __init__(self, service: Service) -> None:
        self.links: Mapping[str, str] = {**LINKS, **MORE_LINKS}
        self.verifications = Verifications()
        self.service = service
        self.logins = Logins()
        self.live = LiveRuns()
        self._secret = secrets.token_bytes(32)
        self._logs: dict[str, LogReader] = {}

    async def close(self) -> None:
        """End the runs that were started on a page, and close the logs."""
        await self.live.close()
        for log in self._logs.values():
            await log.close()
        self._logs.clear()

    # Who asks

    @property
    def is_open(self) -> bool:
        """True where programs of this machine are let in without a token, and so is their user."""
        return isinstance(self.service.authenticator, LoopbackAuthenticator)

    @staticmethod
    def cookie_name(request: Request, *, of_form: bool = False) -> str:
        """Return the name of the cookie, or of that which a browser has before its login, for the form of the login.

        Only a host itself, over TLS, can set one that begins with `__Host-`.
        """
        if request.url.scheme == "https":
            return "__Host-toolcell-form" if of_form else "__Host-toolcell"
        return f"toolcell-{'form' if of_form else 'login'}-{request.url.port or ''}"

    def login_form_token(self, form_id: str) -> str:
        """Return the token that the form of the login carries for a browser with this cookie."""
        return form_token(self._secret, f"login:{form_id}")

    async def visitor(self, request: Request) -> Visitor | Response:
        """Return who asks; send somebody unknown to the login."""
        if self.is_open:
            return await self._local(request)
        cookie = request.cookies.get(self.cookie_name(request), "")
        login = self.logins.find(cookie)
        if login is None:
            return _to_login(request)
        try:
            principal = await self.principal_of(request, login.credential)
        except Problem:
            self.logins.end(cookie)
            return _to_login(request)
        return self._visitor(principal, cookie)

    async def principal_of(self, request: Request, credential: str) -> Principal:
        """Return whose a credential is.

        Raises:
            Problem: it is nobody's, or too many were wrong.
        """
        client = request.client.host if request.client is not None else ""
        return await identified(self.service, {"authorization": f"Bearer {credential}"}, client)

    async def _local_principal(self, request: Request) -> Principal:
        client = request.client.host if request.client is not None else ""
        # Our forms say `Origin: null`, as pages do that send no referrer; `check_origin` looks at who sent them.
        headers = {name: value for name, value in request.headers.items() if (name, value) != ("origin", "null")}
        return await identified(self.service, headers, client)

    async def _local(self, request: Request) -> Visitor | Response:
        try:
            principal = await self._local_principal(request)
        except Problem as problem:
            return Response(f"{problem.detail}\n", problem.status, media_type="text/plain")
        return self._visitor(principal, "")

    def _visitor(self, principal: Principal, cookie: str) -> Visitor:
        scopes = frozenset(str(scope) for scope in Scope if principal.may(scope))
        name = principal.subject if cookie else ""
        return Visitor(principal.tenant, name, scopes, form_token(self._secret, cookie), principal.subject)

    def asking(self, request: Request) -> AskWho:
        """Return what says whose the credential of a request is now, however the browser's login goes on."""
        if self.is_open:
            return partial(self._local_principal, request)
        login = self.logins.find(request.cookies.get(self.cookie_name(request), ""))
        return partial(self.principal_of, request, login.credential if login is not None else "")

    # What is theirs

    async def tenant_of(self, visitor: Visitor) -> Tenant:
        return await self.service.tenants.get(visitor.tenant)

    async def api_request(self, request: Request, visitor: Visitor, *, outlives: bool = False) -> ApiRequest:
        """Return the request as the rest of the service takes it. One that `outlives` its answer is not ended by it."""
        http = Request(request.scope, never) if outlives else request
        return ApiRequest(
            http=http,
            service=self.service,
            principal=principal_of_visitor(visitor),
            tenant=await self.tenant_of(visitor),
            body=None,
            query=None,
            ask_who=self.asking(http),
        )

    async def log_of(self, visitor: Visitor) -> LogReader:
        await self.service.admission.wait_until_free(visitor.tenant)
        if (found := self._logs.get(visitor.tenant)) is not None:
            return found
        config = (await self.tenant_of(visitor)).config
        keys = load_verifiers(config.record_config.key, is_needed=False)
        return self._logs.setdefault(visitor.tenant, LogReader(config.record, keys))

    async def replay(self, request: Request, visitor: Visitor, run: RecordedRun, trust: str) -> Replay:
        """Run it again within what the tenant may use."""
        api = await self.api_request(request, visitor)
        async with under_way(api):
            return await api.tenant.replays.make(run, trust, replay_context(api, run))

    async def stub_of(self, visitor: Visitor, tool: str) -> str:
        registry = (await self.tenant_of(visitor)).registry
        return registry.subset([tool]).to_python() if registry.has(tool) else ""


def principal_of_visitor(visitor: Visitor) -> Principal:
    """Return a person as the rest of the service takes them."""
    return Principal(visitor.tenant, visitor.subject, frozenset(Scope(each) for each in visitor.scopes))


def host_of(visit: Visit) -> ServiceHost:
    """Return the service behind a page that only a service has."""
    assert isinstance(visit.host, ServiceHost)
    return visit.host


def _to_login(request: Request) -> Response:
    """Send a browser to the login, whatever part of a page it asked for."""
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"HX-Redirect": "/login"})
    return RedirectResponse("/login", 303)
