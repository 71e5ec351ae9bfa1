"""`Problem`: an answer that says what is wrong, as `application/problem+json`. Source: RFC 9457."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from toolcell.errors import (
    AuditError,
    QuotaExceeded,
    ResumeError,
    SandboxUnavailable,
    SessionError,
    ToolcellError,
    UnknownId,
    UsageError,
)
from toolcell.service.request_log import note
from toolcell.support.exact_json import json_text

MEDIA_TYPE: Final = "application/problem+json"

_STATUS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (QuotaExceeded, 429, "The quota is used up"),
    (SandboxUnavailable, 503, "No sandbox could be started"),
    (ResumeError, 409, "The run cannot be carried on"),
    (SessionError, 409, "The session cannot do this"),
    (UnknownId, 404, "No such id"),
    (UsageError, 422, "The request cannot work"),
    (AuditError, 503, "The run could not be recorded"),
    (ToolcellError, 500, "The service failed"),
)
"""toolcell's own errors: the first row that fits decides."""

_ROUTES: Final = {
    404: ("not_found", " is not a route; GET /v1/openapi.json lists the routes"),
    405: ("method_not_allowed", ": the path takes another method; the header Allow names it"),
}
"""What the router says itself, by status."""

RETRY_AFTER_S: Final = 1
"""For a machine that could start no sandbox just now."""


class Problem(Exception):
    """Ends a request with an error. `code` is stable across releases; `detail` is for a person."""

    def __init__(
        self,
        status: int,
        code: str,
        title: str,
        detail: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> None:
        """`extra`: further members of the answer, such as `errors`."""
        super().__init__(detail or title)
        self.status, self.code, self.title, self.detail = status, code, title, detail
        self.headers, self.extra = dict(headers or {}), extra

    def to_dict(self) -> dict[str, Any]:
        members = {"type": "about:blank", "title": self.title, "status": self.status, "code": self.code}
        return members | ({"detail": self.detail} if self.detail else {}) | self.extra

    def response(self) -> Response:
        return Response(json_text(self.to_dict()), self.status, self.headers, MEDIA_TYPE)


def problem_of(error: ToolcellError) -> Problem:
    status, title = next((status, title) for kind, status, title in _STATUS if isinstance(error, kind))
    headers = {}
    if isinstance(error, QuotaExceeded) and math.isfinite(error.retry_after_s):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return Problem(status, error.code, title, str(error), headers=headers)


def problem_in(http: HTTPConnection, error: ToolcellError) -> Problem:
    """Return the answer to an error of toolcell's, without the service's own folders: they are nobody's business."""
    problem = problem_of(error)
    for folder in http.app.state.service.config.folders:
        problem.detail = problem.detail.replace(str(folder), "...")
    return problem


async def answer_problem(request: Request, error: Exception) -> Response:
    problem = _problem(request, error)
    note(code=problem.code)
    return problem.response()


def _problem(request: Request, error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case ToolcellError():
            return problem_in(request, error)
        case HTTPException(status_code=status, detail=detail, headers=headers):
            code, cure = _ROUTES.get(status, ("http_error", ""))
            said = f"{request.method} {request.url.path[:200]}{cure}" if cure else ""
            return Problem(status, code, str(detail), said, headers=headers)
    return Problem(500, "internal_error", "The service failed", "its log has the reason")
