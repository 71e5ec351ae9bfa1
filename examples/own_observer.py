"""Shows two observers: one follows the calls of a run, the other gets each event of the audit log."""

import tempfile
from collections import Counter

import anyio

from toolcell import AuditLog, RunContext, Runtime, ToolRegistry
from toolcell.audit import AuditEvent
from toolcell.tools import Call, Feature

registry = ToolRegistry()


@registry.tool
def price(article: str) -> float:
    """Return the price of an article in euros."""
    return {"nut": 0.2, "bolt": 0.5}[article]


class Outcomes(Feature):
    """Counts how calls end. `call_started` returns before the tool has any effect."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()

    def call_started(self, call: Call) -> None:
        pass

    def call_ended(self, call: Call) -> None:
        self.counts[call.name, str(call.result.status)] += 1


async def main() -> None:
    outcomes, kinds = Outcomes(), Counter[str]()

    def count(event: AuditEvent) -> None:
        kinds[event.kind] += 1

    with tempfile.TemporaryDirectory() as folder, AuditLog(f"{folder}/runs.db", sinks=[count]) as log:
        async with Runtime(registry, record=log) as runtime:
            for article in ("nut", "bolt", "hammer"):
                await runtime.execute_code(
                    "tools.price(article=article)",
                    inputs={"article": article},
                    context=RunContext(user_id="ann").having(outcomes),
                )
    print(dict(outcomes.counts))
    print({kind: kinds[kind] for kind in ("run_started", "call_started", "call_ended", "run_ended")})


if __name__ == "__main__":
    anyio.run(main)
