"""Shows an agent as a tool of another agent: it has its own tools, and it obeys its caller's rules."""

import anyio

from toolcell.agents import Agent
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import Event


async def calculator(left: int, right: int) -> int:
    """Multiply two numbers."""
    return left * right


async def read_secrets() -> str:
    """Read a secret that no agent may read."""
    return "never reached"


def print_event(event: Event) -> None:
    if event.type in ("tool_execution_start", "tool_execution_end"):
        indent = "    " if event.origin == "subagent" else ""
        what = event.args if event.result is None else event.result.text
        print(f"{indent}{event.type.rpartition('_')[2]:5} {event.tool} (by {event.origin}): {what}")


async def main() -> None:
    mathematician = Agent(
        ScriptedModel([calls(("calculator", {"left": 137, "right": 48}), ("read_secrets", {})), "6576"]),
        tools=[calculator, read_secrets],
    )
    boss = Agent(ScriptedModel([calls(("math_specialist", {"task": "How much is 137 * 48?"})), "It is 6576."]))
    boss.add_subagent("math_specialist", "A specialist for complex mathematical proofs.", mathematician)
    boss.blacklist("read_secrets")
    boss.subscribe(print_event)

    run = await boss.run("How much is 137 times 48?")
    print("answer:", run.content, "after", run.iterations, "model requests")


anyio.run(main)
