"""The guest's end of the bridge: one socket, many callers.

Any thread and any asyncio task of the script may call at the same time. There is no reader thread: one of the threads
that wait for an answer reads for all of them, until its own answer has come; then another one reads.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from types import FrameType
from typing import Any

from toolcell_bridge.wire.codec import LOG_STARTS
from toolcell_bridge.wire.connection import Connection, State
from toolcell_bridge.wire.framing import Part
from toolcell_bridge.wire.messages import (
    CallTool,
    CancelCall,
    Log,
    Message,
    PutFile,
    RunScript,
    Stay,
    ToolFail,
    ToolReturn,
)

READ_BYTES = 64 * 1024
"""Less than malloc takes from the kernel anew each time: 128 KiB."""

SPIN_S = 150e-6
MISSES = 4
"""After so many polls in vain most waits sleep at once. One in so many still polls: answers may be quick again."""

TURN_MS = 20
"""How often a thread of a session that waits for an answer runs a line of Python. Signals wake the main thread."""

MSG_DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)
sched_yield = getattr(os, "sched_yield", lambda: None)  # this file is also imported where no guest can run

Request = tuple[str, Any, int | None]
"""Tool name, arguments as a dict or packed, line of the script."""


class ChannelClosed(RuntimeError):
    """The host is gone, or this process is a fork that never had a bridge."""


class PendingReply:
    """One outstanding call: its answer, and a callback for when it comes."""

    __slots__ = ("answer", "has_tables", "on_answer")

    def __init__(self, on_answer: Callable[[], object] | None = None) -> None:
        self.answer: ToolReturn | ToolFail | None = None
        self.has_tables = False
        """There are arrays or tables in the answer."""
        self.on_answer = on_answer


class Channel:
    """Sends and receives messages over `sock`, a blocking stream socket."""

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        self._sock = sock
        self._connection = connection
        self.frame_bytes = connection.max_frame_bytes
        self._lock = threading.RLock()  # guards the connection and the order of what is sent
        self._reading = threading.Lock()  # held by the one thread that reads from the socket
        self._answered = threading.Condition(threading.Lock())
        self._waiting = 0
        self._pending: dict[int, PendingReply] = {}
        self._inbox: deque[Message] = deque()
        self._next_id = 1
        self._misses = 0
        self._sending = False
        self._held: list[Message] = []
        self._readable: Any = None
        self._main_thread = 0
        self.inputs_have_tables = False
        """There are arrays or tables among the inputs of the script that runs."""
        self.when_free: Callable[[], object] | None = None
        """Called once, when what is being sent is sent, or what is being read is read."""

    @property
    def fileno(self) -> int:
        """Descriptor of the bridge socket; -1 in a forked child."""
        return self._sock.fileno()

    def stay_here(self) -> None:
        """Keep the bridge to this process. Called by the sandbox, not by the zygote that made the channel for it."""
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # A forked child shares the socket: two writers would tear each other's frames.
        self._sock.close()
        self._lock = threading.RLock()

    def send(self, *messages: Message) -> None:
        """Send `messages` in one write.

        Raises:
            ChannelClosed: the host is gone.
        """
        with self._lock:
            if self._sending:
                # A signal handler or __del__ printed during our own write: finish the frame first.
                self._held.extend(messages)
                return
            self._sending = True
            try:
                self._write(*self._connection.send_parts(*messages))
                if self._held:
                    self._write_held()
            finally:
                self._sending = False
        if self.when_free is not None:
            self._note_free()

    def send_printed(self, stream: int, text: bytes) -> None:
        """Send a `Log` of up to `PRINTED_BYTES` of UTF-8, in a tenth of the time.

        Raises:
            ChannelClosed: the host is gone.
        """
        with self._lock:
            if self._sending or self._connection.state is not State.RUNNING:
                self.send(Log(stream, text.decode()))
                return
            self._sending = True
            try:
                self._write(LOG_STARTS[stream][len(text)] + text)
                self._write_held()
            finally:
                self._sending = False
        self._note_free()

    def _note_free(self) -> None:
        if self.when_free is not None and not self._sending:
            call, self.when_free = self.when_free, None
            call()

    def _write_held(self) -> None:
        while self._held:
            held, self._held = self._held, []
            self._write(*self._connection.send_parts(*held))

    def _closed(self) -> ChannelClosed:
        if self.fileno < 0:
            return ChannelClosed("a child process cannot call tools: only the script's own process and its threads can")
        return ChannelClosed("no response from the host: the bridge is closed")

    def _write(self, *parts: Part) -> None:
        try:
            for part in parts:
                self._sock.sendall(part)
        except OSError as exc:
            raise self._closed() from exc

    def call(self, requests: Sequence[Request]) -> list[tuple[int, PendingReply]]:
        """Send one CallTool per request, all in one write; `wait` fills the replies."""
        return self.call_with(requests, None)

    def call_with(
        self, requests: Sequence[Request], on_answer: Callable[[], object] | None
    ) -> list[tuple[int, PendingReply]]:
        """As `call`; `on_answer` runs in whichever thread reads the answer."""
        with self._lock:
            placed = []
            messages: list[Message] = []
            for name, args, line in requests:
                reply = PendingReply(on_answer)
                placed.append((self._next_id, reply))
                messages.append(CallTool(self._next_id, name, args, line))
                self._pending[self._next_id] = reply
                self._next_id += 1
            try:
                self.send(*messages)
            except BaseException:
                for call_id, _ in placed:
                    self._pending.pop(call_id, None)
                raise
        return placed

    def cancel(self, call_id: int) -> None:
        """Cancel a call: nobody waits for its answer any more."""
        with self._lock:
            if call_id in self._pending:
                self.send(CancelCall(call_id))

    def wait(self, reply: PendingReply) -> ToolReturn | ToolFail:
        """Block until `reply` is answered, reading for everybody meanwhile.

        Raises:
            ChannelClosed: the host is gone.
        """
        while reply.answer is None:
            if self._reading.acquire(blocking=False):
                try:
                    while reply.answer is None:
                        self._read()
                finally:
                    self._reading.release()
                    if self._waiting:
                        self._wake_waiting()
            else:
                with self._answered:
                    self._waiting += 1
                    # The timeout covers a reader that stopped between our acquire and this wait.
                    self._answered.wait_for(lambda: reply.answer is not None or not self._reading.locked(), 0.05)
                    self._waiting -= 1
        return reply.answer

    def read_ready(self) -> None:
        """Read once if nobody else is reading; for an event loop that saw the socket readable.

        Never waits: another thread may have read meanwhile what the loop saw, and nothing more may be coming.
        """
        if self._reading.acquire(blocking=False):
            try:
                self._read(MSG_DONTWAIT)
            except BlockingIOError:
                return
            finally:
                self._reading.release()
                if self._waiting:
                    self._wake_waiting()

    def wait_interruptibly(self) -> None:
        """From here on, wait for bytes apart from reading them: `is_interruptible` says when nothing can get lost."""
        self._main_thread = threading.get_ident()
        self._readable = self._poll_of_its_own()

    def _poll_of_its_own(self) -> select.poll:
        made = select.poll()
        made.register(self._sock.fileno(), select.POLLIN)
        return made

    def has_input(self) -> bool:
        """Whether the host has sent something that was not answered yet. A signal handler asks, inside another poll."""
        frames = self._connection.frames
        return bool(self._inbox or frames.buffer or frames.large is not None or self._poll_of_its_own().poll(0))

    def forget_calls(self) -> None:
        """The run is over: no answer comes to calls that have none yet."""
        with self._lock:
            self._pending.clear()

    def next_request(self) -> RunScript | PutFile | Stay:
        """Block until the host asks for something new.

        Raises:
            ChannelClosed: the host is gone.
        """
        with self._reading:
            while True:
                while self._inbox:
                    message = self._inbox.popleft()
                    if isinstance(message, (RunScript, PutFile, Stay)):
                        return message
                self._read()

    def _wake_waiting(self) -> None:
        with self._answered:
            self._answered.notify_all()

    def _read(self, flags: int = 0) -> None:
        frames = self._connection.frames
        data = b""
        try:
            if is_large := frames.large is not None:
                size = self._receive_into(frames.room(), flags)
            else:
                data = self._sock.recv(READ_BYTES, flags) if flags else self._receive()
                size = len(data)
        except BlockingIOError:
            raise
        except OSError as exc:
            raise self._closed() from exc
        if not size:
            raise self._closed()
        with self._lock:
            if is_large:
                frames.fill(size)
            else:
                self._connection.receive_data(data)
            while (message := self._connection.next_message()) is not None:
                self._deliver(message)
        if self._waiting:
            self._wake_waiting()
        if self.when_free is not None:
            self._note_free()

    def _receive(self) -> bytes:
        """recv(), but poll for a moment before sleeping, as long as the host answers quickly.

        Being woken on another processor takes longer than most answers (40 to 75 us in a virtual machine).
        """
        if self._pending and self._should_poll():
            until = perf_counter() + SPIN_S
            while perf_counter() < until:
                try:
                    data = self._sock.recv(READ_BYTES, MSG_DONTWAIT)
                except BlockingIOError:
                    sched_yield()
                else:
                    self._misses = 0
                    return data
            self._misses += 1
        if self._readable is not None:
            self._sleep_until_readable()
        return self._sock.recv(READ_BYTES)

    def _receive_into(self, room: memoryview, flags: int) -> int:
        """Receive more of a long message, straight into its own memory."""
        if self._readable is not None and not flags:
            self._sleep_until_readable()
        return self._sock.recv_into(room, 0, flags)

    def _sleep_until_readable(self) -> None:
        turn_ms = None if threading.get_ident() == self._main_thread else TURN_MS
        # What has come since something was sent. From here on an interrupt finds us asleep, but not inside of a call,
        # so the look at `when_free` must be here.
        if self.when_free is not None:
            self._note_free()
        while not self._readable.poll(turn_ms):  # in between, a thread that is to end notices that
            self._note_free()

    def _should_poll(self) -> bool:
        if self._misses < MISSES:
            return True
        self._misses += 1
        return not self._misses % MISSES

    def _deliver(self, message: Message) -> None:
        if isinstance(message, (ToolReturn, ToolFail)):
            if (reply := self._pending.pop(message.id, None)) is not None:
                reply.has_tables = self._connection.has_tables
                reply.answer = message
                if reply.on_answer is not None:
                    reply.on_answer()
        else:
            if isinstance(message, RunScript):
                self.inputs_have_tables = self._connection.has_tables
            self._inbox.append(message)


def is_interruptible(frame: FrameType | None) -> bool:
    """Return True when an exception may be raised in this frame: it would tear no message and keep no lock."""
    inner: FrameType | None = None
    while frame is not None:
        if frame.f_code.co_filename == __file__:
            is_asleep = frame.f_code.co_name == "wait" and inner is not None  # for another thread that reads
            return is_asleep or frame.f_code.co_name == "_sleep_until_readable"
        inner, frame = frame, frame.f_back
    return True
