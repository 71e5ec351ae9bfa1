"""Whatever a guest or a model sends as arguments is the result of its call. Nothing of it raises in the host.

Each kind of tool gets every 36th value. `TOOLCELL_HOSTILE=all pytest -n 2 tests/hostile/test_hostile_arguments*.py` is
the whole claim: every value, for every kind of tool, by every way in. Each value is sent to each kind under one setting
of coercion, extras and validation, and settings take turns: each meets every value, and every kind of tool.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from hostile.hostile_values import EXPRESSIONS, scope
from hostile.tools_of_all_kinds import OPTIONS, SCHEMAS, TYPES, registry_of
from rows import each_row
from toolcell import Secrets
from toolcell.agents import Agent
from toolcell.agents.providers.provider import ModelResponse
from toolcell.agents.providers.scripted import ScriptedModel
from toolcell.calls.arguments import ToolCall
from toolcell.errors import UsageError
from toolcell.tools import Origin, RunContext, ToolRegistry, ToolResult, decode_tool_call

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.conforms("C-b8", "J1", "J-b2", "P12", "V-1")]

IS_WHOLE = os.environ.get("TOOLCELL_HOSTILE") == "all"
NAMES = (*TYPES, *SCHEMAS)


def hostile_values(name: str, first: int = 0, step: int = 1 if IS_WHOLE else 36) -> list[Any]:
    """The values that a kind of tool gets, as the host has them."""
    names = scope()
    return [eval(expression, names) for expression in EXPRESSIONS[(first + NAMES.index(name)) % step :: step]]


def portions(name: str) -> list[tuple[dict[str, Any], list[Any]]]:
    """Settings, and the values that a kind of tool gets under them. Of a part of the values, one setting for each kind."""
    if not IS_WHOLE:
        return [(OPTIONS[NAMES.index(name) % len(OPTIONS)], hostile_values(name))]
    return [(options, hostile_values(name, turn, len(OPTIONS))) for turn, options in enumerate(OPTIONS)]


def as_text(value: Any) -> str | None:
    """A value as a model writes it; None for what no JSON can say."""
    try:
        return json.dumps({"x": value})
    except (TypeError, ValueError, RecursionError, RuntimeError, KeyError):
        return None


def watched(registry: ToolRegistry) -> RunContext:
    """A run with secrets, whose events are written down."""
    return RunContext(events=registry.events, secrets=Secrets({"key": "hunter2hunter2"}))


@each_row("name", NAMES)
async def test_a_batch_has_a_result_for_every_call(name: str) -> None:
    for options, values in portions(name):
        forms = [*({"x": value} for value in values), *values, *filter(None, map(as_text, values))]
        registry = registry_of(options, name)
        registry.events.subscribe(lambda event: event.to_json())
        registry.add_hook(before=lambda call: None, after=lambda call, result: None)
        for origin in (Origin.MODEL, Origin.CODE):
            calls = [{"name": name, "arguments": form} for form in forms]
            results = await registry.execute_batch(calls, context=watched(registry), origin=origin)

            assert len(results) == len(calls)
            assert all(isinstance(result, ToolResult) and json.dumps(result.to_dict()) for result in results)
        assert registry.events.listener_errors == 0


@each_row("name", NAMES)
async def test_a_plan_has_an_answer(name: str) -> None:
    registry = registry_of({}, name)
    registry.enable_plan_execution()
    for value in hostile_values(name):
        for step in ({"tool": name, "args": {"x": value}}, {"tool": name, "args": value}, value):
            result = await registry.dispatch("execute_plan", {"steps": [step]}, context=watched(registry))
            assert isinstance(result, ToolResult)


@each_row("name", NAMES)
async def test_an_agent_goes_on_to_its_final_answer(name: str) -> None:
    values = hostile_values(name)
    arguments: list[Any] = [text for value in values if (text := as_text(value)) is not None]
    arguments += [value for value in values if type(value) is str]
    asked = tuple(ToolCall(f"call_{index}", name, text) for index, text in enumerate(arguments))
    model = ScriptedModel([ModelResponse("", asked, "tool_calls"), "done"])

    run = await Agent(model, tools=registry_of({}, name)).run("go")

    assert run.content == "done"


@each_row("name", NAMES)
async def test_decoding_a_call_raises_a_usage_error_at_most(name: str) -> None:
    definition = registry_of({}, name).state.tools[name].definition
    for value in hostile_values(name):
        for arguments in ({"x": value}, as_text(value)):
            try:
                assert isinstance(decode_tool_call(definition, {"name": name, "input": arguments}), dict)
            except UsageError:
                pass
