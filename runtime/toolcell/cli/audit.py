"""`toolcell audit`: list, show, count, verify and export what scripts did, and run them again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from toolcell.audit import receipt, verify
from toolcell.audit.format import BadInput, read_log_id
from toolcell.audit.html import to_html
from toolcell.audit.query import Index, RunSummary
from toolcell.audit.reader import jsonable
from toolcell.audit.signatures import load_heads, saved_heads
from toolcell.audit.witness_places import witness_of
from toolcell.cli import audit_render, exits
from toolcell.cli.audit_arguments import (
    AsJson,
    Dir,
    DirAndRun,
    FilterFlags,
    KeyFiles,
    ReadOnly,
    default_directory,
    load_keys,
    split_target,
)
from toolcell.cli.audit_keys import keygen, keys, rotate
from toolcell.cli.audit_redact import redact
from toolcell.cli.audit_replay import replay
from toolcell.cli.audit_retention import hold, prune
from toolcell.cli.audit_search import diff, events, grep, opened, tail
from toolcell.cli.flags import with_flags
from toolcell.cli.places import check_output_file
from toolcell.cli.terminal import print_json, reporting, safe, stderr, stdout

SUMMARY = """What scripts did, provably.

DIR is the directory a Runtime was given as `audit`; left out, it is $TOOLCELL_AUDIT, or ./runs. RUN is a run's id, the
beginning of one, or `last`.
"""


def register(app: typer.Typer, name: str) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help=SUMMARY)
    for command in (
        list_runs,
        show,
        stats,
        grep,
        diff,
        tail,
        events,
        redact,
        prune,
        hold,
        check,
        export,
        replay,
        keygen,
        keys,
        rotate,
    ):
        group.command(NAMES.get(command.__name__, command.__name__))(reporting(with_flags(command)))
    app.add_typer(group, name=name)


def list_runs(
    directory: Dir = None,
    *,
    filters: FilterFlags,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="The newest so many; 0 is all.")] = 50,
    key: KeyFiles = None,
    read_only: ReadOnly = False,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest last, each with how far it can be trusted. Older ones than shown are counted."""
    wanted = filters.filter(limit)
    with opened(directory, key, read_only) as index:
        runs = index.runs(wanted)
        older = index.count(wanted) - len(runs)
        if as_json:
            print_json([run.to_dict() for run in runs])
            if older:
                stderr().print(safe(f"and {older} older runs: -n 0 lists all", "yellow"))
        else:
            audit_render.show_list(runs, stdout(), older)


def show(
    target: DirAndRun,
    *,
    full: Annotated[bool, typer.Option("--full", help="Cut nothing: the whole script, values and output.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one HTML file that needs nothing else.")
    ] = None,
    key: KeyFiles = None,
    read_only: ReadOnly = False,
    as_json: AsJson = False,
) -> None:
    """Show one run: settings, script, calls on a timeline, output and result."""
    directory, wanted = split_target(target)
    with opened(directory, key, read_only) as index:
        summary = index.find(wanted)
        run = index.load(summary)
        if html is not None:
            write_html(to_html(run, summary.trust, redactions=redactions_of(index, summary), **about(directory)), html)
        elif as_json:
            print_json(run.to_dict() | {"trust": summary.trust, "redactions": redactions_of(index, summary)})
        else:
            audit_render.show_redactions(redactions_of(index, summary), stdout())
            audit_render.show_run(run, stdout(), summary.trust, audit_render.FULL if full else audit_render.SHORT)


def stats(
    directory: Dir = None,
    *,
    filters: FilterFlags,
    key: KeyFiles = None,
    read_only: ReadOnly = False,
    as_json: AsJson = False,
) -> None:
    """Count runs by outcome, trust and day, and calls by tool with how long they took."""
    wanted = filters.filter()
    with opened(directory, key, read_only) as index:
        counted = index.stats(wanted)
        if as_json:
            print_json(counted)
        else:
            audit_render.show_stats(counted, stdout())


