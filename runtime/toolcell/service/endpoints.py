"""`Endpoint`: one row for each thing that can be asked under /v1. Routes and the OpenAPI document are made of the rows.

A handler gets a request that was checked: its sender is known and may ask this, its body and query have their form.
A body is read when its key, if it has one, is known to be new.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toolcell.service.admission import place
from toolcell.service.authentication import principal_of
from toolcell.service.bodies import SMALL_BYTES, check_json, of_query, parsed_body, read_body
from toolcell.service.idempotency import HEADER, KeyedRequest
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem
from toolcell.service.receiving import Reservation
from toolcell.service.request_log import note
from toolcell.service.revocations import AskWho
from toolcell.service.routes.models import NoQuery, RequestModel
from toolcell.support.exact_json import exact_json_text

if TYPE_CHECKING:
    from toolcell.service.service import Service

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
TEXT: Final = "text/plain"

PART: Final = r"[A-Za-z0-9_.:-]{1,200}"
"""A name in a path. Files of a workspace have a `path` instead, which is looked up and never opened here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest(KeyedRequest):
    service: Service
    body: Any
    """The endpoint's `body` model; None when it has none."""
    query: Any
    """The endpoint's `query` model."""
    ask_who: AskWho
    """Whose the sender's credential is now: what takes long asks again."""
    queue_until: float = math.inf
    """Until when it waits for a place, if it had one while its body was read."""
    reservation: Reservation | None = None
    """What it holds of the bytes that its tenant may send at once."""

    @property
    def path(self) -> Mapping[str, Any]:
        """The parts of the path that stand for something."""
        return self.http.path_params


Handler = Callable[[ApiRequest], Awaitable[Response | Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    scope: Scope
    handler: Handler
    summary: str
    body: type[BaseModel] | None = None
    query: type[RequestModel] = NoQuery
    answer: type[BaseModel] | None = None
    status: int = 200
    takes: str = JSON
    """Media type of the body. Only a body of JSON is read before the handler."""
    gives: str = JSON
    """Media type of the answer."""
    streams: bool = False
    """It also answers with server-sent events."""
    reads_runs: bool = False
    """It tells of runs that others may have made: it needs the scope `read` besides its own."""
    is_keyed: bool = False
    """With an Idempotency-Key, it is carried out once."""

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """What its sender must be allowed."""
        return (self.scope, Scope.READ) if self.reads_runs else (self.scope,)

    def route(self) -> Route:
        async def answer(http: Request) -> Response:
            service: Service = http.app.state.service
            principal = await principal_of(http, *self.scopes)
            reservation = service.receiving.reservation(principal.tenant)
            try:
                request = await self._checked(http, service, principal, reservation)
                if HEADER not in http.headers or self.method in ("GET", "PUT", "DELETE"):
                    return await self._handled(request)
                return await self._once(request)
            finally:
                reservation.give_back()

        return Route(self.path, answer, methods=[self.method])

    async def _handled(self, request: ApiRequest) -> Response:
        admission, tenant = request.service.admission, request.tenant.name
        if self.method == "GET":
            async with place(request.http, admission.turn(tenant)):
                pass
        if self.body is not None:
            until = admission.deadline(tenant) if len(request.sent) > SMALL_BYTES else math.inf
            body = await parsed_body(self.body, request.sent, place(request.http, admission.slot(tenant)))
            request = replace(request, body=body, queue_until=until)
        found = await self.handler(request)
        return found if isinstance(found, Response) else await request.tenant.answers.response(found, self.status)

    async def _once(self, request: ApiRequest) -> Response:
        """Carry out a request that has a key, or answer what became of it."""
        if not self.is_keyed:
            raise Problem(400, "invalid_key", "The Idempotency-Key is wrong", f"{self.path} takes no Idempotency-Key")
        run_id = request.path.get("run_id", request.run_id)  # a run that is carried on keeps its id
        asked = replace(request, run_id=run_id)
        return await request.service.idempotent.answer(asked, lambda http: self._handled(replace(request, http=http)))

    async def _checked(
        self, http: Request, service: Service, principal: Principal, reservation: Reservation
    ) -> ApiRequest:
        _check_path(http.path_params)
        note(**{name: value for name, value in http.path_params.items() if name != "path"})
        query = of_query(self.query, http)
        sent = b""
        if self.body is not None:
            check_json(http)
            sent = await read_body(http, service.config.body_bytes, service.config.body_s, reservation)
        tenant = await service.tenants.get(principal.tenant)
        return ApiRequest(
            http=http,
            service=service,
            principal=principal,
            tenant=tenant,
            body=None,
            query=query,
            ask_who=partial(principal_of, http),
            sent=sent,
            reservation=reservation,
        )


def _check_path(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name != "path" and (not re.fullmatch(PART, value) or value in (".", "..")):
            detail = f"{name} = {value!r:.80}: want 1 to 200 letters, digits and _.:-"
            raise Problem(422, "invalid_request", "The request is wrong", detail, field=name)


def json_response(data: object, status: int = 200) -> Response:
    """Return small data as JSON from which it can be read again."""
    return Response(exact_json_text(data), status, media_type=JSON)
