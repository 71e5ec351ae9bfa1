"""Shows an audit log: one run is recorded, read back, verified, and replayed on the recorded answers alone."""

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import anyio

from toolcell import RunContext, Runtime, ToolError, ToolRegistry
from toolcell.audit import AuditLog, HmacKey, Index, RecordedRun, verify
from toolcell.control import replay

registry = ToolRegistry()
STOCK = {"kettle": 3, "teapot": 0}


@registry.tool
async def in_stock(item: str) -> int:
    """Return how many pieces of an item are in stock."""
    if item not in STOCK:
        raise ToolError(f"no such item: {item}")
    return STOCK[item]


@registry.tool
async def order(item: str, count: int) -> dict[str, object]:
    """Order more of an item from the supplier."""
    return {"item": item, "ordered": count}


SCRIPT = """\
for item in ("kettle", "teapot", "samovar"):
    try:
        if call_tool("in_stock", item=item) < 2:
            call_tool("order", item=item, count="12")
    except ToolError as error:
        print("skipped:", error)
"""


def print_run(run: RecordedRun) -> None:
    print(f"{run.id} for {run.who['user']}: {run.outcome}, {len(run.isolation['layers'])} isolation layers")
    for call in run.calls:
        answer = call.value if call.status == "ok" else f"{call.code}: {call.message}"
        print(f"  line {call.line}: {call.tool}({call.args}) -> {answer}")


async def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        path, key = Path(home) / "runs.db", HmacKey.generate()  # Runtime(record="runs.db") makes and keeps a key itself
        async with Runtime(registry, record=AuditLog(path, key=key, heads=Path(home) / "heads")) as runtime:
            await runtime.execute_code(SCRIPT, context=RunContext(user_id="ada", run_id="restock"))

        with Index(path) as index:
            run = index.load(index.find("restock"))
        print_run(run)
        print("verified:", verify(path, [key]).ok)
        with closing(sqlite3.connect(path)) as db:
            print("calls:", db.execute("SELECT tool, count(*) FROM call GROUP BY tool").fetchall())
            db.execute("UPDATE event SET at = at + 1 WHERE kind = 'run_started'")
            db.commit()
        print("after an edit:", verify(path, [key]).findings[0].message)

    async with Runtime(**run.runtime_options()) as runtime:  # this runtime has no tools
        again = await replay(runtime, run)
        changed = await replay(runtime, run, source=SCRIPT.replace('"12"', '"24"'))
    print("replayed:", again.ok, f"({again.answered} answers from the record)")
    print("changed:", changed.divergence and changed.divergence.message)


anyio.run(main)
