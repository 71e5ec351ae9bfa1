"""/healthz, /readyz and /metrics: is it alive, may new runs begin, and numbers for Prometheus.

Probes say nothing else, and need no token. A tenant gets its own numbers; whoever runs the service gets those of all.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toolcell.service.authentication import check_may, principal_of
from toolcell.service.endpoints import json_response
from toolcell.service.principal import Scope
from toolcell.service.runs_under_way import RETRY_S
from toolcell.service.service import Service


async def healthz(request: Request) -> Response:
    """Say that the event loop turns."""
    return json_response({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Say whether new runs may begin. The first sandboxes are started for whoever asks."""
    service: Service = request.app.state.service
    if service.is_ready and await service.is_warm() and service.is_ready:
        return json_response({"status": "ready"})
    response = json_response({"status": "not ready"}, 503)
    response.headers["Retry-After"] = str(RETRY_S)
    return response


MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(request: Request) -> Response:
    """Return the metrics that the sender may see."""
    service: Service = request.app.state.service
    principal = await principal_of(request)
    if principal.may(Scope.OPERATOR):
        return Response(service.metrics.text(None), headers={"Content-Type": MEDIA_TYPE})
    check_may(principal, Scope.READ)
    return Response(service.metrics.text(principal.tenant), headers={"Content-Type": MEDIA_TYPE})


ROUTES = [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]
