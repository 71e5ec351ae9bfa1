"""What a guest has sent so far, so that a later run on the host can receive it once more.

A suspended run that is held goes on in its own sandbox. On the host it is a new run all the same, with a context, an
audit record and callbacks of its own: it receives what the guest had sent, sends nothing that the guest has already,
and from there on both go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from toolcell.sandbox.backend import ByteStream, Sandbox
from toolcell.support.change_event import ChangeEvent
from toolcell_bridge.wire.messages import Message, ToolFail, ToolReturn

RECORDED_BYTES: Final = 16 << 20
"""Bytes that a guest may have sent and printed in a run that is held. One that has sent more is run again."""

ITEM_BYTES: Final = 64
"""What keeping one piece costs besides its bytes: a guest may send them one by one."""


class RecordedStream:
    """A `ByteStream` that keeps what it received. A rewound one returns that once more, and then what is new."""

    def __init__(
        self,
        stream: ByteStream,
        items: Iterable[bytes | int] = (),
        printed: tuple[bytes, bytes] = (b"", b""),
        is_rewound: bool = False,
    ) -> None:
        self._stream = stream
        self._items = list(items)
        """What was received, and the numbers of the calls that were answered, in their order."""
        self._printed = printed
        """What was written raw to the descriptors 1 and 2."""
        self._is_rewound = is_rewound
        self._past = deque(self._items if is_rewound else ())
        """What is to be received once more, and when which answer comes in between."""
        self._answered = {each for each in self._past if isinstance(each, int)}
        """Numbers of the calls whose answers the guest has already."""
        self._again: set[int] = set()
        """Those of them that this run has answered too."""
        self._unread = printed if is_rewound else (b"", b"")
        self._changed = ChangeEvent()
        self._is_over = False
        self._bytes = sum(map(_cost, (*self._items, *printed)))
        self.sent_bytes = self.received_bytes = 0

    @property
    def is_complete(self) -> bool:
        """False when the guest has sent more than is kept."""
        return self._bytes <= RECORDED_BYTES

    def rewound(self) -> RecordedStream:
        """Return a stream that begins with everything that this one has received."""
        return RecordedStream(self._stream, self._items, self._printed, is_rewound=True)

    async def receive(self) -> bytes:
        """Return the next bytes, or b"" when the other end is gone or nobody is to receive any more.

        An answer comes between what was received before it and what was received after it, as it did then.
        """
        while self._past and not self._is_over:
            item = self._past[0]
            if isinstance(item, bytes):
                self.received_bytes += len(item)
                self._past.popleft()
                return item
            if item in self._again:
                self._past.popleft()
                continue
            await self._changed.wait()
        if self._is_over and self._past:
            return b""
        data = await self._stream.receive()
        self.received_bytes += len(data)
        self._keep(data)
        return data

    async def send(self, data: bytes | memoryview) -> None:
        """Write all of `data`."""
        self.sent_bytes += len(data)
        await self._stream.send(data)

    def is_new(self, message: Message, size: int) -> bool:
        """Take note of a message of so many bytes that is to be sent; False when the guest has it already."""
        if not isinstance(message, ToolReturn | ToolFail):
            is_new = not self._is_rewound
        elif is_new := message.id not in self._answered:
            self._keep(message.id)
        else:
            self._again.add(message.id)
            self._changed.notify()
        if not is_new:
            self.sent_bytes += size
        return is_new

    def read_output(self, sandbox: Sandbox) -> tuple[bytes, bytes]:
        """Take what was printed raw: what is known of a run before, and what is new."""
        new = sandbox.read_output()
        if any(new) and self._counts(*new):
            self._printed = self._printed[0] + new[0], self._printed[1] + new[1]
        before, self._unread = self._unread, (b"", b"")
        return before[0] + new[0], before[1] + new[1]

    def end(self) -> None:
        """The run is over: nobody waits for what is past any more."""
        self._is_over = True
        self._changed.notify()

    def _keep(self, item: bytes | int) -> None:
        if self._counts(item):
            self._items.append(item)

    def _counts(self, *items: bytes | int) -> bool:
        """Count what is to be kept; False when it is too much, and then nothing is kept any more."""
        self._bytes += sum(map(_cost, items))
        if not self.is_complete:
            self._items, self._printed = [], (b"", b"")
        return self.is_complete


def _cost(item: bytes | int) -> int:
    return ITEM_BYTES + (len(item) if isinstance(item, bytes) else 0)
