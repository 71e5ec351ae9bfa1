"""`toolcell audit prune` and `hold`: remove what is too old or too much, and keep single runs in spite of it."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from toolcell.audit import holds, retention
from toolcell.audit.config import AuditConfig
from toolcell.audit.keys import Verifier
from toolcell.audit.log import AuditLog
from toolcell.audit.query import Index
from toolcell.audit.redaction import user_name
from toolcell.cli.audit_arguments import (
    AsJson,
    Dir,
    KeyFiles,
    default_directory,
    known_keys,
    parse_time,
    split_target,
)
from toolcell.cli.terminal import print_json, safe, stderr, stdout
from toolcell.errors import UsageError

SignWith = Annotated[
    Path | None, typer.Option("--sign", metavar="FILE", help="The key to sign the record with. Default: ours.")
]


def prune(
    directory: Dir = None,
    *,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Remove segments older than 90m, 30d or a date.")
    ] = None,
    keep_bytes: Annotated[
        int | None, typer.Option("--keep-bytes", metavar="N", min=0, help="Remove the oldest beyond so much per chain.")
    ] = None,
    witness: Annotated[
        list[str] | None,
        typer.Option("--witness", metavar="PLACE", help="Tell this witness first; without it nothing is removed."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    sign_with: SignWith = None,
    key: KeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """Remove old segments of all chains that nobody else writes. A signed record says what was removed.

    The newest segment of a chain stays, so do runs under legal hold and whatever does not verify.
    """
    if older_than is None and keep_bytes is None:
        raise UsageError("say what is to go: --older-than 90d, --keep-bytes N, or both")
    path = directory or default_directory()
    keep_s = max(1e-9, time.time() - parse_time(older_than) / 1e9) if older_than is not None else None
    config = AuditConfig(keep_s=keep_s, keep_bytes=keep_bytes, fsync="always")
    keys = [*known_keys(key), *(known_keys([sign_with]) if sign_with is not None else ())]
    expired = [*retention.expired_segments(path, config, keys)]
    if not dry_run and expired:
        with AuditLog(path, key=sign_with, config=config, witnesses=witness or ()) as log:
            log.prune()
        left = {(each.chain, each.segment.number) for each in retention.expired_segments(path, config, keys)}
        expired = [each for each in expired if (each.chain, each.segment.number) not in left]
    if as_json:
        print_json([each.to_dict() for each in expired])
        return
    for each in expired:
        at = datetime.fromtimestamp(each.segment.newest_ns / 1e9).astimezone().isoformat(" ", "seconds")
        stdout().print(
            safe(f"chain {each.chain}, segment {each.segment.number}: {each.segment.size} bytes, up to {at}")
        )
    total = sum(each.segment.size for each in expired)
    stderr().print(safe(f"{len(expired)} segments, {total} bytes {'would be' if dry_run else 'were'} removed"))


def hold(
    target: Annotated[list[str], typer.Argument(metavar="[DIR] [RUN]", help="The log and the run.")],
    *,
    release: Annotated[bool, typer.Option("--release", help="End the hold.")] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is recorded.")] = "",
    by: Annotated[str, typer.Option("--by", metavar="NAME", help="Who; it is recorded. Default: this user.")] = "",
    sign_with: SignWith = None,
    key: KeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """Keep a run whatever the retention says, until --release. Without RUN, list the runs that are held.

    A signed record says who did it and why. Later segments of the run's chain stay with it.
    """
    keys = [*known_keys(key), *(known_keys([sign_with]) if sign_with is not None else ())]
    if len(target) == 1 and Path(target[0]).is_dir():
        _list(Path(target[0]), keys, as_json)
        return
    directory, wanted = split_target(target)
    with Index(directory, keys) as index:
        index.refresh()
        summary = index.find(wanted)
    if release:
        holds.check_held(summary, directory, keys)
    with AuditLog(directory, key=sign_with, config=AuditConfig(fsync="always")) as log:
        holds.hold(log, summary, by=by or user_name(), reason=reason, is_held=not release)
    if as_json:
        print_json({"run": summary.id, "chain": summary.chain, "seq": summary.seq, "is_held": not release})
    else:
        stderr().print(safe(f"run {summary.id} is {'no longer held' if release else 'held'}"))


def _list(directory: Path, keys: list[Verifier], as_json: bool) -> None:
    held = holds.held_runs(directory, keys)
    if as_json:
        print_json(held)
        return
    for each in held:
        stdout().print(safe(f"{each['run']}  held by {each['by']}{': ' + each['reason'] if each['reason'] else ''}"))
