"""`toolcell audit redact`: remove content from a recorded run, with a signed record of who removed what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolcell.audit import redaction
from toolcell.audit.config import AuditConfig
from toolcell.audit.log import AuditLog
from toolcell.audit.query import Index
from toolcell.cli.audit_arguments import AsJson, DirAndRun, KeyFiles, known_keys, split_target
from toolcell.cli.terminal import print_json, safe, stderr
from toolcell.errors import UsageError


def redact(
    target: DirAndRun,
    *,
    field: Annotated[
        list[str], typer.Option("--field", "-f", metavar="NAME", help=f"{', '.join(redaction.PARTS)}; repeatable.")
    ],
    call: Annotated[
        list[int] | None, typer.Option("--call", "-c", metavar="N", min=1, help="Only of this call; repeatable.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is recorded.")] = "",
    by: Annotated[str, typer.Option("--by", metavar="NAME", help="Who; it is recorded. Default: this user.")] = "",
    sign_with: Annotated[
        Path | None, typer.Option("--sign", metavar="FILE", help="The key to sign the record with. Default: ours.")
    ] = None,
    key: KeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """Remove content of a recorded run from the disk. A signed record says who did it, when, and what its digest was.

    The log still verifies. Copies that were made before, such as receipts, backups and events, keep the content.
    """
    directory, wanted = split_target(target)
    keys = [*known_keys(key), *(known_keys([sign_with]) if sign_with is not None else ())]
    log = AuditLog(directory, key=sign_with, config=AuditConfig(fsync="always"))
    with Index(directory, keys) as index:
        index.refresh()
        summary = index.find(wanted)
        with log:
            done = redaction.redact(log, index, summary, field, calls=call or (), by=by, reason=reason)
    if not done:
        raise UsageError(f"run {summary.id} holds nothing of {', '.join(field)} that is not removed already")
    if as_json:
        plain = [
            {"seq": each.stored.record.seq, "parts": list(each.parts), "original": each.original.hex()} for each in done
        ]
        print_json({"run": summary.id, "chain": summary.chain, "redacted": plain})
        return
    for each in done:
        record = each.stored.record
        text = f"{record.kind} {record.seq}: {', '.join(each.parts)} removed, was {each.original.hex()[:16]}"
        stderr().print(safe(text))
