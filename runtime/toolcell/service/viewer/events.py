"""Server-sent events with parts of pages."""

from __future__ import annotations

from collections.abc import AsyncIterator


async def event_stream(events: AsyncIterator[tuple[int, str, str]]) -> AsyncIterator[str]:
    """Yield events as they are sent. Every line of a part is a line of its own, so no text can begin another event.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events
    """
    async for number, name, part in events:
        lines = "".join(f"data: {line}\n" for line in part.replace("\r", "").split("\n"))
        yield f"id: {number}\nevent: {name}\n{lines}\n"
