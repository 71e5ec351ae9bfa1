"""Arrays and tables: what is sent is what arrives, and what contradicts itself is refused."""

from __future__ import annotations

import copy
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import accumulate, pairwise, product
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell.support.call_text import table_text
from toolcell_bridge.wire import columns as columns_module
from toolcell_bridge.wire.codec import decode, decode_in_steps, encode, encode_parts
from toolcell_bridge.wire.columns import MOST_EMPTY_ROWS, BadTable, Column, is_time_zone, time_zone
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.errors import RemoteProtocolError, ValueTooLarge
from toolcell_bridge.wire.framing import FrameReader
from toolcell_bridge.wire.messages import CallTool, Hello, Progress, Result, RunScript
from toolcell_bridge.wire.plain import PackedValue, packed_size
from toolcell_bridge.wire.tables import AnyTable, Array, Axis, Table, from_bytes
from wire.fuzz_tables import fuzz, parts_of
from wire.table_examples import COLUMNS, COUNTED, TABLES, WORDS, numbers, text
from wire.wire_strategies import HELLO, RUN

pytestmark = pytest.mark.quick


def sent(value: Any, most: int | None = None) -> Any:
    message = decode(encode(Result(value, []))[4:], most)
    assert isinstance(message, Result)
    return message.value


@each_row("table", TABLES, ids=repr)
def test_a_table_is_sent_and_written_as_what_it_is(table: AnyTable) -> None:
    assert sent(table) == table
    assert sent({"a": [table, 1], "b": table}) == {"a": [table, 1], "b": table}
    assert from_bytes(table.to_bytes()) == table
    assert hash(sent(table)) == hash(table) and table not in (None, "text", table.to_bytes())


def test_values_of_each_kind_are_those_of_python() -> None:
    found = [column.values() for column in COLUMNS]
    assert found[0] == [1, -2, 3]
    assert found[1] == [1, None, 3]
    assert found[5] == [1 + 2j, 3 + 4j, 5 + 6j]
    assert found[6] == [False, True, None]
    assert str(found[8][0]) == "1970-01-01 01:00:00+01:00"
    assert found[8][1] is None
    assert found[9][0] == f"{2**62} s after 1970-01-01"
    assert found[10][:2] == [timedelta(0), timedelta(milliseconds=1)]
    assert found[11][:2] == [date(1970, 1, 1), date(2022, 1, 8)]
    assert found[12][2] == time(23, 59, 59, 999999)
    assert found[13:23] == [
        [b"a", b"", b"bc"], [1, ["a", {"b": None}], "c"], ["y", None, "x"], [7, 7, 9], ["x", None, "y"],
        [Decimal("0.01"), Decimal("-0.01"), None], [["x"], None, ["y", "z"]], [[1], [], [2, 3]], [[0, 1], None, [4, 5]],
        ["a", None, "c"],
    ]  # fmt: skip
    assert WORDS.values(1, 3) == ["zwölf", "три"]


def test_rows_have_the_labels_of_the_index_unless_it_only_counts() -> None:
    assert TABLES[0].rows(0, 1)[0]["c0"] == 1  # type: ignore[union-attr]
    assert "index" not in TABLES[0].rows(0, 1)[0]  # type: ignore[union-attr]
    assert TABLES[1].plain()[0] == {"word": "one", "level_1": 1, "v_sum": 1, "v_mean": 1}


def test_the_text_of_a_table_is_labelled_and_bounded() -> None:
    assert str(TABLES[1]) == (
        "DataFrame, 3 rows x 2 columns (word text, level_1 int64, v_sum int64, v_mean int8)\n"
        "word   level_1  v_sum  v_mean\n"
        "one    1        1      1\n"
        "zwölf  2        -2     null\n"
        "три    3        3      3"
    )
    count = 100_000
    rows = Column("float64", count, numbers("d", *map(float, range(count))))
    columns = [rows] * 50
    labels = Axis((text(*[f"<c>{'x' * 100}{number}" for number in range(50)]),), (None,))
    large = Table("polars.DataFrame", count, Axis(), labels, columns)
    assert len(str(large)) < 40_000
    assert "100000 rows x 50 columns" in str(large)
    assert "<c>" not in large._repr_html_()
    assert len(str(Array("numpy", [1000, 100], rows))) < 10_000