def check(
    target: Annotated[Path | None, typer.Argument(metavar="[DIR|RECEIPT]", help="A log or a receipt.")] = None,
    *,
    key: KeyFiles = None,
    head: Annotated[
        list[Path] | None, typer.Option("--head", metavar="FILE", help="A head that was kept elsewhere; repeatable.")
    ] = None,
    witness: Annotated[
        list[str] | None,
        typer.Option("--witness", metavar="PLACE", help="Ask this witness: file:PATH, https://..., syslog:PATH."),
    ] = None,
    write_head: Annotated[
        Path | None, typer.Option("--write-head", metavar="FILE", help="Write the heads this machine knows, to keep.")
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="A chain that is not closed is a failure, too: in use, killed or cut off."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check that a log or a receipt was not changed; exits with 5 when it was.

    Finds edits, deletions, reorderings, copies, swapped segments and wrong keys; an end that was cut off against the
    heads that this machine, --head or --witness knows. Exits with 2 when there was nothing to check, or no key to
    check it with.
    """
    path = target or default_directory()
    verifiers = load_keys(key)
    if write_head is not None:
        check_output_file("--write-head", write_head)
    if path.is_file():
        checked = receipt.check(receipt.read(path), verifiers)
        if as_json:
            print_json(checked.to_dict())
        else:
            audit_render.show_receipt_check(checked, stdout())
        raise typer.Exit(status_of(checked))
    known = [each for path in head for each in load_heads(path)] if head else None
    witnesses = [witness_of(place, path) for place in witness or ()]
    report = verify.verify(path, verifiers, heads=known, witnesses=witnesses, strict=strict)
    if as_json:
        print_json(report.to_dict())
    else:
        audit_render.show_report(report, stdout())
    status = status_of(report)
    if write_head is not None:
        try:
            write_heads(report.log, write_head)
        except BadInput as exc:
            if status == exits.OK:
                raise
            stderr().print(safe(str(exc), "red"))
    raise typer.Exit(status)


def export(
    target: DirAndRun,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: RUN.receipt.json; - is stdout.")
    ] = None,
) -> None:
    """Write a run to one file that can be verified on another machine with the key.

    With the public key alone when the log is signed with Ed25519; by default it is not, and only its writer's HMAC key
    will do.
    """
    directory, wanted = split_target(target)
    with opened(directory) as index:
        summary = index.find(wanted)
        made = receipt.export(index, summary)
    path = output or Path(receipt.file_name(summary.id))
    if path == Path("-"):
        print_json(made)
    else:
        receipt.write(made, path)
        stderr().print(safe(f"{path}: run {summary.id}, {path.stat().st_size} bytes"))
    if receipt.needs_shared_key(made):
        stderr().print(safe(SHARED_KEY, "yellow"))


def about(directory: Path) -> dict[str, Any]:
    """Say which log a page is made from, and when."""
    return {"log": f"{directory}, id {read_log_id(directory)}", "made_ns": time.time_ns()}


def write_html(page: str, path: Path) -> None:
    """Write a page.

    Raises:
        BadInput: the file cannot be written.
    """
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise BadInput(f"cannot write {path}: {exc.strerror}") from exc
    stderr().print(safe(f"{path}: {path.stat().st_size} bytes"))


def redactions_of(index: Index, summary: RunSummary) -> list[dict[str, Any]]:
    """Say who removed what of a run, and when."""
    return [
        {"at_ns": each.record.at_ns, **jsonable({name: each.record.fields[name] for name in REDACTION_FIELDS})}
        for each in index.redactions_of(summary)
    ]


REDACTION_FIELDS = ("seq", "parts", "by", "reason", "original")

SHARED_KEY = """\
note: it is signed with an HMAC key, so only those who have that key can verify it. For receipts that anyone can verify:
      pip install 'toolcell[signing]'; toolcell audit keygen sign.pem; then record with AuditLog(key="sign.pem") or
      TOOLCELL_AUDIT_KEY=sign.pem, and give away sign.pem.pub: toolcell audit verify RECEIPT --key sign.pem.pub"""

NAMES = {"list_runs": "list", "check": "verify"}
"""Function to command name, where they differ."""


def status_of(checked: receipt.ReceiptCheck | verify.Report) -> int:
    """Return the exit status of a check. A missing key is a usage error: it is no sign of a change."""
    if isinstance(checked, receipt.ReceiptCheck) and checked.is_partial:
        return exits.FAILED
    return exits.OK if checked.ok else exits.USAGE if checked.is_unchecked else exits.BROKEN


def write_heads(log: str, path: Path) -> None:
    """Write the heads of a log that are saved on this machine."""
    import json

    heads = [head.to_dict() for head in saved_heads(log)]
    if not heads:
        raise BadInput(f"this machine has no heads of log {log}, so {path} was not written; its writer saves them")
    try:
        path.write_text(json.dumps(heads, indent=1) + "\n", encoding="ascii")
    except OSError as exc:
        raise BadInput(f"cannot write {path}: {exc.strerror}") from exc
