"""/metrics: numbers for Prometheus. A tenant gets its own; whoever runs the service gets those of all tenants."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toolcell.service.authentication import check_may, principal_of
from toolcell.service.principal import Scope
from toolcell.service.service import Service

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(request: Request) -> Response:
    """Return the metrics that the sender may see."""
    service: Service = request.app.state.service
    principal = await principal_of(request)
    if principal.may(Scope.OPERATOR):
        return Response(service.metrics.text(None), headers={"Content-Type": MEDIA_TYPE})
    check_may(principal, Scope.READ)
    return Response(service.metrics.text(principal.tenant), headers={"Content-Type": MEDIA_TYPE})


ROUTES = [Route("/metrics", metrics)]
