"""What our servers add to uvicorn's HTTP protocol: deadlines for slow clients, a most of connections among which silent
ones make room, and one write for each answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTION: Final = "toolcell.connection"
"""Key of the protocol in the scope of its requests."""

LINGER_S: Final = 1.0
"""How long a connection too many is read from and not answered: closed at once, its client might not see the answer."""

LINGERING: Final = 64
"""Most of those at once. Further ones are closed without an answer."""

CONNECTIONS: Final = 512
"""At once, of a server without settings of its own."""

FILES_KEPT: Final = 2
"""Connections take at most one in so many of the descriptors that a process may open. Sandboxes need the others."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a server's clients may take of it."""

    head_s: float = 10.0
    """Seconds in which the line and the headers of a request must arrive."""
    body_s: float | None = 30.0
    """Seconds in which its body must. None: whoever reads it sees to that."""
    write_s: float = 60.0
    """Seconds after which the connection of a client that reads nothing of its answer is ended."""
    connections: int = CONNECTIONS
    """At once."""
    refusal: bytes = b"too many connections"
    """The body of the answer to one more, when none is silent."""
    refusal_type: bytes = b"text/plain"


def possible_connections(wanted: int) -> int:
    """Return how many of these connections this process has descriptors for.

    Where it runs out of them, it accepts nobody, for as long as they are taken.
    """
    try:
        import resource
    except ImportError:  # pragma: no cover  # not on Windows
        return wanted
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if allowed == resource.RLIM_INFINITY else max(1, min(wanted, allowed // FILES_KEPT))


def bounded_protocol(limits: HttpLimits) -> type[H11Protocol]:
    """Return a protocol for one server. It closes connections whose requests come too slowly, and those whose client
    reads nothing of an answer. When there are too many, the oldest that has sent no whole request makes room, or the
    one that was idle for longest; if each has a request under way, the new one is refused."""
    text = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: %b\r\nRetry-After: 1\r\nConnection: close\r\n"
    refusal = text % limits.refusal_type + b"Content-Length: %d\r\n\r\n%b" % (len(limits.refusal), limits.refusal)
    most = possible_connections(limits.connections)
    return type(
        "BoundedHttpProtocol",
        (_BoundedProtocol,),
        {"limits": limits, "most": most, "refusal": refusal, "strangers": {}, "idle": {}, "lingering": set()},
    )


class _BoundedProtocol(H11Protocol):
    limits: HttpLimits
    most: int
    refusal: bytes
    strangers: dict[_BoundedProtocol, None]
    """Connections of this server: those that have sent no whole head yet, the oldest first."""
    idle: dict[_BoundedProtocol, None]
    """Those that are kept for a next request, the one that has waited for longest first."""
    lingering: set[_BoundedProtocol]
    """Those that were refused."""
    _late: asyncio.TimerHandle | None = None
    _slow: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    on_gone: Callable[[], None] | None = None
    """Called when the client of the request under way goes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, and not for ever."""
        super().connection_made(_OneWrite(transport, self.loop))  # type: ignore[arg-type]
        if len(self.connections) - len(self.lingering) > self.most and not self._make_room():
            self._refuse()
            return
        self.strangers[self] = None
        self._expect_head()

    def _make_room(self) -> bool:
        """End a connection on which nothing is under way. Return whether there was one."""
        for silent in (self.strangers, self.idle):
            for each in silent:
                each._forget()
                each.connections.discard(each)
                each.transport.abort()
                return True
        return False

    def _refuse(self) -> None:
        if len(self.lingering) >= LINGERING:
            self.transport.abort()
            return
        self.lingering.add(self)
        self.transport.write(self.refusal)
        self._late = self.loop.call_later(LINGER_S, self.transport.close)

    def _forget(self) -> None:
        for silent in (self.strangers, self.idle):
            silent.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request. From its first byte on, its head has a deadline, and then its body."""
        if self in self.lingering:
            return
        if self._late is None and self._is_idle:
            self._expect_head()
        super().data_received(data)

    def handle_events(self) -> None:
        """Begin requests that are whole up to their bodies."""
        super().handle_events()
        if self._is_idle:
            return
        self._forget()
        self._late = _cancel(self._late)
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]
        if self.conn.their_state is not h11.SEND_BODY:
            self._slow = _cancel(self._slow)
        elif self._slow is None and self.limits.body_s is not None:
            self._slow = self.loop.call_later(self.limits.body_s, self.transport.abort)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over: its head is here."""
        self._forget()
        self._late = _cancel(self._late)
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever answers that nobody reads."""
        self._forget()
        self.lingering.discard(self)
        self._late, self._slow, self._stuck = (
            _cancel(self._late),
            _cancel(self._slow),
            _cancel(self._stuck),
        )
        super().connection_lost(exc)
        if self.on_gone is not None and not self._is_idle:
            self.on_gone()

    def on_response_complete(self) -> None:
        """Go on with the next request. What is left of this one, and what has come of the next, has a deadline."""
        super().on_response_complete()
        self._slow = _cancel(self._slow)
        if self._is_idle and not self.transport.is_closing():
            self.idle[self] = None
            has_begun = self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY
            if self._late is None and has_begun:
                self._expect_head()

    def pause_writing(self) -> None:
        """The client reads more slowly than the answer is written."""
        super().pause_writing()
        if self._stuck is None:
            self._stuck = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stuck = _cancel(self._stuck)
        super().resume_writing()

    @property
    def _is_idle(self) -> bool:
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(self.limits.head_s, self._close_late)

    def _close_late(self) -> None:
        self._late = None
        if self._is_idle:
            self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
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
