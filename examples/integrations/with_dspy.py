"""DSPy: `dspy.RLM` writes code that calls a tool of DSPy and one of a registry. The model is DSPy's scripted one."""

import dspy
from dspy.utils.dummies import DummyLM

from toolcell import SyncRuntime, ToolRegistry
from toolcell.integrations.dspy import interpreter_factory

registry = ToolRegistry()


@registry.tool
def population(city: str) -> int:
    """Return the number of people who live in a city."""
    return {"Bern": 134_000, "Basel": 173_000}[city]


def area(city: str) -> float:
    """Return the area of a city in square kilometres."""
    return {"Bern": 51.6, "Basel": 23.9}[city]


scripted = DummyLM(
    [
        {"reasoning": "Look first.", "code": "density = population(city) / area(city)\nprint(density)"},
        {"reasoning": "That is it.", "code": "SUBMIT(round(density))"},
    ]
)

with SyncRuntime(registry) as runtime, dspy.context(lm=scripted):
    rlm = dspy.RLM("city -> density: int", tools=[area], interpreter_factory=interpreter_factory(runtime))
    answer = rlm(city="Bern")
    for entry in answer.trajectory:
        print(entry["output"])
    print(f"{answer.density} people per km²")
