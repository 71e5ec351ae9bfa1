"""A smolagents CodeAgent whose code runs in toolcell's sandboxes. The model here is a script: no key is needed.

pip install '.[smolagents]'
"""

from smolagents import ChatMessage, CodeAgent, Model, tool

from toolcell import Limits
from toolcell.integrations.smolagents import ToolcellPythonExecutor


@tool
def items(shelf: str) -> list:
    """List what is on a shelf.

    Args:
        shelf: Its name.
    """
    return {"fruit": ["apple", "pear", "plum"]}[shelf]


@tool
def price(item: str) -> float:
    """Return what an item costs.

    Args:
        item: Its name.
    """
    return {"apple": 0.5, "pear": 0.75, "plum": 2.25}[item]


class ScriptedModel(Model):
    """Says one thing after another."""

    def __init__(self, *said: str) -> None:
        super().__init__()
        self.said = list(said)

    def generate(self, messages: list, **options: object) -> ChatMessage:
        return ChatMessage(role="assistant", content=self.said.pop(0))


model = ScriptedModel(
    "I look at the shelf.\n<code>\nnames = items('fruit')\nprint(names)\n</code>",
    "Now the sum.\n<code>\nfinal_answer(sum(price(name) for name in names))\n</code>",
)
with CodeAgent(tools=[items, price], model=model, executor=ToolcellPythonExecutor(limits=Limits(wall_s=30))) as agent:
    print("all fruit together costs", agent.run("What does all fruit cost together?"))
