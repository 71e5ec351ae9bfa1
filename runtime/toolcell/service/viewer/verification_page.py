"""Verify the log: what was edited, removed, moved or cut off, and where."""

from __future__ import annotations

from starlette.responses import RedirectResponse, Response

from toolcell.service.viewer.site import Visit, form, page
from toolcell.service.viewer.visitors import READ


async def verification(visit: Visit) -> Response:
    log = await visit.log()
    return visit.page("verify", check=visit.host.verifications.newest(log), log=log)


async def state(visit: Visit) -> Response:
    """Return how far the check has got."""
    return visit.part("verification", check=visit.host.verifications.newest(await visit.log()))


async def begin(visit: Visit) -> Response:
    check = visit.host.verifications.begin(await visit.log())
    if visit.request.headers.get("hx-request") == "true":
        return visit.part("verification", check=check)
    return RedirectResponse("/verify", 303)


ROUTES = (page("/verify", verification, READ), page("/verify/state", state, READ), form("/verify", begin, READ))
