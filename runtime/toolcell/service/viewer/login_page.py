"""Log in with a token of the service, and out."""

from __future__ import annotations

import functools
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from toolcell.service.principal import Scope
from toolcell.service.problems import Problem
from toolcell.service.viewer.protection import RefusedForm, check_origin, read_fields
from toolcell.service.viewer.rendering import render
from toolcell.service.viewer.service_host import ServiceHost, host_of
from toolcell.service.viewer.site import Visit, form
from toolcell.service.viewer.visitors import READ

MAX_TOKEN_CHARS: Final = 16_000


async def ask(host: ServiceHost, request: Request) -> Response:
    """Show the form."""
    return RedirectResponse("/", 303) if host.is_open else _page()


async def log_in(host: ServiceHost, request: Request) -> Response:
    """Begin a login for who has a token that may read."""
    try:
        check_origin(request)
        token = (await read_fields(request)).get("token", "").strip()[:MAX_TOKEN_CHARS]
        principal = await host.principal_of(request, token)
    except RefusedForm as exc:
        return _page(str(exc), exc.status)
    except Problem as problem:
        return _page(problem.detail or problem.title, problem.status, problem.headers)
    if not principal.may(Scope.READ):
        return _page(f"the pages need the scope {Scope.READ}, and this token does not have it", 403)
    host.logins.end(request.cookies.get(host.cookie_name(request), ""))
    answer = RedirectResponse("/", 303)
    is_https = request.url.scheme == "https"
    name, cookie = host.cookie_name(request), host.logins.begin(token)
    answer.set_cookie(name, cookie, httponly=True, samesite="strict", secure=is_https, path="/")
    return answer


async def log_out(visit: Visit) -> Response:
    """End the login."""
    host, request = host_of(visit), visit.request
    name = host.cookie_name(request)
    host.logins.end(request.cookies.get(name, ""))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(name, path="/", httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer


def _page(problem: str = "", status: int = 200, headers: dict[str, str] | None = None) -> Response:
    values: dict[str, Any] = {"visitor": None, "links": {}, "path": "/login", "problem": problem}
    answer: Response = render("login", values, status, headers)
    return answer


def routes(host: ServiceHost) -> list[Route]:
    """Return the routes of the login, which is the only page for strangers."""
    return [
        Route("/login", functools.partial(ask, host), methods=["GET"]),
        Route("/login", functools.partial(log_in, host), methods=["POST"]),
        form("/logout", log_out, READ),
    ]
