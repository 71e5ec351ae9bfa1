"""smolagents' CodeAgent with toolcell's sandboxes: its own loop, with a model that says what the test wrote."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import audited_calls, needs, run_example

needs("smolagents")

from smolagents import ChatMessage, CodeAgent, FinalAnswerTool, Model, Tool, tool  # noqa: E402
from smolagents.local_python_executor import ExecutionTimeoutError, InterpreterError  # noqa: E402

from toolcell import Limits, SyncRuntime, ToolRegistry, UsageError  # noqa: E402
from toolcell.errors import RegistrationError  # noqa: E402
from toolcell.integrations.smolagents import ToolcellPythonExecutor  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation]


@tool
def price(item: str, count: int = 1) -> float:
    """Return what so many of an item cost.

    Args:
        item: Its name.
        count: How many.
    """
    return {"apple": 0.5, "pear": 0.75}[item] * count


@tool
def order(item: str, count: int) -> dict:
    """Order so many of an item.

    Args:
        item: Its name.
        count: How many.
    """
    if item == "ghost":
        raise ValueError("there is no ghost in stock")
    return {"ordered": item, "count": count}


class Anything(Tool):
    name = "anything"
    description = "Return the class of what it was given."
    inputs = {  # noqa: RUF012
        "value": {"type": "any", "description": "Anything."},
        "mode": {"type": "string", "description": "How.", "nullable": True, "enum": ["short", "long"]},
    }
    output_type = "string"

    def forward(self, value: Any, mode: str | None = None) -> str:
        return f"{type(value).__name__} {mode}"


class ScriptedModel(Model):
    """Says one script after another, and keeps what it was shown."""

    def __init__(self, *scripts: str) -> None:
        super().__init__()
        self.scripts, self.shown = list(scripts), list[str]()

    def generate(self, messages: list[Any], **options: Any) -> ChatMessage:
        self.shown.append(str(messages[-1].content))
        return ChatMessage(role="assistant", content=f"Next.\n<code>\n{self.scripts.pop(0)}\n</code>")


@pytest.fixture
def registry() -> ToolRegistry:
    return ToolRegistry()


@pytest.fixture
def runtime(registry: ToolRegistry, tmp_path: Path) -> Iterator[SyncRuntime]:
    with SyncRuntime(registry, record=tmp_path / "audit" / "runs.db", limits=Limits(wall_s=60)) as opened:
        yield opened


@pytest.fixture
def executor(runtime: SyncRuntime) -> Iterator[ToolcellPythonExecutor]:
    with ToolcellPythonExecutor(runtime) as made:
        made.send_tools({each.name: each for each in (price, order, Anything(), FinalAnswerTool())})
        yield made


def test_an_agent_writes_code_that_calls_two_tools_under_hooks_and_audit(
    runtime: SyncRuntime, registry: ToolRegistry, tmp_path: Path
) -> None:
    seen = list[tuple[str, Any]]()
    registry.before_call(lambda call: seen.append((call.name, dict(call.args))))
    model = ScriptedModel(
        "cost = price('apple', 4)\nprint('cost', cost)\ncost",
        "if cost < limit:\n    done = order(item='apple', count=4)\nfinal_answer([cost, done])\nprint('never')",
    )
    with CodeAgent(tools=[price, order], model=model, executor=ToolcellPythonExecutor(runtime)) as agent:
        assert agent.run("Buy apples.", additional_args={"limit": 3}) == [2.0, {"ordered": "apple", "count": 4}]
    assert "Execution logs:\\ncost 2.0" in model.shown[1] and "Last output from code snippet:\\n2.0" in model.shown[1]
    first = [("price", {"item": "apple", "count": 4}), ("order", {"item": "apple", "count": 4})]
    assert seen[:2] == first and seen[2][0] == "final_answer"
    runtime.close()
    assert audited_calls(tmp_path / "audit") == ["price", "order", "final_answer"]


def test_errors_reach_the_model_as_smolagents_shows_them_and_the_state_stays(runtime: SyncRuntime) -> None:
    model = ScriptedModel(
        "x = 20\nprint('before')\n1 / 0",
        "order('ghost', 1)",
        "price('apple', 'many')",
        "import socket; socket.create_connection(('127.0.0.1', 1))",
        "final_answer(x + 1)",
    )
    with CodeAgent(tools=[price, order], model=model, executor=ToolcellPythonExecutor(runtime)) as agent:
        assert agent.run("Try.") == 21
        steps = [step for step in agent.memory.steps if getattr(step, "error", None)]
    assert "ZeroDivisionError" in model.shown[1] and "line 3" in model.shown[1]
    assert steps[0].observations == "Execution logs:\nbefore\n"
    assert "ValueError: there is no ghost in stock" in model.shown[2]
    assert "count" in model.shown[3] and "integer" in model.shown[3]
    assert len(steps) == 4
    assert all(type(step.error).__name__ == "AgentExecutionError" for step in steps)


def test_a_denied_tool_is_an_error_of_the_script(executor: ToolcellPythonExecutor, registry: ToolRegistry) -> None:
    registry.policy.blacklist("order")
    with pytest.raises(InterpreterError, match="order"):
        executor("order('apple', 1)")
    assert executor("try:\n    order('apple', 1)\nexcept ToolError as exc:\n    said = str(exc)\nsaid").output


def test_a_script_without_time_is_smolagents_timeout_and_the_state_stays() -> None:
    with ToolcellPythonExecutor(limits=Limits(wall_s=1)) as executor:
        executor("x = 1")
        with pytest.raises(ExecutionTimeoutError, match="1 s"):
            executor("print('so far')\nwhile True: pass")
        assert executor.state["_print_outputs"] == "so far\n"
        assert executor("x").output == 1


def test_tools_take_their_arguments_as_python_functions_do(executor: ToolcellPythonExecutor) -> None:
    assert executor("[price('apple'), price('apple', 2), price(count=2, item='apple')]").output == [0.5, 1.0, 1.0]
    assert executor("anything({'a': 1})").output == "dict None"
    assert executor("anything([1], 'long')").output == "list long"
    assert executor("anything(None, mode=None)").output == "NoneType None"
    for wrong in ("price('apple', 1, 2)", "price('apple', item='pear')"):
        with pytest.raises(InterpreterError, match="TypeError"):
            executor(wrong)
    for wrong in ("price()", "anything(1, 'loud')", "price('apple', colour='red')"):
        with pytest.raises(InterpreterError, match="ToolError"):
            executor(wrong)


def test_final_answer_ends_the_script_and_is_not_caught_as_an_exception(executor: ToolcellPythonExecutor) -> None:
    done = executor("try:\n    final_answer({'a': (1, 2)})\nexcept Exception:\n    print('caught')\nprint('after')")
    assert (done.output, done.logs, done.is_final_answer) == ({"a": [1, 2]}, "", True)
    again = executor("print('next')")
    assert (again.output, again.logs, again.is_final_answer) == (None, "next\n", False)


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    final_answer(1)\nexcept:\n    print('caught')\nprint('after')",
        "def f():\n    try:\n        final_answer(1)\n    except:\n        pass\n    return 5\nprint(f())",
        "for _ in range(3):\n    try:\n        final_answer(1)\n    except BaseException:\n        continue\nprint('after')",
    ],
)
def test_final_answer_ends_a_script_that_catches_everything(executor: ToolcellPythonExecutor, code: str) -> None:
    done = executor(code)
    assert (done.output, done.logs, done.is_final_answer) == (1, "", True)
    assert executor("def g():\n    return 2\ng()").output == 2


MANAGER = """
class Manager:
    def __enter__(self):
        return self
    def __exit__(self, *raised):
        print('left')
