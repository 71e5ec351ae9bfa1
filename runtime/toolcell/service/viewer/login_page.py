"""Log in with a token of the service, and out."""

from __future__ import annotations

import functools
import re
import secrets
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from toolcell.service.principal import Scope
from toolcell.service.problems import Problem
from toolcell.service.viewer.protection import RefusedForm, read_form
from toolcell.service.viewer.rendering import render
from toolcell.service.viewer.service_host import ServiceHost, host_of
from toolcell.service.viewer.site import Visit, form
from toolcell.service.viewer.visitors import READ

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
    if not principal.may(Scope.READ):
        return _page(host, request, f"the pages need the scope {Scope.READ}, and this token does not have it", 403)
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


def routes(host: ServiceHost) -> list[Route]:
    """Return the routes of the login, which is the only page for strangers."""
    return [
        Route("/login", functools.partial(ask, host), methods=["GET"]),
        Route("/login", functools.partial(log_in, host), methods=["POST"]),
        form("/logout", log_out, READ),
    ]
