"""The OpenAPI document: every route is in it, and what the service answers is what the document says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from starlette.routing import Route
from starlette.testclient import TestClient

from service_host import client_of, registry
from toolcell.service import ServiceConfig, TenantConfig, create_app
from toolcell.service.app import ENDPOINTS
from toolcell.service.openapi import PUBLIC

pytestmark = pytest.mark.isolation

EXAMPLES = 4
"""Requests that schemathesis makes for each operation."""


@pytest.fixture(scope="module")
def document(client: TestClient) -> Any:
    return client.get("/v1/openapi.json").json()


def test_every_route_is_in_the_document_and_nothing_else_is(client: TestClient, document: Any) -> None:
    app: Any = client.app
    routes = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, Route) and (route.path.startswith("/v1/") or route.path in PUBLIC)
        for method in (route.methods or set()) - {"HEAD"}
    }
    documented = {(method, path) for path, methods in document["paths"].items() for method in methods}

    assert document["openapi"] == "3.1.0"
    assert documented == routes
    assert len(documented) == len(ENDPOINTS) + len(PUBLIC)
    idents = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    assert len(idents) == len(set(idents))


def test_every_answer_of_a_tour_of_all_routes_is_what_the_document_says(client: TestClient, document: Any) -> None:
    seen = set()
    for method, path, body in tour(client):
        response = client.request(method, path, **body)
        template = template_of(document, path)
        seen.add((method, template))
        check(document, document["paths"][template][method.lower()], response)
        assert response.status_code < 300, (method, path, response.text)
    wanted = {(each.method, each.path.replace(":path}", "}")) for each in ENDPOINTS}
    assert wanted <= seen, wanted - seen


def template_of(document: Any, path: str) -> str:
    """Return the path of the document that a request goes to; the most exact one."""
    bare = path.partition("?")[0]
    fitting = [
        each
        for each in document["paths"]
        if re.fullmatch(re.sub(r"{\w+}", lambda match: ".+" if match[0] == "{path}" else "[^/]+", each), bare)
    ]
    return max(fitting, key=lambda each: (each.count("/"), -each.count("{")))


def check(document: Any, operation: Any, response: Any) -> None:
    """Compare an answer with the document."""
    said = operation["responses"].get(str(response.status_code)) or operation["responses"]["default"]
    if "content" not in said:
        assert not response.content
        return
    kind = response.headers["content-type"].partition(";")[0]
    schema = said["content"][kind]["schema"]
    if kind.endswith("json"):
        whole = {**schema, "components": document["components"]}
        problems = [str(each) for each in jsonschema_rs.validator_for(whole).iter_errors(response.json())]
        assert not problems, (response.request.url, problems[:3])


def tour(client: TestClient) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield a request for each route, after what it needs."""
    suspended = client.post("/v1/execute", json={"code": "call_tool('pay', amount=1)"}).json()["suspension"]
    of_draft = client.post("/v1/execute", json={"code": "call_tool('pay', amount=2)", "dry_run": True}).json()
    recorded = client.post("/v1/execute", json={"code": "1"}).json()
    yield "POST", "/v1/execute", {"json": {"code": "call_tool('double', number=1)", "preflight": True}}
    yield "POST", "/v1/plan", {"json": {"steps": [{"tool": "double", "args": {"number": 2}}]}}
    yield "GET", "/v1/suspended", {}
    yield "GET", f"/v1/suspended/{suspended['run_id']}", {}
    decided = {"decisions": {call["id"]: {"decision": "deny", "reason": "no"} for call in suspended["calls"]}}
    yield "POST", f"/v1/suspended/{suspended['run_id']}/decide", {"json": decided}
    yield "POST", f"/v1/drafts/{of_draft['draft_id']}/commit", {"json": {}}
    yield "POST", f"/v1/runs/commit-{of_draft['draft_id']}/revert", {}
    yield "GET", "/v1/runs?limit=2&tool=d*&since=1", {}
    yield "GET", f"/v1/runs/{recorded['run_id']}", {}
    yield "POST", f"/v1/runs/{recorded['run_id']}/replay", {"json": {}}
    yield "GET", "/v1/tools", {}
    yield "GET", "/v1/tools/double", {}
    yield "GET", "/v1/stubs", {}
    one = "/v1/sessions/tour"
    yield "POST", "/v1/sessions", {"json": {"name": "tour", "limits": {"wall_s": 5}, "idle_s": 60}}
    yield "GET", "/v1/sessions", {}
    yield "GET", one, {}
    yield "POST", f"{one}/execute", {"json": {"code": "open('out.txt', 'w').write('x')"}}
    yield "POST", f"{one}/files", {"json": {"files": [{"name": "b.txt", "text": "b"}]}}
    yield "PUT", f"{one}/files/c.txt", {"content": b"c"}
    yield "GET", f"{one}/files", {}
    yield "GET", f"{one}/files/c.txt", {}
    yield "POST", f"{one}/interrupt", {}
    yield "POST", f"{one}/fork", {"json": {}}
    yield "POST", f"{one}/abandon", {}
    yield "POST", f"{one}/reset", {}
    yield "DELETE", one, {}


CHECKS = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
)


@pytest.mark.slow
def test_random_requests_of_the_document_get_the_answers_of_the_document(tmp_path: Path) -> None:
    config = ServiceConfig(state=tmp_path / "state", defaults=TenantConfig(record=tmp_path / "runs"))
    app = create_app(config, registry=registry())
    bounded = settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with client_of(app, raise_server_exceptions=False) as client:
        schema = schemathesis.openapi.from_dict(client.get("/v1/openapi.json").json())
        tested = 0
        for result in schema.get_all_operations():
            operation = result.ok()

            @bounded
            @schemathesis_given(operation)
            def try_it(case: Any) -> None:
                response = client.request(**requested(case))
                case.validate_response(response, checks=CHECKS)

            try_it()
            tested += 1
    assert tested == len(ENDPOINTS) + len(PUBLIC)


def schemathesis_given(operation: Any) -> Any:
    """Draw requests of an operation, right ones and wrong ones."""
    from hypothesis import given, strategies

    modes = schemathesis.GenerationMode
    right, wrong = (operation.as_strategy(generation_mode=mode) for mode in (modes.POSITIVE, modes.NEGATIVE))
    return given(case=strategies.one_of(right, wrong))


def requested(case: Any) -> dict[str, Any]:
    """Return the arguments of a client for a case."""
    kwargs = case.as_transport_kwargs(base_url="http://localhost")
    return {name: kwargs[name] for name in ("method", "url", "headers", "params", "json", "content") if name in kwargs}