def asked():
    try:
        final_answer(1)
    finally:
        print('inner')
"""


@pytest.mark.parametrize(
    ("code", "logs"),
    [
        ("try:\n    final_answer(1)\nfinally:\n    print('a')\n    print('b')\nprint('after')", "a\nb\n"),
        ("try:\n    final_answer(1)\nexcept:\n    print('no')\nfinally:\n    print('a')\nprint('after')", "a\n"),
        ("for _ in 'ab':\n    try:\n        final_answer(1)\n    except:\n        pass\n    finally:\n        print('a')", "a\n"),
        ("try:\n    asked()\nexcept:\n    print('no')\nfinally:\n    print('outer')\nprint('after')", "inner\nouter\n"),
        ("with Manager():\n    final_answer(1)\nprint('after')", "left\n"),
        ("with (\n    Manager(),\n    Manager(),\n):\n    final_answer(1)\nprint('after')", "left\nleft\n"),
        ("try:\n    final_answer(1)\nexcept:\n    with Manager():\n        print('no')\nprint('after')", ""),
        ("def f():\n    try:\n        final_answer(1)\n    finally:\n        return 5\nf()\nprint('after')\nNone", ""),
    ],
)  # fmt: skip
def test_final_answer_runs_finally_and_leaves_with_blocks(
    executor: ToolcellPythonExecutor, code: str, logs: str
) -> None:
    executor(MANAGER)
    done = executor(code)
    assert (done.output, done.logs, done.is_final_answer) == (1, logs, True)


def test_an_answer_may_hold_numbers_that_json_does_not_have(executor: ToolcellPythonExecutor) -> None:
    answer = executor("final_answer({'a': [float('nan'), float('-inf')], 'b': 1.5})").output
    assert repr(answer) == "{'a': [nan, -inf], 'b': 1.5}"
    assert repr(executor("float('nan')").output) == "nan"


def test_a_final_answer_tool_of_the_agents_own_gives_whatever_it_makes(runtime: SyncRuntime) -> None:
    class Checked(FinalAnswerTool):
        def forward(self, answer: Any) -> Any:
            return {answer}

    model = ScriptedModel("final_answer('a')")
    with CodeAgent(tools=[Checked()], model=model, executor=ToolcellPythonExecutor(runtime)) as agent:
        assert agent.run("Answer.") == {"a"}


def test_a_managed_agent_is_a_function(runtime: SyncRuntime) -> None:
    inner = CodeAgent(
        tools=[price],
        model=ScriptedModel("final_answer(price('pear', 2))"),
        executor=ToolcellPythonExecutor(runtime),
        name="buyer",
        description="Knows what things cost.",
    )
    model = ScriptedModel("said = buyer(task='What do two pears cost?')\nfinal_answer('1.5' in said)")
    outer = CodeAgent(tools=[], model=model, managed_agents=[inner], executor=ToolcellPythonExecutor(runtime))
    with inner, outer:
        assert outer.run("Ask the buyer.") is True


def test_variables_that_are_no_data_are_refused_by_name(executor: ToolcellPythonExecutor) -> None:
    executor.send_variables({"rows": [1, 2]})
    assert executor("sum(rows)").output == 3
    with pytest.raises(UsageError, match="lock"):
        executor.send_variables({"lock": threading.Lock()})


def test_output_is_cut_as_smolagents_cuts_it(runtime: SyncRuntime) -> None:
    with ToolcellPythonExecutor(runtime, max_print_outputs_length=100) as executor:
        assert "truncated to stay below 100 characters" in executor("print('x' * 5000)").logs


def test_functions_of_the_program_and_tools_of_the_registry_are_there_too(
    runtime: SyncRuntime, registry: ToolRegistry
) -> None:
    def twice(n: int) -> int:
        """Return a number twice as large."""
        return 2 * n

    @registry.tool
    def host() -> str:
        """Return the name of the host."""
        return "host"

    with ToolcellPythonExecutor(runtime, additional_functions={"twice": twice}) as executor:
        executor.send_tools({"price": price})
        assert executor("[twice(4), tools.host()]").output == [8, "host"]
        with pytest.raises(RegistrationError, match="twice"):
            executor.send_tools({"twice": price})


def test_cleanup_ends_a_script_that_another_thread_runs() -> None:
    begun, ended = threading.Event(), list[str]()

    @tool
    def begin() -> str:
        """Tell the test that the script runs."""
        begun.set()
        return ""

    executor = ToolcellPythonExecutor(limits=Limits(wall_s=300))
    executor.send_tools({"begin": begin})

    def run() -> None:
        try:
            executor("begin()\nwhile True: pass")
        except InterpreterError as exc:
            ended.append(str(exc))

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    executor.cleanup()
    thread.join(60)
    assert ended and not thread.is_alive()


def test_nothing_is_left_after_cleanup_and_a_script_after_it_begins_anew() -> None:
    executor = ToolcellPythonExecutor()
    executor("x = 1")
    executor.cleanup()
    executor.cleanup()
    with pytest.raises(UsageError, match="not open"):
        executor._owner.runtime.execute_code("1")
    with pytest.raises(InterpreterError, match="NameError"):
        executor("x")
    executor.cleanup()


def test_the_example_runs() -> None:
    assert "all fruit together costs 3.5" in run_example("with_smolagents.py")
