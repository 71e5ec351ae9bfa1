"""Shows an agent whose payments wait for an answer in the terminal, one by one or changed."""

import json
import sys

import anyio

from toolcell import Agent, PendingCall, Runtime, ToolRegistry
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import Approve, Deny, Edit

registry = ToolRegistry()
prepared = iter(["y", 'e {"to": "bob", "euros": 20}', "n"])  # where nobody sits at a terminal


@registry.tool(requires_approval=True)
async def transfer(to: str, euros: int) -> str:
    """Send money to somebody."""
    return f"{euros} euros sent to {to}"


def decide(call: PendingCall) -> Approve | Deny | Edit:
    question = f"{call.tool}({call.args}) {call.reason}: y, n, or e ARGUMENTS? "
    answer = input(question) if sys.stdin.isatty() else next(prepared)
    if not sys.stdin.isatty():
        print(question + answer)
    if answer.startswith("e "):
        return Edit(json.loads(answer[2:]))
    return Approve() if answer == "y" else Deny("the user said no")


SCRIPT = "[call_tool('transfer', to=name, euros=euros) for name, euros in (('ada', 10), ('bob', 200))]"
model = ScriptedModel(
    [  # in the place of a model: a script with two payments, and a call of its own beside it
        calls(("execute_code", {"code": SCRIPT}), ("transfer", {"to": "eve", "euros": 9000})),
        lambda request: "; ".join(m["content"] for m in request.messages if m["role"] == "tool"),
    ]
)


async def main() -> None:
    async with Runtime() as runtime:
        agent = Agent(model, tools=registry, code_execution=runtime, on_approval="suspend")
        result = await agent.run("Pay the open invoices.")
        while result.suspension is not None:
            call = result.suspension.calls[0]  # the others wait again
            result = await agent.resume(result.suspension, {call.id: decide(call)})
        print(result.content)


anyio.run(main)