def in_one_column(kind: str, column: Column) -> Table:
    counted = Axis((Column("range", column.length, detail=(0, 1)),), (None,))
    return Table(kind, column.length, counted, LABEL, [column])


LABEL = Axis((text("c"),), (None,))


def peak_bytes(work: Callable[[], object]) -> int:
    """Return what Python takes at most, while it does some work."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_text_of_cells_is_made_of_what_is_shown_of_them_however_much_is_in_them() -> None:
    count = 200_000
    nested = Column("bool", count, bytes(count))
    for _ in range(6):
        nested = Column("list", count, detail=(nested, 1))
    shorts = Column("list", 2, lengths=numbers("I", 1, count - 1), detail=(nested, 0))
    codes = Column("category", 3, numbers("i", 0, count - 1, -1), detail=(text(*map(str, range(count))), False))
    long = "\\0" * count
    for column in (
        Column("list", 1, detail=(nested, count)),
        shorts,
        codes,
        Column("plain", 1, detail=[[{long: long}]]),
    ):
        table = in_one_column("pandas.DataFrame", column)
        for each in (table, Array("numpy", [column.length], column), Array("numpy", [1, column.length], column)):
            for shown in (str, Array._repr_html_, lambda value: table_text(value, 200)):
                assert peak_bytes(lambda: shown(each)) < 4 * len(each.to_bytes())  # noqa: B023
    assert str(in_one_column("pandas.DataFrame", shorts)).split("\n")[2] == "[[[[[[[False]]]]]]]"
    assert str(in_one_column("pandas.DataFrame", codes)).split("\n")[2:] == ["0", "199999", "null"]


def test_names_of_columns_with_one_label_are_found_at_once() -> None:
    count = 100_000  # trying all names for each of them would take hours
    labels = Axis((text("a_2", *["a"] * (count - 1)),), (None,))
    table = Table("polars.DataFrame", 1, Axis(), labels, [Column("bool", 1, b"\\1")] * count)
    names = list(table.named_columns())
    assert names[:4] == ["a_2", "a", "a_3", "a_4"]
    assert len(set(names)) == count


def test_a_table_of_many_columns_or_levels_is_read_in_steps() -> None:
    count = 1_000
    column = Column("bool", 1, b"\\1")
    levels = Axis((column,) * count, (None,) * count)
    labels = Axis((text(*["a"] * count),), (None,))
    for table in (
        Table("polars.DataFrame", 1, Axis(), labels, [column] * count),
        Table("pandas.DataFrame", 1, levels, Axis((text("a"),), (None,)), [column]),
    ):
        assert len(list(decode_in_steps(encode(Result(table, []))[4:]))) > count


def test_reading_a_table_loads_no_package() -> None:
    source = (
        "import sys\nfrom toolcell_bridge.wire.tables import from_bytes\n"
        f"table = from_bytes(bytes.fromhex({TABLES[0].to_bytes().hex()!r}))\n"
        "table.rows(), str(table), table._repr_html_(), table.schema\n"
        "print({'numpy', 'pandas', 'polars', 'pyarrow'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", source], text=True) == "set()\n"


def test_an_array_of_several_dimensions_is_nested_lists() -> None:
    assert Array("numpy", [3, 1], COLUMNS[0]).tolist() == [[1], [-2], [3]]
    assert Array("numpy", [2, 0], Column("int8", 0)).tolist() == [[], []]


Bend = Callable[[Any], None]


def put(*path: int, value: Any) -> Bend:
    def bend(header: Any) -> None:
        for step in path[:-1]:
            header = header[step]
        header[path[-1]] = value

    return bend


FRAME, ARRAY, SERIES = 0, 7, 3
KIND, FORM, NULLS, TEXT_BYTES, DETAIL = range(5)


@each_row(
    ("example", "bend"),
    [
        (FRAME, put(0, value="tables")),
        (FRAME, put(1, value="os.system")),
        (FRAME, put(2, value=4)),
        (FRAME, put(2, value=2**62)),
        (FRAME, put(2, value=True)),
        (FRAME, put(3, 1, 0, KIND, value="int64")),
        (FRAME, put(3, 0, 0, value=["a"])),
        (FRAME, put(4, value=[[], []])),
        (FRAME, put(5, 0, KIND, value="int65")),
        (FRAME, put(5, 0, KIND, value="range")),
        (FRAME, put(5, 0, FORM, value="pickle")),
        (FRAME, put(5, 0, TEXT_BYTES, value=-1)),
        (FRAME, put(5, 8, DETAIL, value=["us", "dateutil//etc/passwd"])),
        (FRAME, put(5, 8, DETAIL, value=["us", "../../etc/passwd"])),
        (FRAME, put(5, 8, DETAIL, value=["us", "+99:99"])),
        (FRAME, put(5, 8, DETAIL, value=["fortnight", None])),
        (FRAME, put(5, 14, DETAIL, value=[1, 2])),
        (FRAME, put(5, 15, DETAIL, 2, value=1)),
        (FRAME, put(5, 15, DETAIL, 1, value="float64")),
        (FRAME, put(5, 18, TEXT_BYTES, value=3)),
        (SERIES, put(5, value=[])),
        (ARRAY, put(2, value=[2**20, 2**20, 2**20])),
        (ARRAY, put(2, value=[0, 2**39])),
        (ARRAY, put(2, value=[-1])),
        (ARRAY, put(2, value=[])),
        (ARRAY, put(2, value=[1] * 33)),
        (ARRAY, put(3, KIND, value="category")),
    ],
)
def test_a_description_that_contradicts_the_bytes_is_refused(example: int, bend: Bend) -> None:
    header, buffers = parts_of(TABLES[example])
    bent = copy.deepcopy(header)
    bend(bent)
    assert bent != header
    packed: bytes = msgpack.packb(bent)
    with pytest.raises(BadTable):
        from_bytes(len(packed).to_bytes(4, "big") + packed + buffers)


@pytest.fixture(params=["with numpy", "without"])
def checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of a program that has imported numpy, and of one that has not; of a few rows at a time."""
    pytest.importorskip("numpy")
    if request.param == "without":
        monkeypatch.setattr(columns_module, "_numpy", lambda: None)
    monkeypatch.setattr(columns_module, "_CHUNK", 2)


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("data", [b"a\xff\xffbc", "aéb".encode() + b"x", b"ab"], ids=["no UTF-8", "split", "short"])
def test_text_is_utf_8_piece_by_piece(data: bytes) -> None:
    column = Column("text", 2, data, numbers("I", 2, 3))
    with pytest.raises(BadTable):
        from_bytes(Array("numpy", [2], column).to_bytes())


