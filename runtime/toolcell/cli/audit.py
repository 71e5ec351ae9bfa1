"""`toolcell audit`: list, show, count, verify and export what scripts did, and run them again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolcell.audit import keys, receipt, verify
from toolcell.audit.format import BadInput
from toolcell.audit.query import Index
from toolcell.audit.signatures import load_heads, saved_heads
from toolcell.cli import audit_render, exits
from toolcell.cli.audit_arguments import (
    AsJson,
    Dir,
    DirAndRun,
    KeyFiles,
    OutcomeName,
    SessionId,
    Sha256,
    Since,
    Tool,
    Until,
    User,
    default_directory,
    load_keys,
    make_filter,
    split_target,
)
from toolcell.cli.audit_replay import replay
from toolcell.cli.render import print_json, reporting, safe, stderr, stdout
from toolcell.errors import UsageError

SUMMARY = """What scripts did, provably.

DIR is the directory a Runtime was given as `audit`; left out, it is $TOOLCELL_AUDIT, or ./runs. RUN is a run's id, the
beginning of one, or `last`.
"""


def register(app: typer.Typer, name: str) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help=SUMMARY)
    for command in (list_runs, show, stats, check, export, replay, keygen):
        group.command(NAMES.get(command.__name__, command.__name__))(reporting(command))
    app.add_typer(group, name=name)


def list_runs(
    directory: Dir = None,
    *,
    since: Since = None,
    until: Until = None,
    outcome: OutcomeName = None,
    tool: Tool = None,
    sha256: Sha256 = None,
    session: SessionId = None,
    user: User = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="The newest so many; 0 is all.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest last."""
    wanted = make_filter(since, until, outcome, tool, sha256, session, user, limit)
    with opened(directory) as index:
        runs = index.runs(wanted)
        if as_json:
            print_json([run.to_dict() for run in runs])
        else:
            audit_render.show_list(runs, stdout())
        warn_of_damage(index)


def show(target: DirAndRun, *, as_json: AsJson = False) -> None:
    """Show one run: settings, script, calls on a timeline, output and result."""
    directory, wanted = split_target(target)
    with opened(directory) as index:
        run = index.load(index.find(wanted))
        if as_json:
            print_json(run.to_dict())
        else:
            audit_render.show_run(run, stdout())
        warn_of_damage(index)


def stats(
    directory: Dir = None,
    *,
    since: Since = None,
    until: Until = None,
    outcome: OutcomeName = None,
    tool: Tool = None,
    sha256: Sha256 = None,
    session: SessionId = None,
    user: User = None,
    as_json: AsJson = False,
) -> None:
    """Count runs by outcome and day, and calls by tool with how long they took."""
    wanted = make_filter(since, until, outcome, tool, sha256, session, user, 0)
    with opened(directory) as index:
        counted = index.stats(wanted)
        if as_json:
            print_json(counted)
        else:
            audit_render.show_stats(counted, stdout())
        warn_of_damage(index)


def check(
    target: Annotated[Path | None, typer.Argument(metavar="[DIR|RECEIPT]", help="A log or a receipt.")] = None,
    *,
    key: KeyFiles = None,
    head: Annotated[
        list[Path] | None, typer.Option("--head", metavar="FILE", help="A head that was kept elsewhere; repeatable.")
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
    heads that this machine or --head knows. Exits with 2 when there was nothing to check, or no key to check it with.
    """
    path = target or default_directory()
    verifiers = load_keys(key)
    if path.is_file():
        checked = receipt.check(receipt.read(path), verifiers)
        if as_json:
            print_json(checked.to_dict())
        else:
            audit_render.show_receipt_check(checked, stdout())
        raise typer.Exit(status_of(checked))
    known = [each for path in head for each in load_heads(path)] if head else None
    report = verify.verify(path, verifiers, heads=known, strict=strict)
    if write_head is not None:
        write_heads(report.log, write_head)
    if as_json:
        print_json(report.to_dict())
    else:
        audit_render.show_report(report, stdout())
    raise typer.Exit(status_of(report))


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
    path = output or Path(f"{summary.id}.receipt.json")
    if path == Path("-"):
        print_json(made)
    else:
        receipt.write(made, path)
        stderr().print(safe(f"{path}: run {summary.id}, {path.stat().st_size} bytes"))
    if receipt.needs_shared_key(made):
        stderr().print(safe(SHARED_KEY, "yellow"))


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the private key.")],
    *,
    hmac: Annotated[bool, typer.Option("--hmac", help="A shared secret instead of a pair of keys.")] = False,
) -> None:
    """Make a key to sign with: an Ed25519 pair, FILE and FILE.pub. Files are never overwritten."""
    try:
        if hmac:
            signer: Any = keys.HmacKey.generate()
            keys.save_private(file, signer.to_text())
        else:
            signer = keys.Ed25519Signer.generate()
            keys.save_private(file, signer.private_text())
            keys.save_private(public := file.with_name(f"{file.name}.pub"), signer.to_text())
            public.chmod(0o644)
    except FileExistsError as exc:
        raise UsageError(f"{exc.filename2 or file} exists; keys are never overwritten") from exc
    stderr().print(safe(f"{file}: {signer.algorithm} key {signer.key_id}"))


SHARED_KEY = """\
note: it is signed with an HMAC key, so only those who have that key can verify it. For receipts that anyone can verify:
      pip install 'toolcell[signing]'; toolcell audit keygen sign.pem; then record with AuditLog(key="sign.pem") or
      TOOLCELL_AUDIT_KEY=sign.pem, and give away sign.pem.pub: toolcell audit verify RECEIPT --key sign.pem.pub"""

NAMES = {"list_runs": "list", "check": "verify"}
"""Function to command name, where they differ."""


def status_of(checked: receipt.ReceiptCheck | verify.Report) -> int:
    """Return the exit status of a check. A missing key is a usage error: it is no sign of a change."""
    return exits.OK if checked.ok else exits.USAGE if checked.is_unchecked else exits.BROKEN


def opened(directory: Path | None) -> Index:
    """Open the index of a log and bring it up to date."""
    index = Index(directory or default_directory())
    if sys.stderr.isatty():
        with stderr().status("reading the log"):
            index.refresh()
    else:
        index.refresh()
    return index


def warn_of_damage(index: Index) -> None:
    """Warn when some records could not be read."""
    if index.damage.pieces:
        text = f"{index.damage.pieces} damaged records were passed over; `toolcell audit verify {index.directory}`"
        stderr().print(safe(text, "bold red"))


def write_heads(log: str, path: Path) -> None:
    """Write the heads of a log that are saved on this machine."""
    import json

    try:
        heads = [head.to_dict() for head in saved_heads(log)]
        path.write_text(json.dumps(heads, indent=1) + "\n", encoding="ascii")
    except OSError as exc:
        raise BadInput(f"cannot write {path}: {exc.strerror}") from exc
