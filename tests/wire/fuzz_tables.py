"""Invariant tested: whatever an array or a table claims to be, it is read, or refused with `RemoteProtocolError`.

    python tests/wire/fuzz_tables.py --tables 1000000 --seed 1

Valid encodings of every kind of column are bent in their descriptions (wrong types, extreme numbers, foreign kinds), and
then in their bytes. What is accepted is read whole, written again and given to numpy, pandas, polars and pyarrow where
they are installed: none of it may raise, and none may hold more than the message allows. Ends with status 1 and the
bytes that did it if anything else happens.
"""

from __future__ import annotations

import copy
import random
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgpack
import numpy  # noqa: F401  # its checks are those of a host that has imported it

from toolcell_bridge.wire import columns
from toolcell_bridge.wire.codec import decode, encode
from toolcell_bridge.wire.columns import FIXED
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.framing import HEADER_BYTES
from toolcell_bridge.wire.messages import MAX_GUEST_ELEMENTS, Message, Result
from toolcell_bridge.wire.tables import AnyTable, Table, from_bytes
from wire.fuzz_frames import cut, run
from wire.table_examples import TABLES

CORPUS = 512
TABLES_PER_CORPUS = 20_000
READ_ROWS = 100
CHECKED_TWICE_ONE_IN = 4
MADE_ONE_IN = 50
"""How often what was accepted is given to packages, which takes as long as 50 refusals."""

POOL: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 4, 8, 64, -1, 2**20, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 0.5),
    *(
        "",
        "x",
        "a" * 600,
        b"",
        b"\xff" * 8,
        [],
        {},
        [[]],
        ["a"],
        {"a": "b"},
        [0, 1],
        [0, 0],
        [2**61, 2**39],
        ["us", None],
    ),
    *("us", "s", "UTC", "+05:30", "+99:99", "../../etc/passwd", "dateutil//etc/passwd", "Europe/Nowhere", "Europe"),
    *(*FIXED, "text", "bytes", "category", "range", "plain", "pandas.DataFrame", "pandas.Series", "numpy", "array"),
    *(
        "masked",
        "str",
        "string",
        "object",
        "arrow",
        "polars.Series",
        "pyarrow.Table",
        "pyarrow.Array",
        ["us", "Europe"],
    ),
]


@dataclass
class Tally:
    """What a fuzzing run has seen."""

    tables: int = 0
    refused: int = 0
    made: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        accepted = ", ".join(f"{name} {count}" for name, count in sorted(self.accepted.items()))
        return (
            f"{self.tables} encodings in {self.seconds:.1f} s, {self.tables / self.seconds:.0f}/s; {self.refused} refused, "
            f"{self.made} given to packages; peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB\n"
            f"accepted: {accepted}"
        )


def parts_of(table: AnyTable) -> tuple[Any, bytes]:
    """Return the description of a table, and the bytes of its buffers."""
    data = table.to_bytes()
    start = 4 + int.from_bytes(data[:4], "big")
    return msgpack.unpackb(data[4:start]), data[start:]


def bend(rng: random.Random, tree: Any) -> None:
    """Change one entry of nested lists."""
    while True:
        where = rng.randrange(len(tree))
        inner = tree[where]
        if not isinstance(inner, list) or not inner or rng.random() < 0.05:
            break
        tree = inner
    match rng.randrange(8):
        case 0:
            del tree[where]
            if not tree:
                tree.append(None)
        case 1:
            tree.insert(where, copy.deepcopy(rng.choice(tree)))
        case 2 if type(inner) is int:
            tree[where] = max(min(inner + rng.choice((-1, 1)), 2**64 - 1), -(2**63))
        case _:
            tree[where] = copy.deepcopy(rng.choice(POOL))


def bent(rng: random.Random, examples: list[tuple[Any, bytes]]) -> bytes:
    """Return the body of a message with one or two tables that are described rightly or wrongly."""
    chosen = [rng.choice(examples) for _ in range(rng.choice((1, 1, 1, 2)))]
    headers = [copy.deepcopy(header) for header, _ in chosen]
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        bend(rng, headers)
    message = msgpack.packb([21, [msgpack.ExtType(1, b"")] * len(chosen), []])
    packed = msgpack.packb(headers)
    head = b"\xc1" + len(message).to_bytes(4, "big") + len(packed).to_bytes(4, "big") + message + packed
    return head + bytes(-(HEADER_BYTES + len(head)) % 8) + b"".join(buffers for _, buffers in chosen)


def read(table: AnyTable) -> None:
    """Read all of a table that was accepted."""
    assert table.elements <= MAX_GUEST_ELEMENTS
    str(table)
    repr(table)
    table._repr_html_()
    again = from_bytes(table.to_bytes())
    assert again == table
    assert hash(again) == hash(table)
    if isinstance(table, Table):
        table.rows(0, READ_ROWS)
        assert len(table.schema) <= len(table.columns)
    if len(table) <= READ_ROWS:
        table.plain()


def make(table: AnyTable) -> None:
    """Give a table to each package."""
    makers: list[Callable[[], Any]] = [table.to_numpy, table.native]
    if isinstance(table, Table):
        makers += [table.to_pandas, table.to_polars, table.to_arrow]
    for maker in makers:
        try:
            maker()
        except ModuleNotFoundError:
            pass


def no_numpy() -> None:
    """Stand for a program that has not imported it."""


def decoded(body: bytes) -> Message | None:
    """Return the message, or None where it is refused."""
    try:
        return decode(body, MAX_GUEST_ELEMENTS)
    except RemoteProtocolError:
        return None


def feed(body: bytes, tally: Tally, rng: random.Random) -> None:
    """Decode one body and check the invariant. Both ways to check it, with numpy and without, decide alike."""
    message = decoded(body)
    if rng.randrange(CHECKED_TWICE_ONE_IN) == 0:
        with mock.patch.object(columns, "_numpy", new=no_numpy):
            assert decoded(body) == message
    if message is None:
        tally.refused += 1
        return
    assert isinstance(message, Result)
    for table in message.value if isinstance(message.value, list) else []:
        if not hasattr(table, "to_bytes") or isinstance(table, int):
            continue
        tally.accepted[table.kind] += 1
        read(table)
        if rng.randrange(MADE_ONE_IN) == 0:
            tally.made += 1
            make(table)


def fuzz(tables: int, seed: int) -> Tally:
    """Feed this many encodings.

    Raises:
        AssertionError: the invariant does not hold; the message has the bytes.
    """
    rng = random.Random(seed)
    tally = Tally(tables)
    examples = [parts_of(table) for table in TABLES]
    started = time.perf_counter()
    corpus: list[bytes] = []
    for number in range(tables):
        if number % TABLES_PER_CORPUS == 0:
            corpus = [bent(rng, examples) for _ in range(CORPUS)]
            corpus += [encode(Result([table], []))[HEADER_BYTES:] for table in TABLES]
        body = bent(rng, examples) if number % 2 else cut(rng, rng.choice(corpus), rng.choice(corpus))
        try:
            feed(body, tally, rng)
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error!s:.200} from {body.hex()}") from error
    tally.seconds = time.perf_counter() - started
    return tally


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of packages, about the values
    sys.exit(run(fuzz, "tables"))
