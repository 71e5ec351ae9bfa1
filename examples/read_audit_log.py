"""The story of one run, told from its audit log: what was asked, which tools it called and from which line, what came
back, and proof that none of it was changed afterwards. At the end the script runs again on the recorded answers alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio

from toolcell import RunContext, Runtime, ToolRegistry
from toolcell.audit import AuditLog, HmacKey, Index
from toolcell.audit.replay import replay, runtime_options
from toolcell.audit.verify import verify
from toolcell.tools import ToolError

registry = ToolRegistry()
STOCK = {"kettle": 3, "teapot": 0}


@registry.tool
async def in_stock(item: str) -> int:
    """Tell how many of an item are in stock."""
    if item not in STOCK:
        raise ToolError(f"no such item: {item}")
    return STOCK[item]


@registry.tool
async def order(item: str, count: int) -> dict[str, object]:
    """Order more of an item from the supplier."""
    return {"item": item, "ordered": count}


SCRIPT = """\
placed = []
for item in ("kettle", "teapot", "samovar"):
    try:
        left = call_tool("in_stock", item=item)
    except ToolError as error:
        print("skipped:", error)
        continue
    if left < 2:
        placed.append(call_tool("order", item=item, count="12"))
set_result(placed)
"""


async def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        directory, key = Path(home) / "runs", HmacKey.generate()  # Runtime(audit="runs/") makes and keeps a key itself
        log = AuditLog(directory, key=key, heads=Path(home) / "heads")
        async with Runtime(registry, audit=log) as runtime:
            await runtime.execute_code(SCRIPT, context=RunContext(user_id="ada", run_id="restock"))

        with Index(directory) as index:
            index.refresh()
            run = index.load(index.find("restock"))
        print(f"{run.id} for {run.who['user']}: {run.outcome}, {len(run.isolation['layers'])} isolation layers")
        for call in run.calls:
            answer = call.value if call.status == "ok" else f"{call.code}: {call.message}"
            print(f"  line {call.line}: {call.tool}({call.args}) -> {answer}")
            for change in call.start_more.get("coerced", []):
                print(f"    mended {change['path']}: {change['from']!r} became {change['to']!r}")
        print(f"  printed {run.end['logs'][0][1]!r}, result {run.end['value']}")

        report = verify(directory, [key])
        print("verified:", report.ok, f"({report.chains[0].records} records, all signed)")
        segment = next(directory.glob("*/*.log"))
        segment.write_bytes(segment.read_bytes().replace(b"samovar", b"samizda"))
        print("after an edit:", verify(directory, [key]).findings[0].message)

        async with Runtime(**runtime_options(run)) as runtime:  # knows no tool at all
            again = await replay(runtime, run)
            changed = await replay(runtime, run, source=SCRIPT.replace('"12"', '"24"'))
        print("replayed:", again.ok, f"({again.answered} answers from the record)")
        assert changed.divergence is not None
        print("changed:", changed.divergence.message, "in line", changed.divergence.line, changed.divergence.got)


anyio.run(main)
