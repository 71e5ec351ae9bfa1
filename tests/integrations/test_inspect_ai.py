"""Inspect's evaluation with its own loop and its mock model, on toolcell's `python` tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integrations import cities
from integrations.cities import audited_calls, nothing_left_behind, registry_of_cities
from integrations.conftest import needs, run_example
from toolcell import Limits, Runtime
from toolcell.errors import RegistrationError

needs("inspect_ai")

from inspect_ai import Task, eval_async  # noqa: E402
from inspect_ai.approval import Approval, ApprovalPolicy, approver  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.log import EvalLog  # noqa: E402
from inspect_ai.model import ModelOutput, ModelUsage, get_model  # noqa: E402
from inspect_ai.solver import generate, use_tools  # noqa: E402
from inspect_ai.tool import Tool, ToolError, tool  # noqa: E402

from toolcell.integrations.inspect_ai import toolcell_python  # noqa: E402

pytestmark = [
    pytest.mark.framework,
    pytest.mark.isolation,
    pytest.mark.anyio,
    # Inspect leaves streams of its own open where an approver or an exception ends a sample.
    pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

DENSITY = "print(tools.population('Bern') / tools.area('Bern'))"


@tool
def area() -> Tool:
    async def execute(city: str) -> float:
        """Return the area of a city in square kilometres.

        Args:
            city: Name of the city.
        """
        if city == "Atlantis":
            raise ToolError("it has sunk")
        return cities.area(city)

    return execute


@approver
def reviewer(asked: list[Any], refused: str = "", decision: Any = "reject") -> Any:
    async def approve(message: str, call: Any, view: Any, history: Any) -> Approval:
        asked.append((call.function, call.arguments, view.call.content if view.call else ""))
        return Approval(decision=decision if call.function == refused else "approve", explanation="as the test says")

    return approve


async def evaluated(python: Tool, home: Path, *codes: str, approval: Any = None) -> EvalLog:
    """Evaluate one sample whose model runs these scripts."""
    outputs = [ModelOutput.for_tool_call("mockllm/model", "python", {"code": code}) for code in codes]
    outputs.append(ModelOutput.from_content("mockllm/model", "done"))
    for each in outputs:
        each.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    model = get_model("mockllm/model", custom_outputs=outputs)
    policies = None if approval is None else [ApprovalPolicy(approval, "*")]
    task = Task(dataset=[Sample(input="density?")], solver=[use_tools(python), generate()], approval=policies)
    [log] = await eval_async(task, model=model, log_dir=str(home))
    return log


def answers(log: EvalLog) -> list[Any]:
    assert log.samples
    return [each for each in log.samples[0].messages if each.role == "tool"]


async def test_a_model_writes_code_that_calls_two_tools_which_approvers_and_the_transcript_see(tmp_path: Path) -> None:
    seen: list[str] = []
    asked: list[Any] = []
    options = {"registry": registry_of_cities(seen), "record": tmp_path / "audit" / "runs.db"}
    with nothing_left_behind():
        python = toolcell_python(tools=[area()], options=options)
        log = await evaluated(python, tmp_path, DENSITY, approval=reviewer(asked))
    [answer] = answers(log)
    assert log.status == "success" and answer.text.startswith("2596.8")
    assert seen == ["population", "area"] == audited_calls(tmp_path / "audit")
    assert [each[:2] for each in asked] == [("python", {"code": DENSITY}), ("area", {"city": "Bern"})]
    assert f"```python\n{DENSITY}\n```" in asked[0][2]
    assert log.samples
    assert [each.function for each in log.samples[0].events if each.event == "tool"] == ["python", "area"]


async def test_pictures_are_shown_to_the_model(tmp_path: Path) -> None:
    log = await evaluated(toolcell_python(), tmp_path, "{'chart': b'\\x89PNG\\r\\n\\x1a\\n'}")
    [answer] = answers(log)
    text, image = answer.content
    assert text.text == '{"chart": "(image/png, 8 bytes)"}\n'
    assert image.type == "image"


async def test_what_an_approver_refuses_is_an_error_in_the_script_and_of_python_one_for_the_model(
    tmp_path: Path,
) -> None:
    code = "try:\n    tools.area('Bern')\nexcept ToolError as exc:\n    print('refused:', exc)"
    async with Runtime() as runtime:
        python = toolcell_python(runtime, tools=[area()])
        [answer] = answers(await evaluated(python, tmp_path, code, approval=reviewer([], "area")))
        assert answer.text == "refused: Tool 'area' failed: approval: as the test says\n"
        [answer] = answers(await evaluated(python, tmp_path, code, approval=reviewer([], "python")))
        assert answer.error.type == "approval"
        log = await evaluated(python, tmp_path, code, "1", approval=reviewer([], "area", "terminate"))
        assert log.samples and log.samples[0].limit is not None and log.samples[0].limit.type == "operator"


async def test_what_fails_is_told_as_inspects_own_python_tool_tells_it(tmp_path: Path) -> None:
    codes = [
        "print('so far')\n1 / 0",
        "if:",
        "tools.area('Atlantis')",
        "tools.area(town='Bern')",
        "call_tool('secret')",
        "tools.population('nowhere')",
        "import os\nos._exit(3)",
    ]
    async with Runtime(registry_of_cities([]), limits=Limits(wall_s=60)) as runtime:
        told = answers(await evaluated(toolcell_python(runtime, tools=[area()]), tmp_path, *codes))
        late = answers(await evaluated(toolcell_python(runtime, limits=Limits(wall_s=1)), tmp_path, "while True: pass"))
    assert "ZeroDivisionError" in told[0].text and told[0].text.endswith("so far\n") and told[0].error is None
    assert "SyntaxError" in told[1].text
    assert "Tool 'area' failed: unknown: it has sunk" in told[2].text
    assert "town" in told[3].text and "city" in told[3].text
    assert "ToolError" in told[4].text
    assert "the tool raised KeyError" in told[5].text
    assert told[6].error.type == "unknown" and "ended without a word" in told[6].error.message
    assert late[0].error.type == "timeout"


async def test_an_exception_that_inspect_does_not_show_a_model_ends_the_sample(tmp_path: Path) -> None:
    with nothing_left_behind():
        log = await evaluated(toolcell_python(tools=[area()]), tmp_path, "tools.area('nowhere')", "print('no')")
    assert log.status == "error" and log.error is not None and log.error.message == "KeyError('nowhere')"


async def test_no_sandbox_is_told_as_inspect_tells_it_and_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RegistrationError, match="area"):
        toolcell_python(tools=[area(), area()])
    python = toolcell_python(options={"python": "/nonexistent/python"})
    log = await evaluated(python, tmp_path, "1")
    told = [each.error.type for each in answers(log) if each.error] if log.status == "success" else [log.status]
    assert told in (["sandbox_unavailable"], ["error"])


async def test_each_call_has_a_sandbox_of_its_own(tmp_path: Path) -> None:
    told = answers(await evaluated(toolcell_python(), tmp_path, "x = 1\nx + 1", "x"))
    assert told[0].text == "2\n" and "NameError" in told[1].text


def test_the_example_runs() -> None:
    assert "2597 people per km²" in run_example("with_inspect_ai.py")
