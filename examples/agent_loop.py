"""Shows an agent whose model writes code: the code calls tools, its progress is printed, and one answer comes back.

With --stream, what the model writes is printed as it comes.
"""

import sys

import anyio

from toolcell import Limits, Runtime
from toolcell.agents import Agent
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import Event, ToolRegistry

registry = ToolRegistry()
ORDERS: list[dict[str, object]] = [
    {"id": n, "customer": "ada" if n % 3 else "bob", "euros": 10 * n} for n in range(1, 13)
]


@registry.tool(read_only=True)
async def list_orders(customer: str) -> list[dict[str, object]]:
    """List the orders of a customer."""
    return [order for order in ORDERS if order["customer"] == customer]


FIRST_TRY = "orders = call_tool('list_orders', {'customer': 'ada'})\nset_result(sum(o['total'] for o in orders))"
SECOND_TRY = """
totals = {}
for customer in ('ada', 'bob'):
    orders = call_tool('list_orders', {'customer': customer})
    totals[customer] = sum(o['euros'] for o in orders)
    print(customer, 'has', len(orders), 'orders')
set_result(totals)
"""


def print_event(event: Event) -> None:
    match event.type:
        case "tool_execution_start":
            print(f"  start  {event.tool} by {event.origin}")
        case "tool_execution_update":
            print(f"  update {event.tool}: {event.update['text'].splitlines()[-1]}")
        case "message_update" if "--stream" in sys.argv:
            print(*event.update.values(), end="", flush=True)  # text, reasoning or a call's arguments
        case "message_end" if "--stream" in sys.argv:
            print()


async def main() -> None:
    model = ScriptedModel(
        [
            calls(("execute_code", {"code": FIRST_TRY})),
            calls(("execute_code", {"code": SECOND_TRY})),
            "Ada has ordered for 480 euros, Bob for 300.",
        ]
    )
    async with Runtime(registry, limits=Limits(wall_s=10)) as runtime:
        agent = Agent(model, tools=registry, code_execution=runtime, system_prompt="You are an accountant.")
        async with agent.stream("What did our customers order for?") as events:
            async for event in events:
                print_event(event)
    run = events.result
    for message in run.messages:
        if message["role"] == "tool":
            print("the model read:", message["content"].replace("\n", "\n    "))
    print("answer:", run.content)
    print("steps: ", [(step.name, round(step.duration_ms, 1)) for step in run.steps], "stop:", run.stop_reason)


anyio.run(main)
