"""Hypothesis strategies for plain values and messages, and two connected ends."""

from __future__ import annotations

import string
from typing import Any

from hypothesis import strategies as st

from toolcell_bridge.wire import messages as msg
from toolcell_bridge.wire.connection import Connection

HELLO = msg.Hello(msg.PROTOCOL_VERSION, "0.1.0", "3.11.0", {"landlock": "ABI 7"})
RUN = msg.RunScript(1, "1+1", {}, "search", "off", 4096, 4, 4096, None, None)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ints = st.integers(-(2**63), 2**64 - 1)
scalars = st.none() | st.booleans() | ints | st.floats(allow_nan=False) | texts | st.binary(max_size=20)
plain: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
plain_dicts = st.dictionaries(texts, plain, max_size=3)
names = st.text(string.ascii_lowercase, min_size=1, max_size=6)

messages: st.SearchStrategy[msg.Message] = st.one_of(
    st.builds(
        msg.RunScript,
        ints,
        texts,
        plain_dicts,
        st.lists(names).map(" ".join),
        texts,
        ints,
        ints,
        ints,
        st.none() | ints,
        st.none() | st.just(0.5),
    ),
    st.builds(msg.PutFile, texts, st.binary(max_size=600), st.booleans()),
    st.builds(msg.Stay, ints),
    st.builds(msg.ToolReturn, ints, plain),
    st.builds(msg.ToolFail, ints, texts, texts, st.booleans(), plain),
    st.builds(msg.Hello, ints, texts, texts, st.dictionaries(texts, texts, max_size=3)),
    st.builds(msg.CallTool, ints, texts, plain_dicts, st.none() | ints),
    st.builds(msg.CancelCall, ints),
    st.builds(msg.Log, st.sampled_from([1, 2]), texts),
    st.builds(msg.Progress, plain),
    st.builds(msg.Result, plain, st.lists(texts, max_size=3)),
    st.builds(msg.FilePart, texts, texts, st.binary(max_size=600), st.booleans()),
    st.builds(msg.FileProblem, texts, ints, texts),
    st.builds(msg.Leftover, st.lists(texts, max_size=3), st.lists(texts, max_size=3), st.booleans()),
    st.builds(msg.ReadPipes, ints),
    st.builds(msg.Done, st.booleans(), st.none() | plain_dicts),
)


def deliver(sender: Connection, message: msg.Message, receiver: Connection) -> msg.Message | None:
    """Send one message and return what the other end makes of it; None when it was dropped."""
    receiver.receive_data(sender.send(message))
    received = receiver.next_message()
    assert receiver.next_message() is None
    return received


def idle_pair(**limits: int) -> tuple[Connection, Connection]:
    """Host and guest, after Hello."""
    host, guest = Connection.host(**limits), Connection.guest(**limits)
    deliver(guest, HELLO, host)
    return host, guest


def running_pair(**limits: int) -> tuple[Connection, Connection]:
    """Host and guest, after Run."""
    host, guest = idle_pair(**limits)
    deliver(host, RUN, guest)
    return host, guest
