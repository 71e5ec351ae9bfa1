"""Read a request's body: no more than may be, no longer than may be, and checked against its model."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, TypeVar

import anyio
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from toolcell.service.problems import Problem
from toolcell.service.receiving import Reservation
from toolcell.support import daemon_threads
from toolcell.support.exact_json import read_json
from toolcell.support.text import one_line
from toolcell_bridge.wire.messages import MAX_ELEMENTS

Model = TypeVar("Model", bound=BaseModel)

MAX_ERRORS = 20
"""Most errors of one request that are told."""
MAX_LISTED_ERRORS: Final = 1000
"""Errors of one request that pydantic is asked to list. It can only list all of them, in one piece."""
MAX_SHOWN_CHARS = 80
SMALL_BYTES: Final = 65_536
"""A body this short is read in a millisecond or two. Others wait for a thread, so that nobody waits for them."""
MOST_ELEMENTS: Final = 2 * MAX_ELEMENTS
"""Most elements of a body: lists, objects, and what is in them. Each takes up to a hundred times as much memory as it
has bytes."""
_ELEMENT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]', re.DOTALL)
"""A text, or the beginning of something else. It matches every text, so it never goes back."""


async def read_body(request: Request, max_bytes: int, max_s: float, reservation: Reservation) -> bytes:
    """Return the body. `reservation` has its bytes, from when they come.

    Raises:
        Problem: it is too large (413) or too slow (408), or too much is on its way (503).
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(f"{int(declared)} bytes", max_bytes)
    body = bytearray()
    with anyio.move_on_after(max_s) as scope:
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(f"more than {max_bytes} bytes", max_bytes)
                if why := reservation.take(len(chunk)):
                    headers = {"Retry-After": "1", "Connection": "close"}
                    raise Problem(503, "busy_receiving", "Too much is on its way", f"{why}; try again", headers=headers)
        except ClientDisconnect:
            raise Problem(400, "incomplete_body", "The body ended early", f"after {len(body)} bytes") from None
    if scope.cancelled_caught:
        detail = f"{len(body)} bytes of it came in {max_s:g} seconds, which is the limit"
        raise Problem(408, "body_too_slow", "The body came too slowly", detail, headers={"Connection": "close"})
    return bytes(body)


def _too_large(size: str, limit: int) -> Problem:
    # The rest of the body is not read; so the connection cannot be used again.
    return Problem(
        413,
        "body_too_large",
        "The body is too large",
        f"it has {size}, and the limit is {limit}",
        headers={"Connection": "close"},
        limit=limit,
    )


def check_json(request: Request) -> None:
    """Check that the body is said to be JSON, and not compressed.

    Raises:
        Problem: it is said to be something else (415).
    """
    if (coding := request.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
        detail = f"Content-Encoding is {coding!r:.80}; send the body as it is"
        raise Problem(
            415, "unsupported_media_type", "The body is compressed", detail, headers={"Accept-Encoding": "identity"}
        )
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        detail = f"Content-Type is {kind!r:.80}; send application/json"
        headers = {"Accept": "application/json"}
        raise Problem(415, "unsupported_media_type", "The body is not JSON", detail, headers=headers)


async def parsed_body(model: type[Model], body: bytes, place: AbstractAsyncContextManager[None]) -> Model:
    """Return a JSON body as its model. A large one is read in `place`, and the event loop turns meanwhile.

    Raises:
        Problem: it has too many elements (413), is not JSON (400), or not of this form (422); or as from `place`.
    """
    if len(body) <= SMALL_BYTES:
        found = _as_model(partial(model.model_validate_json, body.removeprefix(codecs.BOM_UTF8)))
    else:
        async with place:
            found = await daemon_threads.run_large(_parsed_large, model, body)
    if isinstance(found, Problem):
        raise found
    return found


def _parsed_large(model: type[Model], body: bytes) -> Model | Problem:
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_ELEMENTS:  # of which some may be in texts
        for number, _ in enumerate(_ELEMENT.finditer(body)):
            if number >= MOST_ELEMENTS:
                return _too_large(f"more than {MOST_ELEMENTS} elements", MOST_ELEMENTS)
    try:
        given = read_json(body.decode("utf-8-sig"))
    except ValueError as exc:
        return _not_json(str(exc))
    return _as_model(partial(model.model_validate, given))


def _as_model(validate: Callable[[], Model]) -> Model | Problem:
    """Return a problem rather than raise it: its traceback would hold what was sent until the event loop frees it."""
    try:
        return validate()
    except ValidationError as exc:
        return wrong_fields(exc, "body")


def _not_json(why: str) -> Problem:
    return Problem(400, "invalid_json", "The body is not JSON", why)


def of_query(model: type[Model], request: Request) -> Model:
    """Return the query as its model.

    Raises:
        Problem: a parameter is wrong, unknown, or there twice (422).
    """
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            detail = f"the parameter {name[:MAX_SHOWN_CHARS]!r} is there twice"
            raise Problem(422, "invalid_request", "The request is wrong", detail)
        given[name] = value
    try:
        return model.model_validate(given)
    except ValidationError as exc:
        raise wrong_fields(exc, "query") from exc


def wrong_fields(error: ValidationError, where: str) -> Problem:
    """Return the answer that names each wrong field, its value and what it should be; where it is missing, in what."""
    if error.error_count() > MAX_LISTED_ERRORS:
        detail = (
            f"the {where} has {error.error_count()} errors; more than {MAX_LISTED_ERRORS} are not listed, send less"
        )
        return Problem(422, "invalid_request", "The request is wrong", detail)
    found = error.errors(include_url=False, include_context=False)[:MAX_ERRORS]
    if found[0]["type"] == "json_invalid":
        return _not_json(found[0]["msg"].removeprefix("Invalid JSON: "))
    errors = [
        {
            "field": ".".join(map(str, each["loc"]))[:200] or where,
            "message": one_line(each["msg"].removeprefix("Value error, "), 300),
            "value": shown_value(each["input"]),
        }
        for each in found
    ]
    first = errors[0]
    detail = f"{first['field']} = {first['value']}: {first['message']}"
    return Problem(422, "invalid_request", "The request is wrong", detail, errors=errors)


def shown_value(value: Any) -> str:
    """Return the beginning of a value as Python writes it."""
    if isinstance(value, dict):
        value = dict(itertools.islice(value.items(), MAX_ERRORS))
    elif isinstance(value, list):
        value = value[:MAX_ERRORS]
    return one_line(repr(value), MAX_SHOWN_CHARS)
