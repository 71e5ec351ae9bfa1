"""What a server asks of its client, between a call and its answer: a person's answer, or a model's.

Refused, unless the host's program gave a function for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from mcp.client import ClientRequestContext
from mcp_types import (
    INVALID_REQUEST,
    CreateMessageRequestParams,
    CreateMessageResult,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    ErrorData,
    TextContent,
)

from toolcell.support import daemon_threads
from toolcell.tools.strangers import safe_text

MAX_QUESTION_CHARS = 2_000

Elicit = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any] | None] | Mapping[str, Any] | None]
"""`elicit(message, schema)`, awaited or plain: the answer, an object that fits the schema; None declines."""
Sample = Callable[[Mapping[str, Any]], Awaitable[str] | str]
"""`sample(params)`, awaited or plain: a model's text for the params of `sampling/createMessage`."""


def defaults_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default values of a form's fields: what an answer leaves out has them."""
    fields = schema.get("properties")
    if not isinstance(fields, Mapping):
        return {}
    return {
        name: field["default"] for name, field in fields.items() if isinstance(field, Mapping) and "default" in field
    }


async def called(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of the host returns. A plain one runs in a thread: it may wait for a person."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    found = await daemon_threads.run_sync(partial(function, *args), abandon_on_cancel=True)
    return await found if inspect.isawaitable(found) else found


def request_callbacks(elicit: Elicit | None, sample: Sample | None) -> dict[str, Any]:
    """Return the callbacks of an MCP client. The capability of what is refused is not declared."""

    async def answer(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult | ErrorData:
        assert elicit is not None
        if not isinstance(params, ElicitRequestFormParams):
            return ErrorData(code=INVALID_REQUEST, message="only forms can be answered here")
        try:
            given = await called(elicit, safe_text(params.message, MAX_QUESTION_CHARS), params.requested_schema)
        except Exception as exc:
            return ErrorData(code=INVALID_REQUEST, message=f"the question was not answered: {type(exc).__name__}")
        if given is None:
            return ElicitResult(action="decline")
        return ElicitResult(action="accept", content=defaults_of(params.requested_schema) | dict(given))

    async def write(
        context: ClientRequestContext, params: CreateMessageRequestParams
    ) -> CreateMessageResult | ErrorData:
        assert sample is not None
        try:
            text = await called(sample, params.model_dump(mode="json", by_alias=True, exclude_none=True))
        except Exception as exc:
            return ErrorData(code=INVALID_REQUEST, message=f"no text was written: {type(exc).__name__}")
        return CreateMessageResult(role="assistant", content=TextContent(type="text", text=text), model="host")

    callbacks: dict[str, Any] = {}
    if elicit is not None:
        callbacks["elicitation_callback"] = answer
    if sample is not None:
        callbacks["sampling_callback"] = write
    return callbacks
