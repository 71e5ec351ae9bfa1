"""The OpenAPI 3.1 document, made of the rows of endpoints and of the models that check requests."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from toolcell.service.endpoints import BYTES, JSON, PART, TEXT, Endpoint
from toolcell.service.problems import MEDIA_TYPE as PROBLEM
from toolcell.service.routes.models import Health, ProblemAnswer
from toolcell_bridge import __version__

OPENAPI: Final = "/v1/openapi.json"
REF: Final = "#/components/schemas/{model}"

PUBLIC: Final = {
    "/healthz": ("Say that the service lives", Health),
    "/readyz": ("Say whether new runs may begin", Health),
    OPENAPI: ("Get this document", None),
}
"""What is answered without a token."""

ABOUT: Final = (
    'Errors are `application/problem+json` (RFC 9457) with a stable `code`. In values, `{"$bytes": base64}` stands for '
    'bytes, `{"$float": "nan"}` (`inf`, `-inf`) for those numbers, and `{"$dict": {...}}` for an object that would '
    "look like one of these."
)

Schemas = dict[Any, Any]
"""Reference to the schema of each model."""


@functools.cache
def document(endpoints: tuple[Endpoint, ...]) -> dict[str, Any]:
    bodies: set[type[BaseModel]] = {each.body for each in endpoints if each.body is not None}
    answers: set[type[BaseModel]] = {each.answer for each in endpoints if each.answer is not None}
    modes: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
        *((each, "validation") for each in _sorted(bodies)),
        *((each, "serialization") for each in _sorted(answers | {ProblemAnswer, Health})),
    ]
    schemas, definitions = models_json_schema(modes, ref_template=REF)
    references: Schemas = {model: schema for (model, _), schema in schemas.items()}
    paths: dict[str, Any] = {}
    for each in endpoints:
        path = each.path.replace(":path}", "}")
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, references)
    for path, (summary, model) in PUBLIC.items():
        content = {JSON: {"schema": references[model] if model is not None else {"type": "object"}}}
        answers_of = {"200": {"description": "OK", "content": content}}
        if path == "/readyz":
            answers_of["503"] = {"description": "Not ready", "content": content}
        paths[path] = {"get": {"operationId": _ident("get", path), "summary": summary, "responses": answers_of}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "toolcell", "version": __version__, "description": ABOUT},
        "security": [{}, {"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _sorted(models: Iterable[type[BaseModel]]) -> list[type[BaseModel]]:
    return sorted(models, key=lambda model: model.__name__)


def _ident(method: str, path: str) -> str:
    return "_".join([method, *re.findall(r"[a-z_]+", path.replace("/v1/", "/"))])


def _operation(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _ident(endpoint.method.lower(), endpoint.path.replace(":path}", "}")),
        "summary": endpoint.summary,
        "description": _needs(endpoint),
        "parameters": [*map(_path_parameter, re.findall(r"{(\w+)", endpoint.path)), *_query_parameters(endpoint.query)],
        "responses": {
            str(endpoint.status): _success(endpoint, schemas),
            "default": {"description": "What is wrong", "content": {PROBLEM: {"schema": schemas[ProblemAnswer]}}},
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[endpoint.body]}}}
    elif endpoint.takes != JSON:
        operation["requestBody"] = {"required": True, "content": {endpoint.takes: {"schema": {}}}}
    return operation


def _needs(endpoint: Endpoint) -> str:
    named = " and ".join(f"`{scope}`" for scope in endpoint.scopes)
    return f"Needs the scope{'s' if len(endpoint.scopes) > 1 else ''} {named}."


def _success(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    if endpoint.status == 204:
        return {"description": "Done"}
    content: dict[str, Any] = {}
    if endpoint.answer is not None:
        content[JSON] = {"schema": schemas[endpoint.answer]}
    elif endpoint.gives in (BYTES, TEXT):
        content[endpoint.gives] = {"schema": {"type": "string"} if endpoint.gives == TEXT else {}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "OK", "content": content}


def _path_parameter(name: str) -> dict[str, Any]:
    form: dict[str, Any] = {"minLength": 1} if name == "path" else {"pattern": f"^{PART}$"}
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", **form}}


def _query_parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    schema = model.model_json_schema()
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": each}
        for name, each in schema.get("properties", {}).items()
    ]
