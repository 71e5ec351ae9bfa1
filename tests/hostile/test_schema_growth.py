"""A fuzzer of schemas and values: each keyword of each draft, at growing sizes, alone and in one another.

The host gives each to a checker process, so its own processor time is measured: it grows no faster than what was sent, and
the event loop is never silent for long. What the host checks itself is small, and takes a few milliseconds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from hostile.loop_silence import watched
from toolcell.calls import checker_process
from toolcell.calls.checker_process import end_idle, find_problem, refused_schemas
from toolcell.calls.schema_walk import ValueCheck

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

DRAFTS = {
    "4": "http://json-schema.org/draft-04/schema#",
    "6": "http://json-schema.org/draft-06/schema#",
    "7": "http://json-schema.org/draft-07/schema#",
    "2019-09": "https://json-schema.org/draft/2019-09/schema",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
}
COMPLETE = "2020-12"
OWN_KEYWORDS = ["dependencies", "additionalItems", "$recursiveRef"]
"""Of the other drafts, each eighth keyword is tried, and those that mean nothing in the newest one."""
SIZES = (2_000, 8_000)
MOST_GROWTH = 8.0
"""Of the time, where schema or value become four times as large. What is quadratic grows sixteenfold."""
FREE_S = 0.02
SILENCE_S = 0.05
HERE_S = 0.02
"""A check in the event loop takes 5 ms at most where nothing else runs."""

Made = tuple[dict[str, Any], Any]


def texts(size: int) -> list[str]:
    return [f"t{number}" for number in range(size)]


def numbers(size: int) -> list[int]:
    return [2**62 + number for number in range(size)]


def record(size: int) -> dict[str, Any]:
    return dict.fromkeys(texts(size), 1)


def chain(size: int, keyword: str) -> dict[str, Any]:
    """Return definitions of which each names the next one twice."""
    levels = min(40, size)
    made: dict[str, Any] = {f"D{n}": {keyword: [{"$ref": f"#/definitions/D{n + 1}"}] * 2} for n in range(levels)}
    return {"definitions": {**made, f"D{levels}": {"type": "object"}}, **made["D0"]}


def unevaluated(size: int, keyword: str) -> dict[str, Any]:
    whole = chain(size, "allOf")
    for each in whole["definitions"].values():
        each[keyword] = False
    return {**whole, keyword: False}


MAKERS: dict[str, Callable[[int], Made]] = {
    "type": lambda n: ({"type": "array", "items": {"type": ["string", "integer"]}}, numbers(n)),
    "enum": lambda n: ({"items": {"enum": [[each] for each in range(n)]}}, [[each] for each in range(n)]),
    "const": lambda n: ({"const": texts(n)}, texts(n)),
    "minimum": lambda n: ({"items": {"minimum": 1}}, numbers(n)),
    "maximum": lambda n: ({"items": {"maximum": 1e308}}, numbers(n)),
    "exclusiveMinimum": lambda n: ({"items": {"exclusiveMinimum": 1, "minimum": 1}}, numbers(n)),
    "exclusiveMaximum": lambda n: ({"items": {"exclusiveMaximum": 1e308, "maximum": 1e308}}, numbers(n)),
    "multipleOf": lambda n: ({"items": {"multipleOf": 0.01}}, [1.7e308] * n),
    "minLength": lambda n: ({"items": {"minLength": 1}}, texts(n)),
    "maxLength": lambda n: ({"maxLength": 10**9}, "é" * n * 40),
    "pattern": lambda n: ({"pattern": "^(a+)+$"}, "a" * n * 20 + "!"),
    "minItems": lambda n: ({"minItems": 1}, texts(n)),
    "maxItems": lambda n: ({"maxItems": 1}, texts(n)),
    "uniqueItems": lambda n: ({"uniqueItems": True}, numbers(n)),
    "uniqueItems of lists": lambda n: ({"uniqueItems": True}, [[each, {"a": each}] for each in range(n)]),
    "minProperties": lambda n: ({"minProperties": 1}, record(n)),
    "maxProperties": lambda n: ({"maxProperties": 1}, record(n)),
    "required": lambda n: ({"required": texts(n)}, record(n)),
    "dependentRequired": lambda n: ({"dependentRequired": {each: ["t0"] for each in texts(n)}}, record(n)),
    "contains": lambda n: ({"contains": {"const": -1}}, numbers(n)),
    "minContains": lambda n: ({"contains": {"type": "integer"}, "minContains": n}, numbers(n)),
    "maxContains": lambda n: ({"contains": {"type": "integer"}, "maxContains": n}, numbers(n)),
    "not": lambda n: ({"items": {"not": {"type": "string"}}}, numbers(n)),
    "allOf": lambda n: (chain(n, "allOf"), [record(n)]),
    "anyOf": lambda n: (chain(n, "anyOf"), [record(n)]),
    "oneOf": lambda n: (chain(n, "oneOf"), [record(n)]),
    "if": lambda n: ({"items": {"if": {"type": "integer"}, "then": {"minimum": 0}, "else": False}}, numbers(n)),
    "then": lambda n: ({"if": True, "then": {"items": {"type": "integer"}}}, numbers(n)),
    "else": lambda n: ({"if": False, "else": {"items": {"type": "integer"}}}, numbers(n)),
    "properties": lambda n: ({"properties": {each: {"type": "integer"} for each in texts(n)}}, record(n)),
    "patternProperties": lambda n: ({"patternProperties": {"^t[0-9]+$": {"type": "integer"}}}, record(n)),
    "additionalProperties": lambda n: ({"properties": {"x": True}, "additionalProperties": False}, record(n)),
    "propertyNames": lambda n: ({"propertyNames": {"pattern": "^t"}}, record(n)),
    "dependentSchemas": lambda n: ({"dependentSchemas": {each: {} for each in texts(n)}}, record(n)),
    "dependencies": lambda n: ({"dependencies": {each: ["t0"] for each in texts(n)}}, record(n)),
    "prefixItems": lambda n: ({"prefixItems": [{"type": "integer"}] * n}, numbers(n)),
    "items": lambda n: ({"items": {"type": "string"}}, texts(n)),
    "additionalItems": lambda n: ({"items": [{}], "additionalItems": {"type": "string"}}, texts(n)),
    "unevaluatedProperties": lambda n: (unevaluated(n, "unevaluatedProperties"), record(n)),
    "unevaluatedItems": lambda n: (unevaluated(n, "unevaluatedItems"), texts(n)),
    "$ref": lambda n: ({"definitions": {"D": {"items": {"$ref": "#/definitions/D"}}}, "$ref": "#/definitions/D"}, [[]] * n),
    "$dynamicRef": lambda n: ({"$dynamicAnchor": "x", "items": {"$dynamicRef": "#x"}}, [[0]] * n),
    "$recursiveRef": lambda n: ({"$recursiveAnchor": True, "items": {"$recursiveRef": "#"}}, [[0]] * n),
    "format": lambda n: ({"items": {"allOf": [{"format": "json-pointer"}, {"format": "uri"}] * 50}}, ["/~" * n]),
    "contentMediaType": lambda n: ({"allOf": [{"contentMediaType": "application/json"}] * 200}, "[" * n * 40),
    "contentEncoding": lambda n: ({"allOf": [{"contentEncoding": "base64"}] * 200}, "A" * n * 40),
}  # fmt: skip
"""A schema and a value by the size of both, for each keyword."""

COSTLY_SCHEMAS = {"allOf", "anyOf", "oneOf", "unevaluatedProperties", "unevaluatedItems"}
"""Here the schema is hostile, and not the value: no tool of the host's own has one like it."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(checker_process, "CPU_S", 0.1)
    yield
    end_idle()


