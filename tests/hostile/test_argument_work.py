"""Checking arguments costs the host work that is linear in what was sent, whatever was sent.

Work is counted in function calls, which do not depend on the machine's speed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Annotated, Any
from uuid import UUID

import anyio.lowlevel
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ValidationError

from hostile.counting import calls
from hostile.loop_silence import watched
from rows import each_row
from toolcell.calls import checker_process
from toolcell.calls.arguments import ArgumentChecker, InvalidArguments
from toolcell.calls.pydantic_types import MOST_OF_ONE_HASH, type_converter
from toolcell.calls.values import MAX_MESSAGE_CHARS, MAX_PROBLEMS
from toolcell.support.checks import closest
from toolcell.tools import ToolDefinition, ToolRegistry

pytestmark = pytest.mark.quick

SLACK = 1.25
"""Twice as much input may take this much more than twice as many calls: constants and rounding."""

INTEGERS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
EITHER: dict[str, Any] = {"anyOf": [{"type": "integer"}, INTEGERS]}
TREE: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}, "b": {}}, "required": ["b"]},
        {"type": "integer"},
    ]
}
BOTH: dict[str, Any] = {**TREE, "properties": {"a": {"$ref": "#/$defs/tree"}}}


def checker(schema: dict[str, Any], tree: dict[str, Any] = TREE) -> ArgumentChecker:
    whole = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"tree": tree}}
    return ArgumentChecker(ToolDefinition("tool", "A tool under test", whole))


def refusal(checks: ArgumentChecker, args: dict[str, Any]) -> InvalidArguments | None:
    """Why arguments are refused; None when they are not."""
    try:
        checks.check(args)
    except InvalidArguments as error:
        return error
    return None


def nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {"a": inner}
    return inner


ATTACKS: dict[str, tuple[dict[str, Any], Callable[[int], Any]]] = {
    "every item of the wrong type": (INTEGERS, lambda n: ["x"] * 500 * n),
    "every item mended": (INTEGERS, lambda n: ["1"] * 500 * n),
    "only the last item wrong": (INTEGERS, lambda n: [1] * 500 * n + ["x"]),
    "lists that fit no branch": ({"type": "array", "items": EITHER}, lambda n: [["x"] * 50] * 10 * n),
    "JSON in strings": ({"type": "array", "items": INTEGERS}, lambda n: [f"[{'1,' * 50}1]" for _ in range(10 * n)]),
    "no JSON in strings": ({"type": "array", "items": INTEGERS}, lambda n: ["[" * 60] * 10 * n),
    "a tree that fits no branch": ({"$ref": "#/$defs/tree"}, lambda n: nested(7 * n, "bad")),
    "a tree to mend": ({"$ref": "#/$defs/tree"}, lambda n: nested(7 * n, "12")),
    "unknown properties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        lambda n: {f"k{i}": 1 for i in range(500 * n)},
    ),
    "long names": (
        {"type": "object", "properties": {"query": {}}, "additionalProperties": False},
        lambda n: {"quary" * 1000 * n: 1},
    ),
    "names that break a rule": (
        {"type": "object", "propertyNames": {"maxLength": 1}},
        lambda n: {f"k{i}": 1 for i in range(500 * n)},
    ),
    "names under patterns": (
        {"type": "object", "patternProperties": {"^k": {"type": "integer"}, "1$": {}}},
        lambda n: {f"k{i}": "x" for i in range(500 * n)},
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_work_grows_no_faster_than_what_was_sent(name: str) -> None:
    schema, make = ATTACKS[name]
    check = checker(schema).check
    calls(lambda: check({"x": make(1)}), InvalidArguments)  # validators of parts are compiled at their first use
    one, two, four = (calls(partial(check, {"x": make(size)}), InvalidArguments) for size in (1, 2, 4))

    assert two <= 2 * SLACK * one + 100
    assert four <= 2 * SLACK * two + 100


@pytest.mark.parametrize("tree", [TREE, BOTH], ids=["union", "union beside members"])
@pytest.mark.parametrize("leaf", ["bad", "12", None, [], {}], ids=repr)
def test_each_level_of_a_recursive_union_costs_the_same(tree: dict[str, Any], leaf: Any) -> None:
    check = checker({"$ref": "#/$defs/tree"}, tree).check
    calls(lambda: check({"x": nested(2, leaf)}), InvalidArguments)
    some, all_levels = (calls(partial(check, {"x": nested(depth, leaf)}), InvalidArguments) for depth in (15, 60))

    assert all_levels <= 4 * SLACK * some + 100


@pytest.mark.parametrize("name", ATTACKS)
def test_a_message_is_bounded_whatever_was_sent(name: str) -> None:
    schema, make = ATTACKS[name]
    error = refusal(checker(schema), {"x": make(8 if "tree" in name else 100)})

    if error is not None:
        assert len(str(error)) <= (MAX_PROBLEMS + 2) * MAX_MESSAGE_CHARS
        assert len(error.problems) <= MAX_PROBLEMS + 1
        assert ("and more problems" in str(error)) is (len(error.problems) > MAX_PROBLEMS)


OWN_RULES: dict[str, tuple[dict[str, Any], Callable[[int], Any], str]] = {
    "names that are missing": (
        {"type": "object", "required": ["a", "b"]},
        lambda n: {f"k{i}": 1 for i in range(n)},
        'x: missing required property "b"',
    ),
    "names that are unknown": (
        {"properties": {"a1": {}}, "patternProperties": {"^k": {}}, "additionalProperties": False},
        lambda n: {"a": 1, **{f"k{i}": 1 for i in range(n)}},
        'x: unknown property "a" (did you mean `a1`?)',
    ),
    "another type": ({"type": ["string", "integer"]}, lambda n: [0] * n, "x: must be integer or string, not array"),
    "a missing name beside a large member": (
        {"type": "object", "required": ["a", "b"]},
        lambda n: {"a": [0] * n},
        'x: missing required property "b"',
    ),
}


@pytest.mark.parametrize("name", OWN_RULES)
def test_what_is_said_of_a_value_does_not_depend_on_its_size(name: str) -> None:
    schema, make, said = OWN_RULES[name]
    check = checker({"allOf": [schema]})
    small, large = {"x": make(3)}, {"x": make(10_000)}

    for args in (small, large):
        error = refusal(check, args)
        assert error is not None
        assert said in map(str, error.problems)


MANY = {f"k{i}": 1 for i in range(5000)}


@pytest.mark.parametrize(
    ("rule", "make", "said"),
    [
        ({"maxItems": 3}, lambda: [0] * 5000, "does not fit maxItems 3, and has 5000"),
        (
            {"uniqueItems": True},
            lambda: [0] * 5000,
            "has 0 more than once, and uniqueItems is true: send each item once",
        ),
        ({"maxProperties": 1}, lambda: MANY, "does not fit maxProperties 1, and has 5000"),
        ({"contains": {"const": 1}, "minContains": 2}, lambda: [0] * 5000, 'does not fit contains {"const": 1}'),
        ({"enum": [1, 2]}, lambda: [0] * 5000, f"must be one of 1, 2, not [{'0, ' * 39}0,..."),
    ],
    ids=lambda each: None if callable(each) else str(each),
)
def test_the_rule_that_a_large_value_breaks_is_named(rule: dict[str, Any], make: Callable[[], Any], said: str) -> None:
    error = refusal(checker(rule), {"x": make()})

    assert error is not None
    assert [str(problem) for problem in error.problems] == [f"x: {said}"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 300 + "]" * 300, "nested deeper than 64 levels"),
        ("[" * 100_000, "nested deeper than 64 levels"),
        ("[NaN]", "nan is not a JSON number"),
        ("[1e999]", "inf is not a JSON number"),
        ('["\\ud800"]', "lone surrogate"),
        (f"[{'9' * 30}]", "more than 64 bits"),
        ("[" + "1," * 200_000 + "1]", "too many values"),
    ],
    ids=lambda text: text[:20],
)
def test_text_is_decoded_under_the_bounds_of_all_arguments(text: str, said: str) -> None:
    with pytest.raises(InvalidArguments, match=said) as caught:
        checker({"type": "array"}).check({"x": text})
    assert str(caught.value.problems[0]).startswith("x")


@pytest.mark.slow
def test_all_text_of_one_call_is_decoded_under_one_bound() -> None:
    rows = [json.dumps([1] * 30_000)] * 8

    with pytest.raises(InvalidArguments, match=r"x\[6\].*too many values"):
        checker({"type": "array", "items": INTEGERS}).check({"x": rows})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("integer", "9" * 19),
        ("integer", "1e300"),
        ("integer", 1e300),
        ("integer", "-" + "9" * 30),
        ("number", "9" * 350),
        ("number", "9" * 30),
        ("number", "1e999"),
    ],
)
def test_no_number_is_mended_to_one_that_arguments_cannot_hold(kind: str, value: Any) -> None:
    with pytest.raises(InvalidArguments, match="must be"):
        checker({"type": kind}).check({"x": value})


scalars = st.sampled_from([None, True, 0, 1.0, 2.5, "", "1", "x", "[1]", '{"a": "1"}'])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=30,
)
parts = st.recursive(
    st.sampled_from([
        {}, True, False, {"type": "integer"}, {"type": ["string", "null"]}, {"type": "array"}, {"type": "object"},
        {"minimum": 1}, {"enum": ["a", 1]}, {"$ref": "#/$defs/tree"}, {"$ref": "#/properties/x"},
    ]),
    lambda inner: st.one_of(
        st.builds(lambda a, b: {"type": "object", "properties": {"a": a, "b": b}, "required": ["a"]}, inner, inner),
        st.builds(lambda a: {"type": "array", "items": a}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"oneOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"allOf": [a, b]}, inner, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda a: {"additionalProperties": a}, inner),
        st.builds(lambda a: {"not": a}, inner),
    ),
    max_leaves=10,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=parts, value=values)
def test_any_schema_and_value_take_bounded_work_and_refused_ones_have_a_problem(schema: Any, value: Any) -> None:
    checks = checker(schema)
    args = {"x": value}
    calls(lambda: checks.check(args), InvalidArguments)

    assert calls(lambda: checks.check(args), InvalidArguments) <= 3_000 * (1 + len(json.dumps(args)))
    if (error := refusal(checks, args)) is not None:
        assert error.problems


def refuse(value: str) -> str:
    raise ValueError(f"{value} is never right")


Refused = Annotated[str, AfterValidator(refuse)]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [list[date], list[Refused], dict[str, Refused]], ids=["dates", "texts", "a dict"])
@pytest.mark.parametrize("count", [1, 30, 60_000])
async def test_what_a_tools_own_types_refuse_is_said_within_bounds(kind: Any, count: int) -> None:
    async def take(rows: Any) -> int:
        """Take values of a type that a schema cannot describe."""
        return len(rows)

    take.__annotations__["rows"] = kind
    wrong = ["x" * 100] * count if "list" in str(kind) else {f"{n}" + "k" * 100: "x" * 100 for n in range(count)}

    result = await ToolRegistry([take]).execute("take", {"rows": wrong})

    assert "  - rows" in result.text or f"{count} validation errors" in result.text
    assert len(result.text) <= (MAX_PROBLEMS + 2) * MAX_MESSAGE_CHARS
    assert ("and more problems" in result.text) is (count == 30)
    assert result.exc is None


MODULUS = 2**61 - 1
"""Numbers that are so far apart have one hash. Source: sys.hash_info.modulus."""


@dataclasses.dataclass
class Basket:
    """A record with a set, as a tool takes it."""

    codes: set[Decimal]


class Shelf(BaseModel):
    """A model, which pydantic has a validator of, in which is a set."""

    codes: frozenset[Decimal] = frozenset()


EQUAL = [str(1 + number * MODULUS) for number in range(1, 1000)]
WITH_EQUAL_HASHES: dict[str, tuple[Any, Any]] = {
    "a set of decimals": (set[Decimal], EQUAL),
    "a set of UUIDs": (frozenset[UUID], [UUID(int=1 + number * MODULUS).hex for number in range(1, 1000)]),
    "keys that are numbers": (dict[int, str], dict.fromkeys(EQUAL, "")),
    "keys of a counter": (Counter[Decimal], dict.fromkeys(EQUAL, 1)),
    "one of two types": (set[Decimal] | None, EQUAL),
    "a set in a dataclass": (Basket, {"codes": EQUAL}),
    "sets in models in a list": (list[Shelf], [{"codes": EQUAL}]),
}


@pytest.mark.anyio
@each_row("kind", WITH_EQUAL_HASHES)
async def test_values_that_collide_in_a_set_or_dict_are_refused_before_they_take_quadratic_time(kind: str) -> None:
    async def take(rows: Any) -> int:
        """Take values that are hashed."""
        return len(rows)

    take.__annotations__["rows"], rows = WITH_EQUAL_HASHES[kind]

    result = await ToolRegistry([take]).execute("take", {"rows": rows})

    assert f"too many values with one hash, limit {MOST_OF_ONE_HASH}" in result.text, result.text[:300]
    assert result.error is not None and result.error.code == "invalid_arguments"


@pytest.mark.anyio
async def test_of_honest_values_any_number_is_hashed() -> None:
    def take(numbers: set[Decimal], pairs: list[set[int]], powers: set[float]) -> list[int]:
        """Take values that are hashed."""
        return [len(numbers), len(pairs), len(powers)]

    numbers = [str(number) for number in range(-5000, 5000)]
    powers = [2.0**power for power in range(-1000, 1000)]
    args = {"numbers": numbers, "pairs": [[-1, -2]] * 500, "powers": powers}  # -1 and -2 have one hash

    assert (await ToolRegistry([take]).execute("take", args)).value == [10_000, 500, 2000]


def even(number: Any) -> Any:
    if number % 2:
        raise ValueError(f"{number} is not even")
    return number


LETTERS = [letter * 400 for letter in "abc"]
MANY_PATTERNS: dict[str, tuple[Any, Any, Any]] = {
    "a list": (list[re.Pattern[str]], LETTERS, LETTERS[:2]),
    "a dict": (dict[str, re.Pattern], dict(zip("abc", LETTERS, strict=True)), dict.fromkeys("ab", "x" * 400)),
    "sets in a list": (list[set[re.Pattern[str]] | None], [None, LETTERS], [None, LETTERS[:2]]),
    "short ones": (tuple[re.Pattern[str], ...], [f"{number:03}" for number in range(400)], LETTERS[:1]),
    "one of two types": (set[re.Pattern[str]] | list[re.Pattern[str]], LETTERS, LETTERS[:2]),
}
"""A type, values of it that have too many characters, and others that have not."""


@pytest.mark.anyio
@each_row("kind", MANY_PATTERNS)
async def test_patterns_of_one_argument_are_bounded_together(kind: str) -> None:
    async def take(rows: Any) -> int:
        """Take patterns, which are compiled."""
        return len(rows)

    take.__annotations__["rows"], many, few = MANY_PATTERNS[kind]
    registry = ToolRegistry([take])

    refused = await registry.execute("take", {"rows": many})

    assert "- rows: its patterns have 1200 characters together, limit 1000" in refused.text, refused.text[:300]
    assert (await registry.execute("take", {"rows": few})).value == len(few)


@pytest.mark.anyio
async def test_a_text_that_is_too_long_for_a_pattern_may_be_another_member_of_a_union() -> None:
    async def take(row: re.Pattern[str] | str, rows: list[re.Pattern[str]] | list[str]) -> list[str]:
        """Take patterns or texts."""
        return [type(row).__name__, *(type(each).__name__ for each in rows)]

    result = await ToolRegistry([take]).execute("take", {"row": "x" * 1500, "rows": ["x" * 600, "y" * 600]})

    assert result.value == ["str"] * 3, result.text


@pytest.mark.anyio
async def test_a_text_that_is_too_long_for_a_pattern_does_not_count_against_others() -> None:
    async def take(rows: list[re.Pattern[str] | str]) -> list[str]:
        """Take patterns or texts."""
        return [type(each).__name__ for each in rows]

    result = await ToolRegistry([take]).execute("take", {"rows": ["x" * 1500, "a", "b"]})

    assert result.value == ["str", "Pattern", "Pattern"], result.text


@pytest.mark.anyio
async def test_another_error_beside_a_text_that_is_too_long_for_a_pattern_is_named() -> None:
    async def take(row: tuple[re.Pattern[str] | str, Annotated[int, AfterValidator(even)]]) -> str:
        """Take a pattern or a text, and a number."""
        return str(row)

    result = await ToolRegistry([take]).execute("take", {"row": ["x" * 1500, 3]})

    assert "3 is not even" in result.text and "patterns" not in result.text


@pytest.mark.anyio
async def test_what_an_iterable_makes_when_the_tool_reads_it_is_counted_too() -> None:
    def take(patterns: Iterable[re.Pattern[str]] = (), sets: Iterable[set[Decimal]] = ()) -> int:
        """Take what is made late."""
        return len([*patterns, *sets])

    registry = ToolRegistry([take])

    assert (await registry.execute("take", {"patterns": LETTERS[:2], "sets": [["1", "2"]]})).value == 3
    refused = [await registry.execute("take", {"patterns": LETTERS}), await registry.execute("take", {"sets": [EQUAL]})]
    assert "its patterns have 1200 characters together" in refused[0].text
    assert "too many values with one hash" in refused[1].text


@pytest.mark.anyio
async def test_a_tool_may_skip_a_wrong_item_of_an_iterable() -> None:
    def take(rows: Iterable[set[Annotated[Decimal, AfterValidator(even)]]]) -> list[int]:
        """Take what is made late."""
        made, items = list[int](), iter(rows)
        while True:
            try:
                made.append(len(next(items)))
            except StopIteration:
                return made
            except ValueError:
                made.append(0)

    assert (await ToolRegistry([take]).execute("take", {"rows": [["2"], ["3"], ["2", "4"]]})).value == [1, 0, 2]


@pytest.mark.anyio
async def test_an_iterable_in_which_nothing_is_counted_is_the_one_of_pydantic() -> None:
    def take(rows: Iterable[list[int]]) -> str:
        """Take what is made late."""
        return type(rows).__name__

    assert (await ToolRegistry([take]).execute("take", {"rows": [[1]]})).text == "ValidatorIterator"


@pytest.mark.anyio
async def test_an_error_names_types_as_they_were_written() -> None:
    def take(
        rows: list[list[Decimal] | int] | None = None, keys: dict[Decimal, int] | dict[int, set[Decimal]] | None = None
    ) -> None:
        """Take rows, and keys."""

    registry = ToolRegistry([take])
    rows = await registry.execute("take", {"rows": [["x"]]})
    keys = await registry.execute("take", {"keys": {"x": 1}})

    assert "rows[0].list[decimal][0]: " in rows.text
    assert "keys.dict[decimal,int].x.[key]: " in keys.text and "keys.dict[int,set[decimal]].x" in keys.text
    assert "function-" not in rows.text + keys.text


ITEMS = 1_000
MANY_ITEMS: dict[str, tuple[Any, Any]] = {
    "decimals": (list[Decimal], ["1.5"] * ITEMS),
    "decimals that are none": (list[Decimal], ["x"] * ITEMS),
    "UUIDs in lists": (list[list[UUID]], [[UUID(int=7).hex]] * ITEMS),
    "a tuple": (tuple[Decimal, ...], ["1.5"] * ITEMS),
    "values of a dict": (dict[str, Decimal], {f"{number}": "x" for number in range(ITEMS)}),
}


@each_row("kind", MANY_ITEMS)
def test_other_threads_may_go_on_at_each_item_of_which_a_tools_own_type_is_made(kind: str) -> None:
    """pydantic keeps the interpreter until Python code runs."""
    hint, value = MANY_ITEMS[kind]
    convert = type_converter(hint)

    assert calls(lambda: convert(value), ValidationError) >= ITEMS


@pytest.mark.anyio
async def test_values_that_fit_a_schema_and_no_type_are_not_described_one_by_one() -> None:
    registry = ToolRegistry()

    @registry.tool
    def tool(x: list[UUID | date]) -> str:
        """Take dates and UUIDs: a schema asks for texts."""
        return "ok"

    seen = await watched(registry.dispatch("tool", {"x": ["z"] * 150_000}))
    assert "x[0]" in seen.outcome.message and seen.silent_s < 0.05  # each described: seconds


OF_WRONG_ITEMS: dict[str, Any] = {
    "a list": list[Refused],
    "a set": set[Refused],
    "a frozenset": frozenset[Refused],
    "a tuple": tuple[Refused, ...],
    "a deque": deque[Refused],
    "a dict": dict[str, Refused],
    "lists of lists": list[list[Refused]],
    "one of two lists": list[Refused] | list[date],
}


@each_row("kind", OF_WRONG_ITEMS)
def test_of_many_wrong_items_one_error_is_kept_and_of_few_each(kind: str) -> None:
    """Each error is several objects, and the garbage collector stops all threads while it walks through them."""
    convert = type_converter(OF_WRONG_ITEMS[kind])
    found = list[int]()
    for count in (30, 2_000):
        value: Any = [f"x{number}" for number in range(count)]
        value = {each: each for each in value} if kind == "a dict" else [value] if kind == "lists of lists" else value
        with pytest.raises(ValidationError) as refused:
            convert(value)
        found.append(refused.value.error_count())

    kinds = 2 if kind == "one of two lists" else 1
    assert found == [30 * kinds, kinds]


def test_nor_are_those_beside_patterns_that_are_too_long() -> None:
    with pytest.raises(ValueError, match=r"its patterns have \d+ characters together") as refused:
        type_converter(list[re.Pattern[str] | UUID])([f"({number:08}" for number in range(900)])
    assert not isinstance(refused.value, ValidationError)


SIMILAR = [f"{'ab' * 36}{number}" for number in range(500)]
"""Names of which each is much like the others: comparing one of them with all takes long."""


def test_what_was_meant_is_looked_for_within_bounds_however_alike_the_names_are() -> None:
    assert calls(lambda: closest("ab" * 34 + "x", SIMILAR)) < 50_000
    assert closest("ab" * 36 + "1x", SIMILAR) is not None and closest("xy", SIMILAR) is None


def test_a_name_of_an_option_that_does_not_exist_is_no_work_for_each_of_the_options() -> None:
    checks = checker({"type": "array", "items": {"enum": SIMILAR}})
    refused = refusal(checks, {"x": ["ab" * 30] * 5})
    assert refused is not None and calls(lambda: refusal(checks, {"x": ["ab" * 30] * 5})) < 500_000


def test_what_a_schema_says_of_objects_is_found_out_once_for_all_of_them() -> None:
    objects = {"type": "object", "properties": {name: {} for name in SIMILAR}, "required": SIMILAR[:1]}
    checks = checker({"type": "array", "items": objects})
    of_one = {"x": [{SIMILAR[0]: None}]}
    of_many = {"x": [{SIMILAR[0]: None} for _ in range(500)]}
    assert calls(lambda: checks.check(of_many)) - calls(lambda: checks.check(of_one)) < 500 * 200


class Answered(checker_process._Process):
    """A checker process whose answer is there at once."""

    def __init__(self, answer: bytes) -> None:
        size = checker_process.READ_BYTES
        self._pieces = [answer[start : start + size] for start in range(0, len(answer), size)][::-1]

    async def _send(self, data: bytes) -> None:
        await anyio.lowlevel.checkpoint()

    async def _receive(self) -> bytes:
        return self._pieces.pop()


@pytest.mark.slow
@pytest.mark.anyio
async def test_large_arguments_come_back_from_their_check_while_others_go_on() -> None:
    answer = {f"name {number}": number for number in range(500_000)}
    seen = await watched(Answered(msgpack.packb([0.1, answer])).ask("arguments", "", b""))

    assert seen.outcome == answer and seen.silent_s < 0.05
