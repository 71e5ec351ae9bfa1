"""What the service adds to uvicorn's HTTP protocol: deadlines for slow clients, and one write for each answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from toolcell.json_text import json_text
from toolcell.service.problems import Problem

CONNECTION: Final = "toolcell.connection"
"""Key of the protocol in the scope of its requests."""


LINGER_S: Final = 1.0
"""How long a connection too many is read from and not answered: closed at once, its client might not see the answer."""

_REFUSAL_BODY: Final = json_text(Problem(503, "too_many_connections", "Too many connections").to_dict()).encode()
_REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_REFUSAL_BODY), _REFUSAL_BODY)
)


def timed_protocol(head_s: float, write_s: float, most: int) -> type[H11Protocol]:
    """Return a protocol that closes connections whose request line and headers take longer than `head_s`, and those
    whose client reads nothing of an answer for `write_s`. Connections past `most` are refused; the others go on."""
    return type("TimedHttpProtocol", (_TimedProtocol,), {"head_s": head_s, "write_s": write_s, "most": most})


class _TimedProtocol(H11Protocol):
    head_s: float
    write_s: float
    most: int
    _is_refused = False
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    on_gone: Callable[[], None] | None = None
    """Called when the client of the request under way goes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, and not for ever."""
        super().connection_made(_OneWrite(transport, self.loop))  # type: ignore[arg-type]
        if len(self.connections) > self.most:
            self._is_refused = True
            self.transport.write(_REFUSAL)
            self._late = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request. From its first byte on, its head has a deadline."""
        if self._is_refused:
            return
        if self._late is None and self._is_idle:
            self._expect_head()
        super().data_received(data)

    def handle_events(self) -> None:
        """Begin requests that are whole up to their bodies."""
        super().handle_events()
        if not self._is_idle:
            self._late = _ended(self._late)
            self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over: its head is here."""
        self._late = _ended(self._late)
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever answers that nobody reads."""
        self._late, self._stuck = _ended(self._late), _ended(self._stuck)
        super().connection_lost(exc)
        if self.on_gone is not None and not self._is_idle:
            self.on_gone()

    def on_response_complete(self) -> None:
        """Go on with the next request. Where it has begun, its head has a deadline."""
        super().on_response_complete()
        if self._is_idle and self._late is None and self.conn.trailing_data[0]:
            self._expect_head()

    def pause_writing(self) -> None:
        """The client reads more slowly than the answer is written."""
        super().pause_writing()
        if self._stuck is None:
            self._stuck = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read on."""
        self._stuck = _ended(self._stuck)
        super().resume_writing()

    @property
    def _is_idle(self) -> bool:
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(self.head_s, self._close_late)

    def _close_late(self) -> None:
        self._late = None
        if self._is_idle:
            self.transport.close()


def _ended(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer; return what stands for none."""
    if timer is not None:
        timer.cancel()
    return None


class _OneWrite:
    """A transport that writes what comes within one step of the event loop at once: each write is a system call."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write with the next step of the event loop."""
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        """Write several pieces."""
        self.write(b"".join(pieces))

    def close(self) -> None:
        """Close after what was written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            if not self._transport.is_closing():
                self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
