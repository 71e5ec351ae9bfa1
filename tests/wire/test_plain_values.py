"""Each kind of Python value on its way to the wire: converted as documented, or refused with its path."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fractions
import io
import pathlib
import re
import subprocess
import sys
import types
import uuid
from array import array
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NoReturn

import pydantic
import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.codec import decode, encode
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import MAX_ELEMENTS, Progress
from toolcell_bridge.wire.plain import MAX_DEPTH
from wire.wire_strategies import plain

pytestmark = pytest.mark.quick


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Mode(enum.StrEnum):
    FAST = "fast"


class Permission(enum.Flag):
    READ = 1


@dataclasses.dataclass
class Point:
    x: int
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    when: date


Pair = collections.namedtuple("Pair", "left right")


class Model(pydantic.BaseModel):
    name: str
    tags: set[str] = set()


class Account(pydantic.BaseModel):
    home: pydantic.AnyUrl
    key: pydantic.SecretStr
    also: list[Model] = []


class Link(Account):
    also: list[Model] = []
    word: re.Pattern[str] = re.compile("a+")
    body: bytes = b"\xff"


class Upload(pydantic.BaseModel):
    by: object
    body: bytes = b"\xff"


class Weight:
    """Of a type that only its model knows how to write."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        written = pydantic_core.core_schema.plain_serializer_function_ser_schema(lambda _: "3 kg", when_used="json")
        return pydantic_core.core_schema.is_instance_schema(cls, serialization=written)


class Parcel(pydantic.BaseModel):
    weight: Weight


def refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("an override was called")


class EvilText(str):
    __slots__ = ()
    __str__ = __repr__ = __format__ = __iter__ = encode = isascii = __len__ = refuse


class EvilInt(int):
    __int__ = __index__ = __str__ = __repr__ = __lt__ = __le__ = bit_length = refuse


class EvilFloat(float):
    __float__ = __str__ = __repr__ = refuse


class EvilBytes(bytes):
    __bytes__ = __iter__ = __len__ = refuse


class EvilList(list[Any]):
    __iter__ = __len__ = __getitem__ = refuse


class EvilTuple(tuple[Any, ...]):
    __slots__ = ()
    __iter__ = __len__ = __getitem__ = refuse


class EvilSet(set[Any]):
    __iter__ = __len__ = refuse


class EvilDict(dict[Any, Any]):
    items = keys = values = __iter__ = __len__ = __getitem__ = refuse


class EvilDatetime(datetime):
    isoformat = __str__ = refuse


AS_THEY_ARE: list[object] = [None, True, False, 0, -(2**63), 2**64 - 1, 1.5, "", "é\u2028", b"\xff", [], {}]

