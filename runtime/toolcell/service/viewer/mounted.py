"""The viewer's pages beside the routes of a service: the login, what runs now, and those of `sessions_pages` and
`waiting_page`."""

from __future__ import annotations

import functools
import re
import secrets
from typing import Any, Final

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from toolcell.service.principal import Scope as TokenScope
from toolcell.service.problems import Problem
from toolcell.service.service import Service
from toolcell.service.viewer import sessions_pages, waiting_page
from toolcell.service.viewer.app import pages_of
from toolcell.service.viewer.protection import ProtectedPages, RefusedForm, read_form
from toolcell.service.viewer.rendering import render
from toolcell.service.viewer.service_host import ServiceHost, host_of
from toolcell.service.viewer.site import PageMissing, Visit, form, page
from toolcell.service.viewer.visitors import EXECUTE, READ

# Log in with a token of the service, and out.

MAX_TOKEN_CHARS: Final = 16_000
FORM_ID: Final = re.compile(r"[A-Za-z0-9_-]{43}")
"""In the cookie of a browser that has seen the form. The token in the form belongs to it."""


async def ask(host: ServiceHost, request: Request) -> Response:
    return RedirectResponse("/", 303) if host.is_open else _page(host, request)


async def log_in(host: ServiceHost, request: Request) -> Response:
    try:
        fields = await read_form(request, host.login_form_token(_form_id(host, request) or secrets.token_urlsafe(32)))
        token = fields.get("token", "").strip()[:MAX_TOKEN_CHARS]
        principal = await host.principal_of(request, token)
    except RefusedForm as exc:
        return _page(host, request, str(exc), exc.status)
    except Problem as problem:
        return _page(host, request, problem.detail or problem.title, problem.status, problem.headers)
    if not principal.may(TokenScope.READ):
        return _page(host, request, f"the pages need the scope {READ}, and this token does not have it", 403)
    host.logins.end(request.cookies.get(host.cookie_name(request), ""))
    answer = RedirectResponse("/", 303)
    is_https = request.url.scheme == "https"
    name, cookie = host.cookie_name(request), host.logins.begin(token)
    answer.set_cookie(name, cookie, httponly=True, samesite="strict", secure=is_https, path="/")
    answer.delete_cookie(
        host.cookie_name(request, of_form=True), path="/", httponly=True, samesite="strict", secure=is_https
    )
    return answer


async def log_out(visit: Visit) -> Response:
    host, request = host_of(visit), visit.request
    name = host.cookie_name(request)
    host.logins.end(request.cookies.get(name, ""))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(name, path="/", httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer


def _form_id(host: ServiceHost, request: Request) -> str:
    """Return what the cookie of the form holds; empty where there is none that we could have made."""
    found = request.cookies.get(host.cookie_name(request, of_form=True), "")
    return found if FORM_ID.fullmatch(found) else ""


def _page(
    host: ServiceHost, request: Request, problem: str = "", status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    known = _form_id(host, request)  # kept, so that a form in another tab stays good
    form_id = known or secrets.token_urlsafe(32)
    values: dict[str, Any] = {"visitor": None, "links": {}, "path": "/login", "problem": problem}
    values["login_token"] = host.login_form_token(form_id)
    answer: Response = render("login", values, status, headers)
    if not known:
        is_https = request.url.scheme == "https"
        name = host.cookie_name(request, of_form=True)
        answer.set_cookie(name, form_id, httponly=True, samesite="strict", secure=is_https, path="/")
    return answer


# What runs now, and how many sandboxes wait for work.


async def pool(visit: Visit) -> Response:
    return visit.page("pool", **await _pool_now(visit))


async def pool_state(visit: Visit) -> Response:
    return visit.part("pool", **await _pool_now(visit))


async def _pool_now(visit: Visit) -> dict[str, Any]:
    host = host_of(visit)
    tenant = await host.tenant_of(visit.visitor)
    now = anyio.current_time()
    runs = [each for each in host.service.runs if each.tenant == tenant.name]
    return {
        "runs": [(f"{id(each):x}", each, now - each.started) for each in sorted(runs, key=lambda run: run.started)],
        "pool": tenant.runtime.pool,
        "sessions": sum(session is not None for _, session in await tenant.sessions.list()),
        "may_cancel": visit.visitor.can(EXECUTE),
    }


async def cancel(visit: Visit) -> Response:
    host, ident = host_of(visit), visit.request.path_params["ident"]
    for each in host.service.runs:
        if f"{id(each):x}" == ident and each.tenant == visit.visitor.tenant:
            each.cancel.set()
            return RedirectResponse("/pool", 303)
    raise PageMissing("no such run is under way")


def own_pages(host: ServiceHost) -> list[Route]:
    """Return the routes of this module. The login is the only page for strangers."""
    return [
        Route("/login", functools.partial(ask, host), methods=["GET"]),
        Route("/login", functools.partial(log_in, host), methods=["POST"]),
        form("/logout", log_out, READ),
        page("/pool", pool, READ),
        page("/pool/state", pool_state, READ),
        form("/pool/runs/{ident}/cancel", cancel, EXECUTE),
    ]


class PagesRoute(BaseRoute):
    """Leads to the viewer for the paths of its pages, and for no other: what is unknown is the service's to answer."""

    def __init__(self, pages: Starlette) -> None:
        self.routes, self._app = pages.routes, ProtectedPages(pages)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Say whether the path is one of a page, whatever the method."""
        if scope["type"] != "http":
            return Match.NONE, {}
        found = any(route.matches(scope)[0] is not Match.NONE for route in self.routes)
        return (Match.FULL if found else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def viewer_of(service: Service) -> PagesRoute:
    """Return the route to the viewer of a service. The service closes it at its end."""
    host = ServiceHost(service)
    service.at_close.append(host.close)
    return PagesRoute(pages_of(host, [*own_pages(host), *waiting_page.ROUTES, *sessions_pages.ROUTES]))
