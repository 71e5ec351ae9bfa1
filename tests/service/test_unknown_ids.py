"""Every route that takes an id answers one that nobody has with 404, in the shape of all problems."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from rows import each_row
from toolcell.service.app import ENDPOINTS
from toolcell.service.endpoints import Endpoint
from toolcell.service.problems import MEDIA_TYPE

CODES = {
    "/v1/drafts": {"no_such_id"},
    "/v1/runs": {"no_such_run", "no_such_id"},
    "/v1/sessions": {"no_such_session"},
    "/v1/suspended": {"not_suspended"},
    "/v1/tools": {"no_such_tool"},
}
"""What an answer may say, by the beginning of the path."""
BODIES: dict[str, dict[str, Any]] = {"execute": {"code": "1"}, "fork": {"name": "copy"}, "files": {"files": []}}
"""By the end of the path; others take `{}`."""
DECIDE = "/v1/suspended/{run_id}/decide"
"""The service does not know ids of runs that were decided about. Of all of them it says 409, as of a second decision."""

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


def paths() -> list[Any]:
    found = [each for each in ENDPOINTS if "{" in each.path]
    return [pytest.param(each, id=f"{each.method} {each.path}") for each in found]


@pytest.mark.slow
@each_row("ident", ["0123456789abcdef", "0123456789abcdef" * 2, "nobody", "run:1", "commit-" + "0" * 16])
@each_row("endpoint", paths())
def test_an_id_that_nobody_has_is_not_found(client: TestClient, endpoint: Endpoint, ident: str) -> None:
    path = endpoint.path.replace("{path:path}", "a.txt")
    for name in ("{run_id}", "{journal_id}", "{draft_id}", "{name}"):
        path = path.replace(name, ident)
    assert "{" not in path
    body = {"json": BODIES.get(path.rpartition("/")[2], {})} if endpoint.body is not None else {}

    answer = client.request(endpoint.method, path, **body)

    said = answer.json()
    assert answer.headers["content-type"] == MEDIA_TYPE, said
    assert answer.status_code == said["status"] == (409 if endpoint.path == DECIDE else 404), said
    assert said["code"] in CODES["/".join(path.split("/")[:3])]
    assert said["title"] and ident in said["detail"]
