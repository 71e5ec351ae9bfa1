"""Random schemas with adversarial values: checking them takes work and memory that are linear in what was sent.

The default is a quick sample. `TOOLCELL_SCHEMAS=1000 TOOLCELL_VALUES=1000 pytest -rP tests/hostile/test_random_schemas.py`
is the whole claim, and prints the worst that was found. It takes an hour of processor time.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest

from toolcell.calls.arguments import ArgumentChecker, InvalidArguments
from toolcell.calls.schema_walk import FREE_STEPS, STEPS_PER_NODE
from toolcell.tools import ToolDefinition

SCHEMAS = int(os.environ.get("TOOLCELL_SCHEMAS", "24"))
VALUES = int(os.environ.get("TOOLCELL_VALUES", "25"))
PARTS = 2
"""Parts of the schemas, each with a test of its own: two processes can share them."""

LARGE_BYTES = 20_000
LARGE_EVERY = max(25, VALUES // 10)
"""One value in so many may be larger. Its memory is measured, and it is sent in copies too."""
COPIES = (8, 16)
"""Twice as many. A schema may have rules of their own for the first two or three items, so not one and two."""

CALLS_PER_BYTE = 300
"""Functions called for each byte of the arguments as JSON; a byte can be a whole value, looked at once per branch."""
FREE_CALLS = 20 * FREE_STEPS
SLACK = 1.25
MEMORY_PER_BYTE = 10
MEMORY_PER_ELEMENT = 1024
"""An empty list is three bytes of JSON and some hundred on the host, once for each branch that mended it."""

LEAVES = (
    None,
    True,
    0,
    1.0,
    2.5,
    "",
    "1",
    "x",
    "1e9999",
    "[1]",
    '{"a": "1"}',
    "[" * 70,
    '["[1]"]',
    2**63 - 1,
    "\u20ac",
)
TYPES = ("integer", "number", "string", "boolean", "null", "array", "object")


class Maker:
    """Makes schemas and values; what a seed makes does not change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self, depth: int) -> Any:
        """A schema of some levels; it may refer to itself."""
        pick = self._random
        if depth == 0:
            return pick.choice((
                {}, True, False, {"type": pick.choice(TYPES)}, {"type": pick.sample(TYPES, 2)}, {"enum": ["a", 1, None]},
                {"$ref": "#/$defs/tree"}, {"$ref": "#/properties/x"}, {"minimum": 1}, {"pattern": "^(a+)+$"},
            ))  # fmt: skip
        below: Callable[[], Any] = lambda: self.schema(pick.randrange(depth))  # noqa: E731
        return pick.choice(
            (
                lambda: {"type": "object", "properties": {"a": below(), "b": below()}, "required": ["a"]},
                lambda: {
                    "type": "object",
                    "properties": {"a": below()},
                    "additionalProperties": pick.choice((False, below())),
                },
                lambda: {"type": "array", "items": below()},
                lambda: {"type": "array", "prefixItems": [below(), below()], "items": below()},
                lambda: {"anyOf": [below() for _ in range(pick.randrange(1, 5))]},
                lambda: {"oneOf": [below(), below(), below()]},
                lambda: {"allOf": [below(), below()]},
                lambda: {"if": below(), "then": below(), "else": below()},
                lambda: {"patternProperties": {"^[ab]": below()}, "propertyNames": {"maxLength": 3}},
                lambda: {"not": below()},
            )
        )()

    def value(self, depth: int) -> Any:
        """A value of some levels; a few are much longer or deeper than they are varied."""
        pick = self._random
        if depth == 0:
            return pick.choice(LEAVES)
        below: Callable[[], Any] = lambda: self.value(pick.randrange(depth))  # noqa: E731
        return pick.choice(
            (
                lambda: [below() for _ in range(pick.randrange(6))],
                lambda: {name: below() for name in pick.sample("abcd", pick.randrange(5))},
                lambda: [below()] * pick.randrange(1, 60),
                lambda: json.dumps(below()),
                lambda: nested(below(), pick.randrange(1, 40)),
            )
        )()


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = {"a": value}
    return value


