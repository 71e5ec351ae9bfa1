"""DSPy's modules with their own loops and DSPy's scripted model, on toolcell's interpreter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integrations.cities import area, audited_calls, nothing_left_behind, registry_of_cities
from integrations.conftest import needs, run_example
from toolcell import Limits, SyncRuntime

needs("dspy")

import dspy  # noqa: E402
from dspy.primitives.code_interpreter import (  # noqa: E402
    CodeExecutionError,
    CodeInterpreter,
    CodeInterpreterError,
    FinalOutput,
)
from dspy.utils.callback import BaseCallback  # noqa: E402
from dspy.utils.dummies import DummyLM  # noqa: E402
from pydantic import BaseModel  # noqa: E402

from toolcell.integrations.dspy import ToolcellInterpreter, interpreter_factory  # noqa: E402

pytestmark = [
    pytest.mark.framework,
    pytest.mark.isolation,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


SEEN: list[str] = []


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def runtime(audit: Path) -> Iterator[SyncRuntime]:
    options: dict[str, Any] = {"limits": Limits(wall_s=60), "record": audit / "runs.db"}
    with nothing_left_behind(), SyncRuntime(registry_of_cities(SEEN), **options) as opened:
        yield opened


@pytest.fixture
def seen() -> list[str]:
    SEEN.clear()
    return SEEN


@pytest.fixture
def interpreter(runtime: SyncRuntime) -> Iterator[ToolcellInterpreter]:
    with ToolcellInterpreter({"area": area}, runtime=runtime) as opened:
        yield opened


def step(code: str) -> dict[str, str]:
    return {"reasoning": "as the task says", "code": f"```python\n{code}\n```"}


def test_rlm_writes_code_that_calls_a_tool_of_dspy_and_one_of_the_registry(
    runtime: SyncRuntime, seen: list[str], audit: Path
) -> None:
    lm = DummyLM([step("density = population(city) / area(city=city)\nprint(density)"), step("SUBMIT(round(density))")])
    with dspy.context(lm=lm):
        rlm = dspy.RLM("city -> people_per_km2: int", tools=[area], interpreter_factory=interpreter_factory(runtime))
        answer = rlm(city="Bern")

    assert answer.people_per_km2 == 2597
    assert "2596.8" in answer.trajectory[0]["output"]
    assert seen == ["population", "area"]
    assert audited_calls(audit)[-2:] == ["population", "area"]


def test_rlm_tells_its_model_where_the_code_runs_and_what_failed(runtime: SyncRuntime) -> None:
    lm = DummyLM([step("area('nowhere')"), step("secret()"), step("x = ("), step("SUBMIT('done')")])
    with dspy.context(lm=lm):
        rlm = dspy.RLM("city -> answer", tools=[area], interpreter_factory=interpreter_factory(runtime))
        answer = rlm(city="Bern")

    told = [entry["output"] for entry in answer.trajectory]
    assert told[0].startswith("[Error] Traceback") and "Tool 'area' failed: KeyError: 'nowhere'" in told[0]
    assert told[1].startswith("[Error]") and "secret" in told[1]
    assert told[2].startswith("[Error]") and "never closed" in told[2]
    assert answer.answer == "done"
    assert ToolcellInterpreter.execution_instructions in rlm.generate_action.signature.instructions


def test_sub_agents_and_llm_query_use_the_callers_model(runtime: SyncRuntime) -> None:
    script = "import dspy\nprint(dspy.Predict('question -> answer')(question='q').answer, llm_query('more'))"
    lm = DummyLM([step(script), {"answer": "from a sub-agent"}, {"text": "from a query"}, step("SUBMIT('done')")])
    with dspy.context(lm=lm):
        answer = dspy.RLM("city -> answer", interpreter_factory=interpreter_factory(runtime))(city="Bern")
    assert "from a sub-agent" in answer.trajectory[0]["output"] and "from a query" in answer.trajectory[0]["output"]


@pytest.mark.anyio
async def test_rlm_runs_inside_an_event_loop(runtime: SyncRuntime) -> None:
    async def slow_area(city: str) -> float:
        """Return the area of a city."""
        return area(city)

    with dspy.context(lm=DummyLM([step("SUBMIT(slow_area('Bern'))")])):
        rlm = dspy.RLM("city -> km2: float", tools=[slow_area], interpreter_factory=interpreter_factory(runtime))
        assert (await rlm.acall(city="Bern")).km2 == 51.6


def test_code_act_calls_its_tools_on_the_host(runtime: SyncRuntime, seen: list[str]) -> None:
    code = "```python\nprint(population('Bern') / area('Bern'))\n```"
    lm = DummyLM([{"generated_code": code, "finished": "True"}, {"reasoning": "r", "answer": "2597"}])
    factory = interpreter_factory(runtime, tools={"area": area})
    with dspy.context(lm=lm):
        answer = dspy.CodeAct("question -> answer", tools=[area], interpreter_factory=factory)(question="density?")

    assert answer.trajectory["code_output_0"] == '"2596.8992248062013"'
    assert seen == ["population", "area"]  # not the copy of its source that CodeAct defines in an interpreter


def test_program_of_thought_gets_the_value_of_its_last_variable(runtime: SyncRuntime) -> None:
    code = {"reasoning": "r", "generated_code": "```python\nx = 6\ny = x * 7\n```"}
    lm = DummyLM([code, {"reasoning": "r", "answer": "42"}])
    with dspy.context(lm=lm):
        module = dspy.ProgramOfThought("question -> answer", interpreter_factory=interpreter_factory(runtime))
        assert module(question="six times seven?").answer == "42"
    assert "[[ ## code_output ## ]]\n42" in lm.history[-1]["messages"][-1]["content"]


def test_it_is_an_interpreter_of_dspy_that_keeps_state(interpreter: ToolcellInterpreter) -> None:
    assert isinstance(interpreter, CodeInterpreter)
    assert interpreter("x = 40\nprint('so far')") == "so far"
    assert interpreter("x + 2") == 42
    assert interpreter("print(1)\nx") == "1\n40"
    assert interpreter("None") is None
    assert interpreter("b'ab'") == '"(2 bytes)"'
    assert interpreter("SUBMIT(x)") == FinalOutput({"output": 40})


def test_submit_takes_the_output_fields_in_order_or_by_name(interpreter: ToolcellInterpreter) -> None:
    interpreter.output_fields = [{"name": "low"}, {"name": "high", "type": "int"}]
    assert interpreter("SUBMIT(1, 2)") == interpreter("SUBMIT(high=2, low=1)") == FinalOutput({"low": 1, "high": 2})
    for wrong in ("SUBMIT(1)", "SUBMIT(1, 2, 3)", "SUBMIT(1, high=2)", "SUBMIT(low=1, other=2)"):
        with pytest.raises(CodeExecutionError, match=r"SUBMIT\(\) takes"):
            interpreter(wrong)


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        ("1 / 0", CodeExecutionError, "line 1, in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError"),
        ("if:", SyntaxError, "invalid syntax"),
        ("area('Bern', 'Basel')", CodeExecutionError, "takes at most 1 positional"),
        ("area('Bern', city='Basel')", CodeExecutionError, "multiple values for argument 'city'"),
        ("area(town='Bern')", CodeExecutionError, "town"),
        ("area({'city': 'Bern'})", CodeExecutionError, "city"),
        ("secret()", CodeExecutionError, "ToolError"),
        ("print('so far')\narea('nowhere')", CodeExecutionError, "so far\nTraceback"),
        ("import sys\nsys.exit('no')", CodeExecutionError, "SystemExit"),
    ],
)
def test_what_fails_is_raised_as_dspys_errors(
    interpreter: ToolcellInterpreter, code: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        interpreter(code)
    assert type(caught.value) is error and says in str(caught.value)
    assert "in function" not in str(caught.value)  # nothing of how tools are defined
    assert interpreter("1 + 1") == 2


def test_a_timeout_and_a_lost_sandbox_keep_the_state_and_make_no_call_twice(
    runtime: SyncRuntime, seen: list[str]
) -> None:
    with ToolcellInterpreter({"area": area}, runtime=runtime) as interpreter:
        interpreter("km2 = area('Bern')")
        with pytest.raises(CodeExecutionError, match="exit code 3"):
            interpreter("import os\nos._exit(3)")
        assert interpreter("km2") == 51.6
        assert seen == ["area"]
    with ToolcellInterpreter(runtime=runtime, limits=Limits(wall_s=1)) as interpreter:
        interpreter("x = 1")
        with pytest.raises(CodeExecutionError, match="timed out after 1 s"):
            interpreter("while True: pass")
        assert interpreter("x") == 1


def test_variables_become_names_whatever_the_sandbox_uses_itself(interpreter: ToolcellInterpreter) -> None:
    class City(BaseModel):
        name: str

    assert interpreter("[city['name'], rows]", {"city": City(name="Bern"), "rows": (1, 2)}) == ["Bern", [1, 2]]
    assert interpreter("log + tools + call_tool", {"log": 1, "tools": 2, "call_tool": 3}) == 6
    assert interpreter("area('Bern')") == 51.6
    for wrong in ({"area": 1}, {"SUBMIT": 1}, {"no name": 1}, {"class": 1}, {"x": object()}):
        with pytest.raises(CodeInterpreterError, match=repr(next(iter(wrong)))):
            interpreter("1", wrong)


def test_tools_may_change_between_executions_and_are_seen_by_callbacks(runtime: SyncRuntime) -> None:
    names: list[str] = []

    class Seen(BaseCallback):
        def on_interpreter_tool_call_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
            names.append(inputs["tool_name"])

    with ToolcellInterpreter(runtime=runtime, callbacks=[Seen()]) as interpreter:
        with pytest.raises(CodeExecutionError, match="NameError"):
            interpreter("half(n=4)")
        interpreter.tools["half"] = lambda n: n / 2
        interpreter.tools["area"] = dspy.Tool(area, name="area")
        assert interpreter("[half(n=4), area('Bern')]") == [2.0, 51.6]
        assert names == ["half", "area"]
        for wrong in ("not a name", "class"):
            interpreter.tools[wrong] = area
            with pytest.raises(CodeInterpreterError, match=f"identifier.*'{wrong}'"):
                interpreter("1")
            del interpreter.tools[wrong]
        interpreter.tools["population"] = area
        with pytest.raises(CodeInterpreterError, match="population"):
            interpreter("1")


def test_a_shutdown_ends_the_code_that_runs_and_the_interpreter_for_good(runtime: SyncRuntime) -> None:
    begun = threading.Event()
    interpreter = ToolcellInterpreter({"begin": begun.set}, runtime=runtime)
    ended: list[BaseException] = []

    def run() -> None:
        try:
            interpreter("begin()\nwhile True: pass")
        except BaseException as exc:
            ended.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    interpreter.shutdown()
    thread.join(60)
    assert isinstance(ended[0], CodeInterpreterError) and not isinstance(ended[0], CodeExecutionError)
    interpreter.shutdown()
    with pytest.raises(CodeInterpreterError, match="shut down"):
        interpreter("1")


def test_an_interpreter_has_a_runtime_of_its_own_unless_it_is_given_one() -> None:
    with nothing_left_behind(), ToolcellInterpreter(limits=Limits(wall_s=60)) as interpreter:
        assert interpreter("6 * 7") == 42
    with pytest.raises(CodeInterpreterError, match="not open"):
        ToolcellInterpreter(runtime=SyncRuntime())("1")


def test_the_example_runs() -> None:
    assert "2597 people per km²" in run_example("with_dspy.py")