CONVERTED: list[tuple[object, object]] = [
    # Itself
    *((same, same) for same in AS_THEY_ARE),
    # Bytes
    (bytearray(b"ab"), b"ab"),
    (memoryview(b"abcd")[::2], b"ac"),
    # Lists
    ((1, (2, ())), [1, [2, []]]),
    (Pair(1, 2), [1, 2]),
    ({3, 1, 2}, [1, 2, 3]),
    (frozenset({"b", "a"}), ["a", "b"]),
    (collections.deque([1, 2], maxlen=2), [1, 2]),
    (range(5, 0, -2), [5, 3, 1]),
    (array("d", [1.5]), [1.5]),
    (collections.UserList([1]), [1]),
    (collections.UserString("a"), "a"),
    ({"a": 1}.keys(), ["a"]),
    ({"a": 1}.values(), [1]),
    ({"a": 1}.items(), [["a", 1]]),
    # Dicts
    (
        {7: "a", 2.5: "b", True: "c", False: "d", None: "e"},
        {"7": "a", "2.5": "b", "true": "c", "false": "d", "null": "e"},
    ),
    ({date(2024, 2, 29): 1, Colour.RED: 2, EvilText("k"): 3}, {"2024-02-29": 1, "red": 2, "k": 3}),
    (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    (collections.defaultdict(list, {"a": [{1}]}), {"a": [[1]]}),
    (collections.Counter("aab"), {"a": 2, "b": 1}),
    (collections.UserDict(a=(1,)), {"a": [1]}),
    (collections.ChainMap({"a": 1}, {"a": 2}), {"a": 1}),
    (types.MappingProxyType({"a": 1}), {"a": 1}),
    (Point(1, Point(2)), {"x": 1, "y": {"x": 2, "y": None}}),
    (Slotted(date(2024, 1, 2)), {"when": "2024-01-02"}),
    (Model(name="a", tags={"y", "x"}), {"name": "a", "tags": ["x", "y"]}),
    (
        [Account(home=pydantic.AnyUrl("https://a.example/"), key=pydantic.SecretStr("k"), also=[Model(name="b")])] * 2,
        [{"home": "https://a.example/", "key": "**********", "also": [{"name": "b", "tags": []}]}] * 2,
    ),
    (
        Link(home=pydantic.AnyUrl("https://a.example/"), key=pydantic.SecretStr("k")),
        {"home": "https://a.example/", "key": "**********", "also": [], "word": "a+", "body": b"\xff"},
    ),
    (Parcel(weight=Weight()), {"weight": "3 kg"}),
    # Text and numbers
    (re.compile(b"a+"), b"a+"),
    (datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC), "2024-01-02T03:04:05+00:00"),
    (date(2024, 1, 2), "2024-01-02"),
    (time(3, 4), "03:04:00"),
    (timedelta(days=1, microseconds=500_000), 86400.5),
    (Decimal("1.10"), "1.10"),
    (fractions.Fraction(1, 3), "1/3"),
    (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (pathlib.PurePosixPath("/a/b"), "/a/b"),
    (Colour.RED, "red"),
    (Level.HIGH, 3),
    (Mode.FAST, "fast"),
    (Permission.READ, 1),
    # Subclasses, by their base class's methods
    (EvilText("x"), "x"),
    (EvilInt(7), 7),
    (EvilFloat(1.5), 1.5),
    (EvilBytes(b"x"), b"x"),
    (EvilList([1, EvilText("a")]), [1, "a"]),
    (EvilTuple((1,)), [1]),
    (EvilSet({2, 1}), [1, 2]),
    (EvilDict({"a": EvilInt(1)}), {"a": 1}),
    (EvilDatetime(2024, 1, 2), "2024-01-02T00:00:00"),
]


def exactly(value: object) -> object:
    """Value with its types, all the way down: 1 == True == 1.0 elsewhere."""
    match value:
        case list():
            return [exactly(item) for item in value]
        case dict():
            return {key: exactly(item) for key, item in value.items()}
    return type(value), value


@pytest.mark.conforms("T6", "Q-b7")
@each_row(("value", "sent"), CONVERTED, ids=lambda item: f"{type(item).__name__}")
def test_a_value_is_converted_as_documented(value: object, sent: object) -> None:
    assert exactly(to_plain(value)) == exactly(sent)
    assert exactly(to_plain([{"k": value}])) == exactly([{"k": sent}])


@each_row("number", ["nan", "inf", "-inf"])
def test_floats_that_json_lacks_are_sent_as_they_are(number: str) -> None:
    assert repr(to_plain({"x": (float(number),)})) == f"{{'x': [{number}]}}"


def test_a_set_that_cannot_be_sorted_keeps_its_order() -> None:
    mixed = {1, "a", None}
    assert to_plain(mixed) == list(mixed)


def looped() -> list[Any]:
    loop: list[Any] = [1]
    loop.append({"again": (loop,)})
    return loop


class BrokenModel:
    def model_dump(self) -> dict[str, object]:
        raise ZeroDivisionError("secret")


class LyingModel:
    def model_dump(self) -> object:
        return self


class Pretender:
    __class__ = property(lambda self: str)


class EvilName(type):
    __name__ = property(refuse)


class Nameless(metaclass=EvilName):
    pass


async def coroutine_function() -> None:
    pass


REFUSED: list[tuple[object, str]] = [
    (2**64, r"value: int does not fit 64 bits: send str\(x\)"),
    ([0, {"a": -(2**63) - 1}], r"value\[1\]\['a'\]: int does not fit"),
    ("a\ud800", r"value: text holds a lone surrogate at index 1: send x.encode\(errors="),
    ({"a": ["\udfff"]}, r"value\['a'\]\[0\]: text holds a lone surrogate"),
    ({"a": {"\ud800": 1}}, r"value\['a'\]: text holds a lone surrogate"),
    ({(1, 2): 3}, r"value: a key is tuple, and keys have to be text: send list"),
    ({"a": {b"k": 3}}, r"value\['a'\]: a key is bytes"),
    ({1: "a", "1": "b"}, r"value: two keys become '1'"),
    ({None: 1, "null": 2}, r"value: two keys become 'null'"),
    (looped(), r"value\[1\]\['again'\]\[0\]: list contains itself"),
    ((x for x in [1]), "a generator may never end"),
    (map(str, ()), "an iterator may never end"),
    ([1j], r"value\[0\]: complex numbers"),
    ([ValueError("x")], r"value\[0\]: an exception: send str"),
    (int, "a class is not data"),
    (io.BytesIO(b"x"), r"value: a file in memory: send x.getvalue\(\)"),
    (io.StringIO("x"), r"value: a file in memory: send x.getvalue\(\)"),
    (io.TextIOWrapper(io.BytesIO()), r"a file: send x.read\(\)"),
    (Upload(by=object()), r"value\['by'\]: object is not data"),
    ((print, 1), r"value\[0\]: builtin_function_or_method is not data"),
    (object(), "value: object is not data"),
    (types.SimpleNamespace(a=1), "SimpleNamespace is not data"),
    (Pretender(), "Pretender is not data"),
    (Nameless(), "Nameless is not data"),
    (EvilInt(2**70), "int does not fit"),
    (EvilText("\ud800"), "lone surrogate"),
    (Point(1, object()), r"value\['y'\]: object is not data"),
    ([BrokenModel()], r"value\[0\]: BrokenModel failed to be converted \(ZeroDivisionError\)$"),
]


@pytest.mark.conforms("T6", "C-b8", "Q-b7")
@each_row(("value", "problem"), REFUSED, ids=lambda item: item if type(item) is str else "")
def test_a_value_without_a_form_is_refused_by_path(value: object, problem: str) -> None:
    with pytest.raises(UnsendableValue, match=f"^cannot send {problem}" if "value" in problem else problem):
        to_plain(value)


def test_a_coroutine_is_refused_with_the_cure() -> None:
    forgotten = coroutine_function()
    with pytest.raises(UnsendableValue, match="await it first"):
        to_plain([forgotten])
    forgotten.close()


def test_the_callers_name_for_the_value_starts_the_path() -> None:
    with pytest.raises(UnsendableValue, match=r"cannot send search arguments\['q'\]: object is not data") as caught:
        to_plain({"q": object()}, "search arguments")
    assert caught.value.path == "search arguments['q']"


def test_a_long_path_and_a_long_key_are_cut() -> None:
    value: Any = object()
    for _ in range(50):
        value = {"k" * 1000: value}
    with pytest.raises(UnsendableValue) as caught:
        to_plain(value)
    assert caught.value.path.endswith("...")
    assert len(caught.value.path) < 1000


@given(plain)
def test_plain_data_is_sent_as_it_is_without_a_copy(value: Any) -> None:
    assert to_plain(value) is value


odd = st.recursive(
    plain | st.dates() | st.times() | st.timedeltas() | st.decimals() | st.uuids() | st.complex_numbers() | st.text(),
    lambda inner: (
        st.tuples(inner, inner)
        | st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.none() | st.dates(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(odd)
def test_what_to_plain_returns_can_be_sent_and_is_sent_unchanged(value: Any) -> None:
    try:
        sent = to_plain(value)
    except UnsendableValue:
        return
    received = decode(encode(Progress(sent))[4:])
    assert isinstance(received, Progress)
    assert repr(received.value) == repr(sent)


@pytest.mark.conforms("C-b8")
@each_row("wrap", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {1: inner}, Point])
@each_row("leaf", [1, date(2024, 1, 2), Colour.RED], ids=repr)
def test_depth_ends_at_64_containers_whatever_is_at_the_bottom(wrap: Any, leaf: object) -> None:
    value = leaf
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    assert encode(Progress(to_plain(value)))
    with pytest.raises(ValueTooLarge, match=r"value.*\.\.\. too large \(65 > 64 levels deep\)"):
        to_plain(wrap(value))


def test_a_smaller_depth_can_be_asked_for() -> None:
    assert to_plain([[1]], max_depth=2) == [[1]]
    with pytest.raises(ValueTooLarge, match=r"value\[0\]\[0\] too large \(3 > 2 levels deep\)"):
        to_plain([[[1]]], max_depth=2)


class Endless(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return map(str, iter(int, 1))

    def __len__(self) -> int:
        return 0


class EndlessSequence(collections.UserList[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


class EndlessMapping(Endless):
    def __iter__(self) -> Iterator[str]:
        number = 0
        while True:
            yield str(number)
            number += 1


@pytest.mark.slow
@each_row("value", [range(10**30), EndlessSequence(), EndlessMapping()], ids=lambda value: type(value).__name__)
def test_a_value_that_never_ends_is_refused(value: object) -> None:
    with pytest.raises(ValueTooLarge, match="elements"):
        to_plain(value)


@each_row("make", [lambda: [None] * MAX_ELEMENTS, lambda: (None,) * MAX_ELEMENTS])
def test_a_value_of_too_many_elements_is_refused(make: Any) -> None:
    with pytest.raises(ValueTooLarge, match=rf"\({MAX_ELEMENTS + 1} > {MAX_ELEMENTS} elements\)"):
        to_plain(make())


@pytest.mark.slow
def test_a_small_value_that_unfolds_without_end_is_refused() -> None:
    bomb: Any = ()
    for _ in range(60):
        bomb = (bomb, bomb)
    with pytest.raises(ValueTooLarge, match="elements"):
        to_plain(bomb)


def test_a_conversion_that_returns_itself_ends() -> None:
    with pytest.raises(ValueTooLarge, match="levels deep"):
        to_plain(LyingModel())


def test_running_out_of_memory_is_not_taken_for_a_refusal() -> None:
    class Hungry:
        def model_dump(self) -> object:
            raise MemoryError

    with pytest.raises(MemoryError):
        to_plain([Hungry()])


def test_no_package_is_imported_to_recognise_its_types() -> None:
    script = (
        "import sys; from toolcell_bridge.guest.values import to_plain; to_plain([(1,), {2}]);"
        "print({'numpy', 'pandas', 'decimal', 'uuid', 'fractions'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
