"""An agent of the OpenAI Agents SDK writes Python, which calls function tools, one of them after somebody approved it.

The model is the SDK's scripted one, so this needs no key; with `model="gpt-5"` in its place, the rest stays as it is.
"""

import asyncio

from agents.testing import ScriptedModel, assistant_message, function_call

from agents import Agent, RunConfig, Runner, function_tool
from toolcell import Runtime, ToolRegistry
from toolcell.integrations.openai_agents import code_execution_tool


@function_tool
def unpaid_invoices(customer: str) -> list[dict[str, float]]:
    """Return the invoices that a customer has not paid."""
    return [{"number": 17, "amount": 120.0}, {"number": 19, "amount": 80.5}]


@function_tool(needs_approval=True)
def send_reminder(customer: str, amount: float) -> str:
    """Send a customer a reminder."""
    return f"reminded {customer} of {amount}"


SCRIPT = """
total = sum(each["amount"] for each in tools.unpaid_invoices(customer="Ann"))
tools.send_reminder(customer="Ann", amount=total)
"""

MODEL = ScriptedModel(
    [
        [function_call("execute_code", {"code": SCRIPT}, call_id="call-1")],
        [assistant_message("Ann was reminded of 200.5.")],
    ]
)


async def main() -> None:
    async with Runtime(ToolRegistry()) as runtime:
        tool = code_execution_tool(runtime, tools=[unpaid_invoices, send_reminder])
        agent = Agent(name="accountant", model=MODEL, tools=[tool])
        quiet = RunConfig(tracing_disabled=True)
        result = await Runner.run(agent, "Remind Ann of what she owes.", run_config=quiet)
        while result.interruptions:
            state = result.to_state()
            for call in state.get_interruptions():
                print("approved:", call.name, call.arguments)
                state.approve(call)
            result = await Runner.run(agent, state, run_config=quiet)
        print(result.final_output)


asyncio.run(main())
