"""Shows a dry run: every write of a script is listed before any is made, then exactly those are made."""

import anyio

from toolcell import Runtime, ToolRegistry

registry = ToolRegistry()
made: list[str] = []


@registry.tool(read_only=True)
async def open_invoices() -> list[dict[str, int | str]]:
    """List the invoices that are not paid."""
    return [{"to": "ada", "euros": 40}, {"to": "bob", "euros": 9000}]


@registry.tool
async def new_batch(name: str) -> int:
    """Open a batch of payments and return its number."""
    made.append(f"batch {name}")
    return 7


@registry.tool
async def pay(batch: int, to: str, euros: int) -> str:
    """Add a payment to a batch."""
    made.append(f"{euros} to {to} in batch {batch}")
    return f"{to}: {euros}"


SCRIPT = """
batch = call_tool('new_batch', name='may')
[call_tool('pay', batch=batch, **invoice) for invoice in call_tool('open_invoices')]
"""


async def main() -> None:
    async with Runtime(registry) as runtime:
        draft = await runtime.execute_code(SCRIPT, dry_run=True)
        for effect in draft.effects:
            print(effect)
        small = [each.id for each in draft.effects if int(each.args.get("euros", 0)) < 1000]
        result = await runtime.commit(draft, small, recheck=True)
        print(result)
        print("made:", made)


anyio.run(main)