def checker(maker: Maker) -> ArgumentChecker:
    tree = {"anyOf": [maker.schema(2), {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}}]}
    whole = {"type": "object", "properties": {"x": maker.schema(4)}, "$defs": {"tree": tree}}
    return ArgumentChecker(ToolDefinition("tool", "A tool under test", whole))


def check(checks: ArgumentChecker, args: dict[str, Any]) -> int:
    """Check arguments, whether they fit or not; return the steps that are charged."""
    try:
        return checks.check(args).steps
    except InvalidArguments as error:
        return error.steps


def calls(checks: ArgumentChecker, args: dict[str, Any]) -> tuple[int, int]:
    """Functions called for a check, and the steps that were charged."""
    count = 0

    def event(frame: FrameType, kind: str, arg: Any) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    sys.setprofile(event)
    try:
        steps = check(checks, args)
    finally:
        sys.setprofile(None)
    return count, steps


def peak_bytes(checks: ArgumentChecker, args: dict[str, Any]) -> int:
    tracemalloc.start()
    try:
        check(checks, args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def elements(value: Any) -> int:
    """Values inside a value, and in the JSON inside its strings at most as many as characters."""
    if isinstance(value, dict):
        return 1 + sum(1 + elements(each) for each in value.values())
    if isinstance(value, list):
        return 1 + sum(map(elements, value))
    return 1 + (len(value) if isinstance(value, str) else 0)


@dataclass
class Worst:
    """The worst that was found."""

    calls: float = 0.0
    steps: float = 0.0
    growth: float = 0.0
    memory: float = 0.0


@pytest.mark.parametrize("part", range(PARTS))
def test_work_and_memory_for_random_schemas_and_values_are_linear_in_what_was_sent(part: int) -> None:
    worst = Worst()
    for seed in range(part, SCHEMAS, PARTS):
        maker = Maker(seed)
        checks = checker(maker)
        check(checks, {"x": None})  # parts of the schema are compiled at their first use
        for index in range(VALUES):
            is_sample = index % LARGE_EVERY == 0
            args = {"x": maker.value(5)}
            while len(json.dumps(args)) > LARGE_BYTES and not is_sample:
                args = {"x": maker.value(5)}
            work_is_linear(checks, args, worst, (seed, index))
            if is_sample:
                growth_and_memory_are_linear(checks, args, worst, (seed, index))
    print(
        f"{SCHEMAS} schemas with {VALUES} values each, part {part + 1} of {PARTS}: at most {worst.calls:.0f} calls and "
        f"{worst.steps:.1f} steps a byte, {worst.growth:.2f} times the calls for twice as much, {worst.memory:.1f} bytes "
        "held for each of 20 kB and more"
    )


def work_is_linear(checks: ArgumentChecker, args: dict[str, Any], worst: Worst, where: tuple[int, int]) -> None:
    size = len(json.dumps(args))
    made, steps = calls(checks, args)
    assert made <= FREE_CALLS + CALLS_PER_BYTE * size, where
    assert steps <= 2 * (2 * FREE_STEPS + (STEPS_PER_NODE + 2) * elements(args)), where
    worst.calls, worst.steps = max(worst.calls, made / size), max(worst.steps, steps / size)


def growth_and_memory_are_linear(
    checks: ArgumentChecker, args: dict[str, Any], worst: Worst, where: tuple[int, int]
) -> None:
    size = len(json.dumps(args))
    held = peak_bytes(checks, args)
    assert held <= MEMORY_PER_BYTE * size + MEMORY_PER_ELEMENT * elements(args) + 200_000, where
    worst.memory = max(worst.memory, held / (size + 20_000))
    if size > 2 * LARGE_BYTES:
        return
    one, two = (calls(checks, {"x": [args["x"]] * count})[0] for count in COPIES)
    assert two <= 2 * SLACK * one + FREE_CALLS, where
    worst.growth = max(worst.growth, (two - 1000) / one)
