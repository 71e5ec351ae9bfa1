"""What is around every page: who asks, which log, and what is answered when something is wrong."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toolcell.errors import AuditError, ToolcellError, UsageError
from toolcell.service.log_reader import LogReader
from toolcell.service.problems import Problem
from toolcell.service.viewer.protection import RefusedForm, read_form
from toolcell.service.viewer.rendering import render
from toolcell.service.viewer.visitors import ViewerHost, Visitor


class PageMissing(Exception):
    """There is no such page."""


class Visit:
    """One request of a person who was let in."""

    def __init__(self, request: Request, host: ViewerHost, visitor: Visitor) -> None:
        self.request, self.host, self.visitor = request, host, visitor
        self.fields: Mapping[str, str] = {}
        """Fields of the form, where one was sent."""

    async def log(self) -> LogReader:
        return await self.host.log_of(self.visitor)

    def page(self, name: str, /, status: int = 200, **values: Any) -> Response:
        return self._answer(name, status, values)

    def part(self, name: str, /, headers: Mapping[str, str] | None = None, **values: Any) -> Response:
        return self._answer(f"parts/{name}", 200, values, headers)

    def _answer(
        self, name: str, status: int, values: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Response:
        around = {"visitor": self.visitor, "links": self.host.links, "path": self.request.url.path}
        answer: Response = render(name, {**around, **values}, status, headers)
        return answer


Page = Callable[[Visit], Awaitable[Response]]


def page(path: str, show: Page, scope: str) -> Route:
    """Return the route of a page that people with a scope may see."""
    return Route(path, functools.partial(_visit, show, (scope,), False), methods=["GET"])


def form(path: str, act: Page, *scopes: str) -> Route:
    """Return the route of a form that people with these scopes may send. The form must come from a page of theirs."""
    return Route(path, functools.partial(_visit, act, scopes, True), methods=["POST"])


async def _visit(act: Page, scopes: tuple[str, ...], is_form: bool, request: Request) -> Response:
    host: ViewerHost = request.app.state.viewer_host
    known = await host.visitor(request)
    if isinstance(known, Response):
        return known
    visit = Visit(request, host, known)
    try:
        if is_form:
            visit.fields = await read_form(request, known.form_token)
        if missing := [scope for scope in scopes if not known.can(scope)]:
            return problem(visit, HTTPStatus.FORBIDDEN, f"this needs the scope {missing[0]}, and you do not have it")
        return await act(visit)
    except RefusedForm as exc:
        return problem(visit, HTTPStatus(exc.status), str(exc))
    except PageMissing as exc:
        return problem(visit, HTTPStatus.NOT_FOUND, str(exc))
    except Problem as exc:
        return problem(visit, HTTPStatus(exc.status), exc.detail or exc.title)
    except UsageError as exc:
        return problem(visit, HTTPStatus.BAD_REQUEST, str(exc))
    except AuditError as exc:
        return problem(visit, HTTPStatus.CONFLICT, str(exc))
    except ToolcellError as exc:
        return problem(visit, HTTPStatus.SERVICE_UNAVAILABLE, str(exc))


def problem(visit: Visit, status: HTTPStatus, why: str) -> Response:
    """Return a page that says what is wrong, or only the text where a part of a page was asked for."""
    name = "parts/problem" if visit.request.headers.get("hx-request") == "true" else "problem"
    return visit._answer(name, status, {"title": status.phrase, "why": why})
