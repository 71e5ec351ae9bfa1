"""Messages to bytes and back: the format is fixed, and everything else is refused."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import re
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell_bridge.wire import codec, connection, unpacking
from toolcell_bridge.wire import messages as msg
from toolcell_bridge.wire.codec import decode, decode_counted, decode_in_steps, encode, to_the_end
from toolcell_bridge.wire.errors import LocalProtocolError, RemoteProtocolError, UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.framing import MAX_FRAME_BYTES, frame
from toolcell_bridge.wire.plain import MAX_DEPTH, PackedValue, check_plain, packed_size
from wire.wire_strategies import messages, plain

pytestmark = pytest.mark.quick

FORMAT: list[tuple[msg.Message, str]] = [
    (
        msg.RunScript(7, "1", {"q": 1}, "a b", "off", 64, 2, 300, None, 0.5),
        "9e 01 07 a131 81a17101 a3612062 a36f6666 40 02 cd012c c0 cb3fe0000000000000 ce00040000 ce00100000 c2",
    ),
    (msg.PutFile("a.txt", b"\0\xff", True), "94 02 a5612e747874 c40200ff c3"),
    (msg.ToolReturn(1, [None, True, -1, 1.5, "é", b"x"]), "93 03 01 96 c0 c3 ff cb3ff8000000000000 a2c3a9 c40178"),
    (msg.Stay(100), "92 06 64"),
    (msg.ToolFail(1, "denied", "no", False, {}), "96 04 01 a664656e696564 a26e6f c2 80"),
    (msg.Hello(1, "0.1", "3.11", {"l": "7"}), "95 10 01 a3302e31 a4332e3131 81a16ca137"),
    (msg.CallTool(1, "f", {"q": "x"}, 3), "95 11 01 a166 81a171a178 03"),
    (msg.CallTool(2**64 - 1, "f", {}, None), "95 11 cfffffffffffffffff a166 80 c0"),
    (msg.CancelCall(300), "92 12 cd012c"),
    (msg.Log(1, "hi\n"), "93 13 01 a368690a"),
    (msg.Progress({"done": 0.5}), "92 14 81a4646f6e65cb3fe0000000000000"),
    (msg.Result(-(2**63), ["a"]), "93 15 d38000000000000000 91a161"),
    (msg.FilePart("a", "text/plain", b"", True), "95 16 a161 aa746578742f706c61696e c400 c3"),
    (msg.FileProblem("a", 9, "missing"), "94 17 a161 09 a76d697373696e67"),
    (msg.Leftover(["a"], [], True), "94 19 91a161 90 c3"),
    (msg.ReadPipes(2), "92 1d 02"),
    (msg.Done(True, None), "93 18 c3 c0"),
    (msg.Done(False, {"type": "E"}), "93 18 c2 81a474797065a145"),
]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.conforms("T6")
@each_row(("message", "hex_body"), FORMAT, ids=lambda item: type(item).__name__)
def test_the_wire_format_never_changes_silently(message: msg.Message, hex_body: str) -> None:
    body = bytes.fromhex(hex_body)
    assert encode(message) == struct.pack(">I", len(body)) + body
    assert decode(body) == message


def test_every_message_has_its_format_pinned() -> None:
    assert {type(message) for message, _ in FORMAT} == set(msg.TAGS.values())


@given(messages)
def test_what_is_sent_is_what_is_received(message: msg.Message) -> None:
    received = decode(encode(message)[4:])
    assert received == message
    assert repr(received) == repr(message)  # 1 == True == 1.0, and none of them may become another


@pytest.mark.conforms("T-b1")
@given(st.binary(max_size=700))
def test_garbage_is_a_remote_protocol_error_and_nothing_else(garbage: bytes) -> None:
    try:
        decode(garbage)
    except RemoteProtocolError:
        pass


@pytest.mark.slow
@pytest.mark.conforms("T-b1")
@given(st.lists(plain, max_size=6))
def test_any_msgpack_array_is_a_message_or_a_remote_protocol_error(values: list[Any]) -> None:
    try:
        message = decode(msgpack.packb(values))
    except RemoteProtocolError:
        return
    assert encode(message)[4:] == msgpack.packb(values)


WRONG = {
    "not an array": b"\x01",
    "a map": msgpack.packb({"tag": 1}),
    "no tag": b"\x90",
    "text for a tag": msgpack.packb(["Log", 1, "x"]),
    "a list for a tag": msgpack.packb([[19], 1, "x"]),
    "true for a tag": msgpack.packb([True]),
    "a float for a tag": msgpack.packb([19.0, 1, "x"]),
    "an unknown tag": msgpack.packb([99]),
    "the reserved tag": msgpack.packb([5, "stop"]),
    "a tag of 64 bit": msgpack.packb([2**64 - 1]),
    "a field missing": msgpack.packb([19, 1]),
    "a field too many": msgpack.packb([19, 1, "x", None]),
    "true for an int": msgpack.packb([18, True]),
    "a float for an int": msgpack.packb([18, 1.0]),
    "an int for a bool": msgpack.packb([24, 1, None]),
    "bytes for text": msgpack.packb([19, 1, b"x"]),
    "text for bytes": msgpack.packb([22, "a", "b", "data", True]),
    "a list for a dict": msgpack.packb([17, 1, "f", [], None]),
    "null for a dict": msgpack.packb([17, 1, "f", None, None]),
    "an int in a list of text": msgpack.packb([21, 1, ["a", 1]]),
    "an int in a dict of text": msgpack.packb([16, 1, "", "", {"a": 1}]),
    "a third stream": msgpack.packb([19, 3, "x"]),
    "stream 0": msgpack.packb([19, 0, "x"]),
    "an int key": msgpack.packb([20, {1: 2}]),
    "a bytes key": msgpack.packb([20, {b"a": 2}]),
    "a deep bytes key": msgpack.packb([20, [[{"a": {b"a": 2}}]]]),
    "a null key": msgpack.packb([20, {None: 2}]),
    "a list for a key": bytes.fromhex("92 14 81 90 c0"),
    "an extension": msgpack.packb([20, msgpack.ExtType(5, b"x")]),
    "a deep extension": msgpack.packb([20, [[msgpack.ExtType(5, b"x")]]]),
    "an extension as the message": msgpack.packb(msgpack.ExtType(5, b"x")),
    "a timestamp": msgpack.packb([20, msgpack.Timestamp(1)]),
    "a short timestamp": bytes.fromhex("92 14 d4 ff 00"),
    "bad UTF-8": bytes.fromhex("93 13 01 a1 ff"),
    "bad UTF-8 in a key": bytes.fromhex("92 14 81 a1 ff c0"),
    "an encoded surrogate": bytes.fromhex("93 13 01 a3 eda080"),
    "an overlong encoding": bytes.fromhex("93 13 01 a2 c080"),
    "the unused byte": bytes.fromhex("92 14 c1"),
    "bytes after the end": encode(msg.Log(1, "x"))[4:] + b"\xc0",
    "a second message after the end": encode(msg.CancelCall(1))[4:] * 2,
    "half a message": encode(msg.CallTool(1, "search", {"q": "x"}, None))[4:-3],
    "nothing": b"",
}


@pytest.mark.conforms("T6", "T7")
@each_row("padding", [0, 600], ids=["small", "large"])
@each_row("wrong", WRONG)
def test_what_is_not_exactly_a_message_is_refused(wrong: str, padding: int) -> None:
    body = WRONG[wrong]
    if padding and body[:1] == b"\x92" and body[1] == 20:  # the same fault inside a body that takes the long way
        body = b"\x92\x14\x92" + msgpack.packb(bytes(padding)) + body[2:]
    with pytest.raises(RemoteProtocolError):
        decode(body)


@pytest.mark.conforms("T6")
@each_row("number", [math.nan, math.inf, -math.inf])
def test_floats_that_json_lacks_cross_unchanged(number: float) -> None:
    received = decode(encode(msg.Result({"x": number}, []))[4:])
    assert isinstance(received, msg.Result)
    assert repr(received.value) == repr({"x": number})


@each_row("value", [-(2**63), 2**64 - 1])
def test_the_extreme_ints_cross(value: int) -> None:
    assert decode(encode(msg.Progress(value))[4:]) == msg.Progress(value)


@pytest.mark.conforms("T6", "C-b8")
@each_row(
    ("value", "problem"),
    [
        (2**64, "does not fit 64 bit"),
        (-(2**63) - 1, "does not fit 64 bit"),
        ([{"a": "\ud800"}], "not valid Unicode"),
        ({"\ud800": 1}, "not valid Unicode"),
        ((1, 2), "tuple is not plain data"),
        ([(1, 2)], "tuple in it is not plain data"),
        ([{1, 2}, 1j], "complex, set in it is not plain data"),
        ({1: 2}, "key that is not a str"),
        (object(), "object is not plain data"),
        (type("Text", (str,), {})("x"), "Text is not plain data"),
    ],
)
def test_a_value_without_a_form_is_refused_by_its_sender(value: Any, problem: str) -> None:
    with pytest.raises(UnsendableValue, match=problem):
        encode(msg.ToolReturn(1, value))
    with pytest.raises(UnsendableValue, match=problem):
        packed_size(value)
    assert decode(encode(msg.ToolReturn(1, "next"))[4:]) == msg.ToolReturn(1, "next")


@each_row(
    "message",
    [
        msg.CallTool(True, "f", {}, None),
        msg.CallTool("1", "f", {}, None),  # type: ignore[arg-type]
        msg.Log(3, "x"),
        msg.Log(1, b"x"),  # type: ignore[arg-type]
        msg.Result(1, ("a",)),  # type: ignore[arg-type]
        msg.Result(1, [2]),  # type: ignore[list-item]
        msg.Hello(1, "", "", {"a": None}),  # type: ignore[dict-item]
        msg.RunScript(1, "", {}, "", "off", 1, 1, 1, None, 1),
        msg.Done(True, []),  # type: ignore[arg-type]
        "Log",
        None,
    ],
    ids=repr,
)
def test_a_malformed_message_is_its_senders_error(message: Any) -> None:
    with pytest.raises(LocalProtocolError):
        encode(message)


def test_every_field_of_every_message_is_checked() -> None:
    for message, _ in FORMAT:
        for field in dataclasses.fields(message):
            with pytest.raises((LocalProtocolError, UnsendableValue)):
                encode(dataclasses.replace(message, **{field.name: object()}))  # type: ignore[arg-type]


def test_a_message_over_the_frame_limit_is_not_sent() -> None:
    size = len(encode(msg.Log(1, "x" * 100))) - 4
    assert encode(msg.Log(1, "x" * 100), size)
    with pytest.raises(ValueTooLarge, match=f"{size} > {size - 1} bytes"):
        encode(msg.Log(1, "x" * 100), size - 1)


@given(messages)
def test_a_value_that_was_packed_before_gives_the_same_bytes(message: msg.Message) -> None:
    if isinstance(message, (msg.CallTool, msg.Result, msg.Progress)):
        field = "args" if isinstance(message, msg.CallTool) else "value"
        value: Any = PackedValue(getattr(message, field))
        packed = dataclasses.replace(message, **{field: value})
        assert encode(packed) == encode(message)


def test_a_packed_value_is_held_to_the_type_and_the_element_limit_of_its_field() -> None:
    wrong: Any = PackedValue([1])
    with pytest.raises(LocalProtocolError, match="CallTool"):
        encode(msg.CallTool(1, "f", wrong, None))
    most: Any = PackedValue([None] * (msg.MAX_GUEST_ELEMENTS - 8))
    assert encode(msg.Result(most, []))
    with pytest.raises(ValueTooLarge, match="elements"):
        more: Any = PackedValue([None] * (msg.MAX_GUEST_ELEMENTS - 3))
        encode(msg.Result(more, []))


@given(plain)
def test_packed_size_is_the_size_on_the_wire(value: Any) -> None:
    assert packed_size(value) == len(msgpack.packb(value))


@pytest.mark.conforms("T6", "C-b8")
@each_row("padding", [0, 600], ids=["small", "large"])
def test_depth_ends_at_the_limit_on_both_sides(padding: int) -> None:
    pad = [""] * padding
    fits = msg.CallTool(1, "f", {"v": nested(MAX_DEPTH - 1), "pad": pad}, None)
    assert decode(encode(fits)[4:]) == fits

    over = {"v": nested(MAX_DEPTH), "pad": pad}
    with pytest.raises(ValueTooLarge, match="65 > 64 levels deep"):
        encode(msg.CallTool(1, "f", over, None))
    with pytest.raises(RemoteProtocolError, match="levels deep"):
        decode(msgpack.packb([17, 1, "f", over, None]))


@pytest.mark.conforms("T6")
@each_row(
    ("make", "most"),
    [
        (lambda value: msg.Progress(value), msg.MAX_GUEST_ELEMENTS - 1 - len([20, None]) - 1),
        (lambda value: msg.ToolReturn(1, value), msg.MAX_ELEMENTS - 1 - len([3, 1, None]) - 1),
    ],
    ids=["from the guest", "from the host"],
)
def test_elements_end_at_the_same_number_on_both_sides(make: Callable[[Any], msg.Message], most: int) -> None:
    assert decode(encode(make([None] * most))[4:]) == make([None] * most)

    with pytest.raises(ValueTooLarge, match="elements"):
        encode(make([None] * (most + 1)))
    tag_and_fields = msgpack.unpackb(encode(make(None))[4:])
    with pytest.raises(RemoteProtocolError, match="elements"):
        decode(msgpack.packb([*tag_and_fields[:-1], [None] * (most + 1)]))


@given(messages)
def test_a_long_message_is_read_value_by_value_as_a_short_one_is_at_once(message: msg.Message) -> None:
    body = encode(message)[4:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_SMALL_BYTES", 0)
        patch.setattr(unpacking, "_LARGE_BYTES", 0)
        assert decode(body) == message
        for wrong in (body[:-1], body + b"\xc0"):
            with pytest.raises(RemoteProtocolError):
                decode(wrong)


@given(messages, st.integers(1, 40))
def test_a_message_that_is_read_in_steps_is_the_same(message: msg.Message, step: int) -> None:
    body = encode(message)[4:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "_STEP_BYTES", step)
        patch.setattr("toolcell_bridge.wire.plain._STEP_CONTAINERS", step)
        assert len(list(decode_in_steps(body))) >= (len(body) - 1) // step
        assert to_the_end(decode_in_steps(body)) == decode_counted(body)
        assert to_the_end(decode_in_steps(body))[0] == message
        for wrong in (body[:-1], body + b"\xc0"):
            with pytest.raises(RemoteProtocolError):
                to_the_end(decode_in_steps(wrong))


STEPS: dict[str, Any] = {
    "lists": [[]] * 130_000,
    "dicts": [{"a": None}] * 60_000,
    "levels": [functools.reduce(lambda value, _: [value], range(60), None)] * 2000,
    "names": {str(number): 0 for number in range(130_000)},
    "texts": ["é" * 15] * 250_000,
    "numbers": [1.5] * 260_000,
}


@pytest.mark.slow
@each_row("shape", STEPS)
def test_no_step_of_reading_a_message_makes_more_than_a_fraction_of_it(shape: str) -> None:
    body = msgpack.packb([20, STEPS[shape]])
    steps, most, before = decode_in_steps(body, msg.MAX_GUEST_ELEMENTS), 0, sys.getallocatedblocks()
    for _ in steps:
        now = sys.getallocatedblocks()
        most, before = max(most, now - before), now

    assert most <= msg.MAX_GUEST_ELEMENTS // 8


def test_containers_keys_and_values_all_count_as_elements() -> None:
    assert check_plain({"a": [1, 2], "b": {}}) == 9


def count_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(1 + count_of(item) for item in value.values())
    return 1 + sum(1 + count_of(item) for item in value) if isinstance(value, list) else 0


@given(value=plain, times=st.integers(1, 20))
def test_elements_are_the_containers_and_everything_in_them(value: Any, times: int) -> None:
    assert check_plain(value) == count_of(value)
    assert check_plain([value] * times) == count_of([value] * times)


@given(value=plain, place=st.integers(0, 19))
def test_one_wrong_type_or_key_is_found_wherever_it_is(value: Any, place: int) -> None:
    for wrong in ({1: value}, (value,)):
        items = [[value]] * 20
        items[place] = [wrong]
        for held in (items, items[place], {"a": [items[place]]}):
            with pytest.raises(UnsendableValue):
                check_plain(held)


def test_a_value_shared_many_times_is_counted_each_time() -> None:
    bomb: Any = []
    for _ in range(40):
        bomb = [bomb, bomb]
    with pytest.raises(ValueTooLarge, match="elements"):
        encode(msg.Progress(bomb))


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueTooLarge, match="levels deep"):
        encode(msg.Progress(loop))


BOMBS = {
    "an array of 2**31": bytes.fromhex("92 14 dd 80000000"),
    "arrays of 2**31 in one another": bytes.fromhex("92 14") + bytes.fromhex("dd 80000000") * 1000,
    "arrays of 65535 in one another": bytes.fromhex("92 14") + bytes.fromhex("dc ffff") * 1000,
    "arrays that claim what is left": bytes.fromhex("92 14") + bytes.fromhex("dd 0010 0000") * 900 + bytes(2**20),
    "a map of 2**31": bytes.fromhex("92 14 df 80000000"),
    "maps of 2**31 in one another": bytes.fromhex("92 14") + bytes.fromhex("df 80000000 a161") * 1000,
    "text of 4 GiB": bytes.fromhex("92 14 db ffffffff"),
    "bytes of 4 GiB": bytes.fromhex("92 14 c6 ffffffff"),
    "an extension of 4 GiB": bytes.fromhex("92 14 c9 ffffffff 05"),
    "100 000 arrays in one another": bytes.fromhex("92 14") + b"\x91" * 100_000 + b"\xc0",
    "100 000 open arrays": b"\x91" * 100_000,
    "1 000 arrays in one another": bytes.fromhex("92 14") + b"\x91" * 1000 + b"\xc0",
    "1 000 maps in one another": bytes.fromhex("92 14") + bytes.fromhex("81 a161") * 1000 + b"\xc0",
}


@pytest.mark.conforms("T6", "T7")
@each_row("bomb", BOMBS)
def test_a_bomb_is_refused_without_holding_what_it_claims(bomb: str) -> None:
    body = BOMBS[bomb]
    peak = peak_bytes_refusing(body)
    assert peak < 2**20 + 3 * len(body)


# What decoding one message may hold at its worst: ten times a full frame. Elements are bounded by the budget: a dict of
# one short key and value is 5 of them, or 4 while the list around it is open. In a frame that is read at once, scalars
# are bounded by its bytes: the dearest, one character of two bytes, makes 60 bytes of 3.
def hostile_peak_bytes(frame_bytes: int) -> int:
    return 10 * frame_bytes


DEAREST = [b"\x90", b"\x80", b"\x01", b"\xa2\xc4\x80", b"\x91\x90", b"\x81\xa2\xc4\x80\xa2\xc4\x80", b"\xd4\x05\x00"]
"""An empty list, an empty dict, an int, a CJK character, a list and a dict of one, an extension."""


def array(items: int) -> bytes:
    return b"\xdd" + items.to_bytes(4, "big")


def flat(filling: bytes, frame_bytes: int, elements: int) -> bytes:
    count = frame_bytes // len(filling)
    return array(count) + filling * count


def rows(filling: bytes, frame_bytes: int, elements: int) -> bytes:
    width = frame_bytes // len(filling) // 16
    return array(16) + (array(width) + filling * width) * 16


def chain(filling: bytes, frame_bytes: int, elements: int) -> bytes:
    """Lists as long as may be, each the last item of the one before: none is complete before all are built."""
    width = min(elements, frame_bytes // len(filling)) - 2
    links = frame_bytes // len(filling) // width
    return (array(width + 1) + filling * width) * links + b"\xc0"


FRAMES = [(shape, filling, 4) for shape in (flat, rows, chain) for filling in DEAREST]
"""As much as is read at once."""
FULL = [
    (shape, filling, 1) for shape in (rows, chain) for filling in (b"\xa2\xc4\x80", b"\x81\xa2\xc4\x80\xa2\xc4\x80")
]
"""Those that take most of all."""


@pytest.mark.conforms("T6", "T7")
@pytest.mark.parametrize(
    ("shape", "filling", "share"),
    [*FRAMES, *(pytest.param(*each, marks=pytest.mark.slow) for each in FULL)],
    ids=lambda each: each.hex() if isinstance(each, bytes) else getattr(each, "__name__", each),
)
def test_a_frame_of_the_dearest_elements_stays_within_the_stated_bound(filling: bytes, shape: Any, share: int) -> None:
    body = shape(filling, MAX_FRAME_BYTES // share, msg.MAX_GUEST_ELEMENTS)
    assert len(body) <= MAX_FRAME_BYTES + 1024
    assert peak_bytes_refusing(b"\x92\x14" + body) < hostile_peak_bytes(MAX_FRAME_BYTES)


def peak_bytes_refusing(body: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(body, msg.MAX_GUEST_ELEMENTS)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("failure", [RecursionError(), OverflowError(), KeyError(1), TypeError("x")])
def test_a_failing_parser_is_the_senders_doing(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(body: bytes) -> None:
        raise failure

    monkeypatch.setattr(codec, "unpackb", fail)
    with pytest.raises(RemoteProtocolError) as caught:
        decode(b"\x92\x12\x01")
    assert caught.value.__cause__ is failure


def test_the_page_about_the_wire_lists_every_message_with_its_tag_and_fields() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| ([\w, ]+) \|", page, re.MULTILINE)
    assert rows == [
        (str(tag), kind.__name__, ", ".join(field.name for field in dataclasses.fields(kind)))
        for tag, kind in msg.TAGS.items()
    ]


def test_a_connection_is_dead_when_memory_ran_out_while_it_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(body: bytearray, most: int) -> Iterator[None]:
        yield
        raise MemoryError

    monkeypatch.setattr(connection, "decode_in_steps", short)
    host = connection.Connection.host(in_steps=True)
    host.receive_data(frame(b"\x90" * (connection.AT_ONCE_BYTES + 1)))
    assert host.next_message() is None
    with pytest.raises(MemoryError):
        host.next_message()
    with pytest.raises(RemoteProtocolError, match="no memory"):
        host.next_message()
