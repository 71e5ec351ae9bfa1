"""Inspect: a model writes code that calls a tool of Inspect and one of a registry. The model is Inspect's mock one.

Inspect's approval policies decide about the script, and about each of its calls of an Inspect tool.
"""

import tempfile

from inspect_ai import Task, eval
from inspect_ai.approval import ApprovalPolicy, auto_approver
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

from toolcell import ToolRegistry
from toolcell.integrations.inspect_ai import toolcell_python

registry = ToolRegistry()


@registry.tool
def population(city: str) -> int:
    """Return the number of people who live in a city."""
    return {"Bern": 134_000, "Basel": 173_000}[city]


@tool
def area() -> Tool:
    async def execute(city: str) -> float:
        """Return the area of a city in square kilometres.

        Args:
            city: Name of the city.
        """
        return {"Bern": 51.6, "Basel": 23.9}[city]

    return execute


CODE = "print(round(tools.population('Bern') / tools.area('Bern')), 'people per km²')"
outputs = [
    ModelOutput.for_tool_call("mockllm/model", "python", {"code": CODE}),
    ModelOutput.from_content("mockllm/model", "That is Bern's density."),
]
for output in outputs:
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)

task = Task(
    dataset=[Sample(input="How densely populated is Bern?")],
    solver=[use_tools(toolcell_python(tools=[area()], options={"registry": registry})), generate()],
    approval=[ApprovalPolicy(auto_approver(), "*")],
)
with tempfile.TemporaryDirectory() as logs:
    [log] = eval(task, model=get_model("mockllm/model", custom_outputs=outputs), display="none", log_dir=logs)
    for message in log.samples[0].messages:
        print(f"{message.role}: {message.text}")
