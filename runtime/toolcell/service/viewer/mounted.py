"""The viewer's pages beside the routes of the service."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from toolcell.service.service import Service
from toolcell.service.viewer import login_page, pool_page, sessions_pages, waiting_page
from toolcell.service.viewer.app import pages_of, protected
from toolcell.service.viewer.service_host import ServiceHost


class PagesRoute(BaseRoute):
    """Leads to the viewer for the paths of its pages, and for no other: what is unknown is the service's to answer."""

    def __init__(self, pages: Starlette) -> None:
        self.routes, self._app = pages.routes, protected(pages)

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
    more = [*login_page.routes(host), *waiting_page.ROUTES, *sessions_pages.ROUTES, *pool_page.ROUTES]
    return PagesRoute(pages_of(host, more))
