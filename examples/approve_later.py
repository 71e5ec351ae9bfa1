"""Shows a script that waits for a person: suspended in one Runtime, carried on in another one from its journal."""

import tempfile

import anyio

from toolcell import Outcome, Runtime, ToolRegistry
from toolcell.tools import Approve, Deny

registry = ToolRegistry()


@registry.tool(read_only=True)
async def open_invoices() -> list[dict[str, int | str]]:
    """List the invoices that are not paid."""
    print("  (looked up the invoices)")
    return [{"to": "ada", "euros": 40}, {"to": "bob", "euros": 9000}]


@registry.tool(requires_approval=True)
async def transfer(to: str, euros: int) -> str:
    """Send money to somebody."""
    print(f"  (sent {euros} euros to {to})")
    return f"{euros} euros sent to {to}"


SCRIPT = """
done = []
for invoice in call_tool('open_invoices'):
    try:
        done.append(call_tool('transfer', invoice))
    except ToolError as error:
        done.append(str(error))
done
"""


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with Runtime(registry, record=f"{folder}/runs.db") as runtime:
            result = await runtime.execute_code(SCRIPT, on_approval="suspend")
        while result.outcome is Outcome.SUSPENDED and result.suspension is not None:
            token = result.suspension.to_json()  # into a database, a mail, a web page
            (call,) = result.suspension.calls
            print(f"line {call.line} wants {call.tool}({call.args})")
            decision = Approve() if int(call.args["euros"]) < 1000 else Deny("too much for one day")
            async with Runtime(registry, record=f"{folder}/runs.db") as later:  # another process, a week later
                result = await later.resume(token, {call.id: decision})
        print(result.outcome, result.value)


anyio.run(main)