async def check(schema: dict[str, Any], value: Any) -> None:
    await refused_schemas([schema])
    await find_problem(schema, value, is_foreign=True)


@pytest.mark.parametrize("draft", DRAFTS)
async def test_no_keyword_takes_longer_than_in_proportion_and_none_keeps_the_event_loop(draft: str) -> None:
    await check({}, 1)
    slow, silent = {}, {}
    for keyword in MAKERS if draft == COMPLETE else [*[*MAKERS][::8], *OWN_KEYWORDS]:
        took = list[float]()
        for size in SIZES:
            schema, value = MAKERS[keyword](size)
            found = await watched(check({"$schema": DRAFTS[draft], **schema}, value))
            took.append(found.took_s)
        if took[1] > MOST_GROWTH * max(took[0], FREE_S):
            slow[keyword] = took
        if found.silent_s > SILENCE_S:
            silent[keyword] = found.silent_s
    assert (slow, silent) == ({}, {})


def test_no_keyword_takes_long_for_a_value_that_is_small_enough_for_the_event_loop() -> None:
    took = {}
    for keyword in {each for each in MAKERS if "$" not in each} - COSTLY_SCHEMAS:
        check = ValueCheck(MAKERS[keyword](20)[0])
        value = next(value for size in range(1_000, 0, -10) if check.fits_here(value := MAKERS[keyword](size)[1]))
        check.problem(value)  # validators of parts are compiled at their first use
        began = time.process_time()
        check.problem(value)
        took[keyword] = time.process_time() - began
    assert {keyword: seconds for keyword, seconds in took.items() if seconds > HERE_S} == {}


ALONE = [keyword for keyword in MAKERS if "$" not in repr(MAKERS[keyword](1))]


def random_schema(generator: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for keyword in generator.sample(ALONE, 3):
        schema |= MAKERS[keyword](generator.choice([1, 3, 20, 300]))[0]
    if depth:
        inner = [random_schema(generator, depth - 1) for _ in range(2)]
        match generator.choice(["items", "allOf", "anyOf", "oneOf", "properties", "additionalProperties", "not", "if"]):
            case ("items" | "additionalProperties" | "not" | "if") as keyword:
                schema[keyword] = inner[0]
            case "properties":
                schema["properties"] = {"t0": inner[0], "t1": inner[1]}
            case keyword:
                schema[keyword] = inner
    return schema


async def test_no_keywords_in_one_another_keep_the_event_loop() -> None:
    seed = random.randrange(10**9)
    generator = random.Random(seed)
    for count in range(20):
        schema = random_schema(generator, generator.randrange(4))
        value = MAKERS[generator.choice(ALONE)](generator.choice([5, 300, 8_000]))[1]
        found = await watched(check(schema, value))
        assert found.silent_s < SILENCE_S, (seed, count)
