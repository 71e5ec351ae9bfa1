"""Shows one script over many inputs: bounded memory, items in order, and a record that outlives a crash."""

import tempfile
from collections.abc import Iterator

import anyio

from toolcell import Runtime, ToolRegistry

registry = ToolRegistry()
sent: list[str] = []


@registry.tool
async def send_invoice(to: str, cents: int) -> int:
    """Send an invoice and return its number. It must not happen twice."""
    sent.append(to)
    return len(sent)


SCRIPT = """
cents = sum(round(100 * float(price)) for price in prices)
{"to": name, "cents": cents, "number": call_tool("send_invoice", to=name, cents=cents)}
"""


def customers() -> Iterator[dict[str, object]]:
    """Yield inputs one by one: a million of them would take no more memory."""
    for number in range(50):
        prices = ["19.90", "5"] if number != 31 else ["19.90", "five"]
        yield {"name": f"customer {number}", "prices": prices}


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for life in (1, 2):  # the second one stands for the same program after a crash
            async with Runtime(registry, record=f"{folder}/runs.db") as runtime:
                items = runtime.map(SCRIPT, customers(), concurrency=4, retries=2, map_id="may-invoices", resume=True)
                done = [item async for item in items]
            failed = [f"{item.inputs['name']}: {item.error.message}" for item in done if item.error]
            recorded = sum(item.is_recorded for item in done)
            print(f"life {life}: {len(done)} items, {recorded} from the record, {len(sent)} sent, failed: {failed}")


anyio.run(main)
