"""Which calls of a run can be undone, as the run notes them."""

from __future__ import annotations

import anyio

from toolcell import RunContext, ToolRegistry
from toolcell.calls.reverts import FINAL, MadeCalls


def test_each_call_that_cannot_be_undone_is_noted_by_its_own_name() -> None:
    registry, whole, part = ToolRegistry(), MadeCalls(), MadeCalls()
    schema = {"type": "object", "properties": {}}
    for name in ("mail", "shout"):
        registry.register(name, "Acts on something outside.", schema, lambda args: "done")
    registry.register(
        "save", "Acts on something outside.", schema, lambda args: "done", revert=lambda args, result: None
    )
    registry.register("look", "Looks at something outside.", schema, lambda args: "done", read_only=True)

    async def main() -> None:
        run = RunContext().having(whole)
        for name in ("mail", "shout", "look", "save", "mail"):
            await registry.dispatch(name, {}, context=run.having(part))

    anyio.run(main)
    assert [(each.tool, each.problem, each.call is None) for each in whole.calls] == [
        ("mail", FINAL, True),
        ("shout", FINAL, True),
        ("save", "", False),
        ("mail", FINAL, True),
    ]
    assert [each.tool for each in part.calls] == [each.tool for each in whole.calls]
