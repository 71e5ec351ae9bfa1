"""/healthz and /readyz: is it alive, and may new runs begin? For probes; they say nothing else, and need no token."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toolcell.service.endpoints import json_response
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


ROUTES = [Route("/healthz", healthz), Route("/readyz", readyz)]
