"""Say what is known of a run whose process was killed: which calls it had begun, and which of them were answered."""

from __future__ import annotations

from typing import Any

from toolcell.errors import ToolcellError
from toolcell.service.problems import Problem
from toolcell.service.tenants import Tenant
from toolcell.support import daemon_threads


async def interrupted_problem(tenant: Tenant, run_id: str) -> Problem:
    """Return the answer to a request whose run was interrupted.

    Shape: `calls` has each call with `tool`, `args` and `state`, which is `answered`, `in doubt` or `not begun`; null
    when nothing is known of them.
    """
    calls, told = await daemon_threads.run_sync(tenant.runtime.calls_of_interrupted, run_id), ""
    if calls is None:
        calls, told = await _recorded(tenant, run_id)
    elif any(each["state"] == "in doubt" for each in calls):
        told = "; a call in doubt had begun and has no answer: its tool may have done its work"
    count = "its calls are not known" if calls is None else f"calls that it had begun: {len(calls)}"
    members: dict[str, Any] = {"run_id": run_id, "calls": calls}
    detail = f"the service ended while it carried out run {run_id}, and does not begin it again; {count}{told}"
    return Problem(409, "interrupted", "The run was interrupted", detail, **members)


async def _recorded(tenant: Tenant, run_id: str) -> tuple[list[dict[str, Any]] | None, str]:
    """Return what the audit log has: a run without a journal has ended, or had not begun."""
    if tenant.recorded is None:
        return None, "; no journal of it is left, so it has ended, or it had not begun"
    try:
        run = await tenant.recorded.load(run_id)
    except (Problem, ToolcellError):
        return [], "; the audit log has no run of this id, so it had not begun"
    calls = [
        {"tool": each["tool"], "args": each["args"], "state": "in doubt" if each["status"] is None else "answered"}
        for each in (call.to_dict() for call in run.calls)
        if each["parent"] is None
    ]
    return calls, f"; the audit log has its end, with the outcome {run.outcome}" if run.end else ""
