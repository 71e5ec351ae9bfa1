"""What runs now, and how many sandboxes wait for work."""

from __future__ import annotations

from typing import Any

import anyio
from starlette.responses import RedirectResponse, Response

from toolcell.service.viewer.service_host import host_of
from toolcell.service.viewer.site import PageMissing, Visit, form, page
from toolcell.service.viewer.visitors import EXECUTE, READ


async def pool(visit: Visit) -> Response:
    return visit.page("pool", **await _state(visit))


async def state(visit: Visit) -> Response:
    return visit.part("pool", **await _state(visit))


async def _state(visit: Visit) -> dict[str, Any]:
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


ROUTES = (
    page("/pool", pool, READ),
    page("/pool/state", state, READ),
    form("/pool/runs/{ident}/cancel", cancel, EXECUTE),
)