@pytest.mark.usefixtures("checks")
def test_no_text_begins_inside_a_character_wherever_it_is() -> None:
    data = "é".encode() * 5
    for lengths in product(range(4), repeat=5):
        if sum(lengths) != len(data):
            continue
        array = Array("numpy", [5], Column("text", 5, data, numbers("I", *lengths)))
        if all(end % 2 == 0 for end in accumulate(lengths)):
            assert from_bytes(array.to_bytes()).tolist() == ["é" * (each // 2) for each in lengths]
        else:
            with pytest.raises(BadTable, match="inside a character"):
                from_bytes(array.to_bytes())


def test_large_buffers_are_sent_without_a_copy_and_received_in_memory_of_their_own() -> None:
    buffer = bytes(300_000)
    large = Array("numpy", [300_000], Column("uint8", 300_000, buffer))
    parts = encode_parts(Result([large, TABLES[FRAME], large], []))
    assert [type(each) for each in parts] == [bytes, memoryview, bytes, memoryview]
    assert isinstance(parts[1], memoryview)
    assert parts[1].obj is buffer
    reader = FrameReader()
    after = encode(Progress(1))
    data = b"".join(parts) + after
    reader.receive_data(data[:70_000])
    assert reader.next_frame() is None
    reader.receive_data(data[70_000:])
    body = reader.next_frame()
    assert body is not None
    assert decode(body) == Result([large, TABLES[FRAME], large], [])
    assert reader.next_frame() == after[4:]


@pytest.mark.usefixtures("checks")
def test_codes_outside_of_their_categories_are_refused() -> None:
    for code in (-2, 2):
        column = Column("category", 1, numbers("b", code), detail=(text("a", "b"), False))
        with pytest.raises(BadTable):
            from_bytes(Array("numpy", [1], column).to_bytes())


@pytest.mark.slow
def test_lists_say_how_long_they_are_and_are_not_nested_without_end() -> None:
    inner = Column("int8", 4, bytes(4))
    for size, lengths in ((3, b""), (-1, b""), (0, numbers("I", 1, 2)), (0, numbers("I", 5, 2**32 - 1)), (True, b"")):
        column = Column("list", 2, lengths=lengths, detail=(inner, size))
        with pytest.raises(BadTable):
            from_bytes(Array("numpy", [2], column).to_bytes())
    column = Column("list", 4, detail=(inner, 1))
    for _ in range(7):
        column = Column("list", 4, detail=(column, 1))
    assert from_bytes(Array("numpy", [4], column).to_bytes()).tolist()[0] == [[[[[[[[0]]]]]]]]
    for _ in range(2, 300):
        column = Column("list", 4, detail=(column, 1))
        with pytest.raises(BadTable):
            from_bytes(Array("numpy", [4], column).to_bytes())
    coded = Column("category", 1, b"\0", detail=(Column("list", 4, detail=(inner, 1)), False))
    with pytest.raises(BadTable):
        from_bytes(Array("numpy", [1], coded).to_bytes())


def test_decimals_have_no_more_digits_than_announced() -> None:
    for number, is_legal in ((99, True), (-99, True), (100, False), (-100, False), (2**127 - 1, False)):
        data = number.to_bytes(16, "little", signed=True) + bytes(16 * 5000)
        for rows in (data, data[16:] + data[:16]):
            array = Array("numpy", [5001], Column("decimal", 5001, rows, detail=(2, 0)))
            if is_legal:
                assert number in from_bytes(array.to_bytes()).tolist()
            else:
                with pytest.raises(BadTable, match="more digits"):
                    from_bytes(array.to_bytes())


def test_rows_that_have_no_bytes_are_bounded() -> None:
    for count, is_legal in ((MOST_EMPTY_ROWS, True), (MOST_EMPTY_ROWS + 1, False)):
        index = Axis((Column("range", count, detail=(0, 1)),), (None,))
        data = Table("pandas.DataFrame", count, index, Axis((text(),), (None,)), []).to_bytes()
        if is_legal:
            assert len(from_bytes(data)) == count
        else:
            with pytest.raises(BadTable):
                from_bytes(data)


def test_rows_and_lists_without_bytes_count_as_elements() -> None:
    """Else a few bytes of a message would be lists and rows without end."""
    none = Table("polars.DataFrame", 300_000, Axis(), Axis((text(),), (None,)), [])
    for value in (
        none,
        [Table("polars.DataFrame", 100_000, Axis(), none.axis, [])] * 3,
        Array("numpy", [300_000, 0], Column("int8", 0)),
    ):
        with pytest.raises(RemoteProtocolError, match="elements"):
            decode(encode(Result(value, []), most=2**24)[4:])
    items = Column("float64", 300_000, bytes(8 * 300_000))
    inner = Column("list", 300_000, detail=(items, 1))
    assert sent(in_one_column("pandas.DataFrame", Column("list", 100_000, detail=(inner, 3)))).length == 100_000
    thin = Column("list", 300_000, detail=(Column("bool", 300_000, bytes(300_000)), 1))
    with pytest.raises(RemoteProtocolError, match="elements"):
        value = in_one_column("pandas.DataFrame", Column("list", 100_000, detail=(thin, 3)))
        decode(encode(Result(value, []), most=2**24)[4:])


def test_only_labels_of_one_level_count() -> None:
    level = Column("range", 3, detail=(0, 1))
    for count in (1, 2):
        data = Table("pandas.DataFrame", 3, Axis((level,) * count, (None,) * count), LABEL, [COLUMNS[0]]).to_bytes()
        if count == 1:
            assert len(from_bytes(data)) == 3
        else:
            with pytest.raises(BadTable, match="range"):
                from_bytes(data)


def test_how_much_rows_are_is_known_before_they_are_made() -> None:
    codes = Column("category", 3, numbers("b", 1, -1, 1), detail=(text("x", "y" * 100), True))
    lists = Column("list", 3, lengths=numbers("I", 1, 0, 2), detail=(text("a", "b", "c" * 50), 0))
    assert (codes.cells, codes.text_bytes) == (5, 200)
    assert (lists.cells, lists.text_bytes) == (6, 52)
    table = Table("polars.DataFrame", 3, Axis(), Axis((text("k" * 10, "l" * 10),), (None,)), [codes, lists])
    assert (table.cells, table.plain_bytes) == (14, 14 + 252 + 60)
    assert Array("numpy", [3], codes).plain_bytes == 205
    assert Array("numpy", [7, 0], Column("int8", 0)).cells == 7


def test_a_table_counts_as_elements_and_bytes_of_its_message() -> None:
    values = [TABLES[FRAME]] * 50
    assert sent(values, 20_000) == values
    with pytest.raises(RemoteProtocolError):
        sent(values, 5_000)
    large = Array("numpy", [100_000], Column("uint8", 100_000, bytes(100_000)))
    assert 100_000 < packed_size(large) < 100_100
    with pytest.raises(ValueTooLarge):
        encode(Result(large, []), 100_000)


@given(cuts=st.lists(st.integers(0, 200_000), max_size=5))
def test_a_message_with_tables_does_not_depend_on_how_its_bytes_were_split(cuts: list[int]) -> None:
    large = Array("numpy", [100_001], Column("uint8", 100_001, bytes(range(256)) * 390 + bytes(161)))
    end = Connection.host()
    data = encode(HELLO) + encode(CallTool(1, "f", {"x": large, "y": TABLES[FRAME]}, None))
    found: list[Any] = []
    edges = [0, *sorted(min(each, len(data)) for each in cuts), len(data)]
    for start, stop in pairwise(edges):
        end.receive_data(data[start:stop])
        while (message := end.next_message()) is not None:
            found.append(message)
            if isinstance(message, Hello):
                end.send(RUN)
    assert found[1].args == {"x": large, "y": TABLES[FRAME]}


def test_extensions_outside_of_messages_with_tables_are_illegal() -> None:
    for value in (msgpack.ExtType(1, b""), [msgpack.ExtType(1, b"")]):
        with pytest.raises(RemoteProtocolError):
            decode(msgpack.packb([21, value, []]))


def test_inputs_of_a_script_may_be_tables() -> None:
    given, fields = {"df": TABLES[FRAME]}, {name: getattr(RUN, name) for name in RUN.__slots__}
    message = RunScript(**{**fields, "inputs": given})
    for inputs in (given, PackedValue(given)):
        assert decode(encode(RunScript(**{**fields, "inputs": inputs}))[4:]) == message


columns = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1)).map(lambda found: Column("int64", len(found), numbers("q", *found))),
    st.lists(st.floats()).map(lambda found: Column("float64", len(found), numbers("d", *found))),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]))).map(lambda found: text(*found)),
)


@given(column=columns)
def test_any_column_comes_back(column: Column) -> None:
    array = Array("numpy", [column.length], column)
    again = sent(array)
    assert again == array
    assert repr(again.tolist()) == repr(column.values())
    table = Table("pandas.Series", column.length, COUNTED, Axis((text("v"),), (None,)), [column])
    if column.length == 3:
        assert sent(table) == table


@pytest.mark.slow
@pytest.mark.conforms("T7", "T-b1")
@each_row("seed", [1, 2])
def test_mutated_tables_are_read_whole_or_refused(seed: int) -> None:
    tally = fuzz(3000, seed)
    assert tally.refused > 1000
    assert {"numpy", "pandas.DataFrame", "polars.DataFrame", "pyarrow.Table"} <= set(tally.accepted)


def test_a_distance_from_utc_is_read_as_it_is_written() -> None:
    moment = datetime(2026, 11, 28, 12)
    for minutes in range(-14 * 60, 14 * 60 + 1):
        name = f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"
        zone = time_zone(name)
        assert is_time_zone(name) and zone is not None and zone.utcoffset(moment) == timedelta(minutes=minutes), name
    new_york = time_zone("America/New_York")
    assert new_york is not None and new_york.utcoffset(moment) == timedelta(hours=-5)
