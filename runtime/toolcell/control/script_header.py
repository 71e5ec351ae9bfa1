"""A script in the header of a journal: everything that is needed to run it again, as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from toolcell.calls.call import CallableTools, RunContext
from toolcell.config import Limits, OnApproval
from toolcell.journal.identity import tool_digests
from toolcell.journal.ledger import Journal
from toolcell.results import Preflight
from toolcell.run.run import Script
from toolcell.sandbox.backend import GuestFile


def header_of(
    *,
    source: str,
    inputs: dict[str, Any],
    script: Script,
    tools: CallableTools,
    on_approval: OnApproval,
    refresh: str = "",
    repaired: Journal | None = None,
    context: RunContext | None = None,
) -> dict[str, Any]:
    """Return everything that is needed to run a script again, as plain data. `context`: for whom it runs."""
    from toolcell.support.packing import text_digest

    return {
        "source": source,
        "source_sha256": text_digest(source),
        "inputs": inputs,
        "files": [[file.name, file.data] for file in script.files],
        "limits": script.limits.model_dump(),
        "lint": script.lint,
        "seed": script.seed,
        "clock": script.clock,
        "tools": tool_digests(tools),
        "on_approval": on_approval,
        "refresh": refresh,
        "repairs": repaired.id if repaired is not None else "",
        "preflight": planned.to_plain() if (planned := script.found.get("preflight")) is not None else None,
        "who": who_of(context),
        "is_item": context is not None and context.scope.item == context.run_id,
    }


WHO: Final = ("user_id", "thread_id", "channel", "chat_id")


def who_of(context: RunContext | None) -> dict[str, str]:
    """Return for whom a run is, as plain data."""
    named = {name: getattr(context, name) for name in ("run_id", *WHO)} if context is not None else {}
    return {name: value for name, value in named.items() if value}


def continued_context(journal: Journal, given: RunContext | None) -> RunContext:
    """Return the context of a run that goes on: for whom it was, whoever has it go on."""
    given = given or RunContext(run_id=f"{journal.id}.{os.urandom(4).hex()}")
    who = journal.header.get("who") or {}
    return given.child(**{name: who[name] for name in WHO if name in who})


def script_of(header: Mapping[str, Any], number: int = 0) -> Script:
    """Return the script of a journal's header."""
    return Script(
        source=header["source"],
        inputs=header["inputs"],
        files=tuple(GuestFile(name, data) for name, data in header["files"]),
        limits=Limits(**header["limits"]),
        lint=header["lint"],
        seed=header["seed"],
        clock=header["clock"],
        number=number,
        found={} if (planned := Preflight.of_plain(header.get("preflight"))) is None else {"preflight": planned},
    )
