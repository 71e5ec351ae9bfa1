"""Checking arguments holds at most ten times the memory of the arguments themselves, whatever the schema is."""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from rows import each_row
from toolcell.calls.arguments import ArgumentChecker, InvalidArguments
from toolcell.calls.schema_walk import MAX_CHANGES
from toolcell.calls.values import MAX_PROBLEMS
from toolcell.tools import ToolDefinition

TIMES = 10
CONSTANT = 200_000
"""Bytes that a check takes whatever was sent: changes, problems, compiled parts of the schema."""

INTEGERS = {"type": "array", "items": {"type": "integer"}}
UNIONS = {"type": "array", "items": {"anyOf": [{"type": "integer"}, INTEGERS, {"type": "array", "items": INTEGERS}]}}
NEST = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/nest"}}]}
TREE = {
    "anyOf": [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}, "b": {}}, "required": ["b"]},
        {"type": "integer"},
    ]
}


def listed(**properties: Any) -> dict[str, Any]:
    """A list of objects."""
    return {"type": "array", "items": {"type": "object", "properties": properties}}


def levels(count: int, value: Any, wrap: Callable[[Any], Any]) -> Any:
    return functools.reduce(lambda inner, _: wrap(inner), range(count), value)


CASES: dict[str, tuple[dict[str, Any], Callable[[int], Any]]] = {
    "numbers as text": (INTEGERS, lambda n: [str(index) for index in range(n)]),
    "flags for numbers": (INTEGERS, lambda n: [True] * n),
    "wrong numbers": (INTEGERS, lambda n: ["x"] * n),
    "unions, mended": (UNIONS, lambda n: [["1"] for _ in range(n)]),
    "unions, wrong": (UNIONS, lambda n: [["x"] for _ in range(n)]),
    "unions of empty lists": (UNIONS, lambda n: [[] for _ in range(n)]),
    "levels, mended": ({"$ref": "#/$defs/nest"}, lambda n: [levels(40, "1", lambda v: [v]) for _ in range(n // 40)]),
    "a change on each level": (
        {"$ref": "#/$defs/nest"},
        lambda n: [levels(40, "1", lambda v: ["1", v]) for _ in range(n // 40)],
    ),
    "recursive unions, wrong": (
        {"$ref": "#/$defs/tree"},
        lambda n: levels(40, {}, lambda v: {"a": v, "c": n}),
    ),
    "short defaults": (listed(a={"default": "x" * 100}, b={"default": 1}), lambda n: [{} for _ in range(n)]),
    "members, mended": (listed(a={"type": "integer"}), lambda n: [{"a": "1"} for _ in range(n)]),
    "members left out": (listed(a={"type": "integer"}), lambda n: [{"a": None} for _ in range(n)]),
    "unknown members": (listed(a={"type": "integer"}), lambda n: [{"b": 1} for _ in range(n)]),
    "bytes for text": ({"type": "array", "items": {"type": "string"}}, lambda n: [b"%d" % index for index in range(n)]),
    "names": ({"additionalProperties": {"type": "integer"}}, lambda n: {f"k{index}": "1" for index in range(n)}),
}


def checker(schema: dict[str, Any]) -> ArgumentChecker:
    definitions = {"nest": NEST, "tree": TREE}
    whole = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
    return ArgumentChecker(ToolDefinition("tool", "A tool under test", whole))


def check(checks: ArgumentChecker, args: dict[str, Any]) -> Any:
    try:
        return checks.check(args)
    except InvalidArguments as refused:
        return refused


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        kept = work()
        return tracemalloc.get_traced_memory()[1 if kept is not None else 0]
    finally:
        tracemalloc.stop()


@each_row("name", CASES)
def test_a_check_holds_at_most_ten_times_what_was_sent(name: str) -> None:
    schema, make = CASES[name]
    checks, args = checker(schema), {"x": make(2000)}
    sent = msgpack.packb(args)
    held = peak_bytes(lambda: msgpack.unpackb(sent))
    check(checks, {"x": make(40)})  # what is made at the first use

    assert peak_bytes(lambda: check(checks, args)) <= CONSTANT + TIMES * held


def test_large_defaults_count_like_what_was_sent() -> None:
    schema = listed(a={"default": [{"k": [0] * 20}] * 20})

    assert len(checker(schema).check({"x": [{}] * 100}).args["x"][99]["a"]) == 20
    with pytest.raises(InvalidArguments, match="too many values"):
        checker(schema).check({"x": [{}] * 2000})


def test_the_first_changes_are_noted_and_the_others_counted() -> None:
    few = checker(INTEGERS).check({"x": ["1"] * MAX_CHANGES})
    many = checker(INTEGERS).check({"x": ["1"] * (MAX_CHANGES + 5)})

    assert [each.path for each in many.changes] == [f"x[{index}]" for index in range(MAX_CHANGES)]
    assert many.args == {"x": [1] * (MAX_CHANGES + 5)}
    assert (few.warnings, many.warnings) == ((), ("5 more values were mended",))


def test_changes_in_a_branch_that_did_not_fit_are_not_counted() -> None:
    pair = {"type": "array", "items": {"type": "integer"}, "maxItems": MAX_CHANGES}
    strings = {"type": "array", "items": {"type": "string", "minLength": 1}}
    checked = checker({"anyOf": [pair, strings]}).check({"x": [*["1"] * MAX_CHANGES, 1, 2.5]})

    assert [(each.path, each.after) for each in checked.changes] == [
        (f"x[{MAX_CHANGES}]", "1"),
        (f"x[{MAX_CHANGES + 1}]", "2.5"),
    ]
    assert checked.warnings == ()


def test_as_few_problems_are_kept_as_are_said() -> None:
    refused = check(checker({"type": "array", "items": {"type": "string"}}), {"x": [b""] * 1000})

    assert len(refused.problems) == MAX_PROBLEMS + 1
