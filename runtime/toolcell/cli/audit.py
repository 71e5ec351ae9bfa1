"""`toolcell audit`: list, show, count, verify and export what scripts did, and run them again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolcell.audit import keys, receipt, verify
from toolcell.audit.format import LOG_FILE, BadInput, read_log_id
from toolcell.audit.query import Filter, Index
from toolcell.audit.reader import UNFINISHED
from toolcell.audit.run_record import ABORTED
from toolcell.audit.signatures import load_heads, saved_heads
from toolcell.cli import audit_times, audit_view, exits
from toolcell.cli.audit_replay import replay
from toolcell.cli.output import print_json, reporting, safe, stderr, stdout
from toolcell.errors import AuditError, UsageError
from toolcell.results import Outcome

DEFAULT_DIR = "runs"
OUTCOMES = (*map(str, Outcome), ABORTED, UNFINISHED)
"""What `--outcome` may name."""

SUMMARY = """What scripts did, provably.

DIR is the directory a Runtime was given as `audit`; left out, it is $TOOLCELL_AUDIT, or ./runs. RUN is a run's id, the
beginning of one, or `last`.
"""

Dir = Annotated[Path | None, typer.Argument(metavar="[DIR]", help="The log.", show_default=False)]
DirAndRun = Annotated[list[str], typer.Argument(metavar="[DIR] RUN", help="The log and the run.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON document.")]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option("--key", "-k", metavar="FILE", help="A key to check signatures with; repeatable. Default: ours."),
]
Since = Annotated[str | None, typer.Option("--since", metavar="TIME", help="2026-11-21, 2026-11-21T14:30, 90m, 2d.")]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="The same; runs before it.")]
OutcomeName = Annotated[str | None, typer.Option("--outcome", metavar="NAME", help="ok, error, unfinished, ...")]
Tool = Annotated[str | None, typer.Option("--tool", "-t", metavar="NAME", help="Runs that called it; may be a glob.")]
Sha256 = Annotated[str | None, typer.Option("--sha256", metavar="HEX", help="The script's digest, or its beginning.")]
SessionId = Annotated[
    str | None, typer.Option("--session", metavar="ID", help="Thread, chat or channel, or the run above.")
]
User = Annotated[str | None, typer.Option("--user", metavar="ID", help="For whom it ran.")]


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
        lines = index.runs(wanted)
        if as_json:
            print_json([line.to_dict() for line in lines])
        else:
            audit_view.show_list(lines, stdout())
        warn_of_damage(index)


def show(target: DirAndRun, *, as_json: AsJson = False) -> None:
    """Show one run: script, calls on a timeline, what it printed and left behind, under what terms."""
    directory, wanted = split(target)
    with opened(directory) as index:
        run = index.load(index.find(wanted))
        if as_json:
            print_json(run.to_dict())
        else:
            audit_view.show_run(run, stdout())
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
            audit_view.show_stats(counted, stdout())
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
    """Say whether a log, or a receipt, is what was written; exits with 5 when it is not.

    Finds edits, deletions, reorderings, copies, swapped segments and wrong keys; an end that was cut off against the
    heads that this machine or --head knows. Exits with 2 when there was nothing to check, or no key to check it with.
    """
    place = target or default_directory()
    verifiers = load_keys(key)
    if place.is_file():
        verdict = receipt.check(receipt.read(place), verifiers)
        if as_json:
            print_json(verdict.to_dict())
        else:
            audit_view.show_verdict(verdict, stdout())
        raise typer.Exit(status_of(verdict))
    known = [each for path in head for each in load_heads(path)] if head else None
    report = verify.verify(place, verifiers, heads=known, strict=strict)
    if write_head is not None:
        write_heads(report.log, write_head)
    if as_json:
        print_json(report.to_dict())
    else:
        audit_view.show_report(report, stdout())
    raise typer.Exit(status_of(report))


def export(
    target: DirAndRun,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: RUN.receipt.json; - is stdout.")
    ] = None,
) -> None:
    """Write a run to one file that proves itself on another machine, to whoever has the key.

    With the public key alone when the log is signed with Ed25519; by default it is not, and only its writer's HMAC key
    will do.
    """
    directory, wanted = split(target)
    with opened(directory) as index:
        line = index.find(wanted)
        made = receipt.export(index, line)
    path = output or Path(f"{line.id}.receipt.json")
    if path == Path("-"):
        print_json(made)
    else:
        receipt.write(made, path)
        stderr().print(safe(f"{path}: run {line.id}, {path.stat().st_size} bytes"))
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
"""Commands whose function has another name."""


def default_directory() -> Path:
    """$TOOLCELL_AUDIT, or ./runs.

    Raises:
        UsageError: there is no log.
    """
    place = Path(os.environ.get("TOOLCELL_AUDIT") or DEFAULT_DIR)
    try:
        read_log_id(place)
    except BadInput as exc:
        raise UsageError(f"{exc}; name the log's directory (to `verify`, or a receipt) or set $TOOLCELL_AUDIT") from exc
    return place


def load_keys(files: list[Path] | None) -> list[keys.Verifier]:
    """The keys to check signatures with: those named, or ours.

    Raises:
        UsageError: one cannot be read, or is none.
    """
    try:
        return [keys.load_verifier(path) for path in files or [keys.default_key_path()]]
    except AuditError as exc:
        hint = "" if files else "; name the key to check signatures with: --key FILE"
        raise UsageError(f"{exc}{hint}") from exc


def status_of(checked: receipt.ReceiptCheck | verify.Report) -> int:
    """The exit status of what a check came to: want of a key is no sign of a change."""
    return exits.OK if checked.ok else exits.USAGE if checked.is_unchecked else exits.BROKEN


def split(target: list[str]) -> tuple[Path, str]:
    """Read `DIR RUN`, or `RUN` alone.

    Raises:
        UsageError: it is neither, or what is there alone is no run but a log or a file.
    """
    if len(target) > 2:
        raise UsageError(f"expected a log and a run, not {' '.join(target)}")
    if len(target) == 1 and (target[0].endswith("/") or os.path.exists(os.path.join(target[0], LOG_FILE))):
        why = f"`toolcell audit list {target[0]}` shows its runs, and `last` is the newest"
        raise UsageError(f"RUN is missing: {target[0]} is taken for the log, which comes before RUN; {why}")
    if len(target) == 1 and target[0].endswith(".json") and os.path.isfile(target[0]):
        raise UsageError(f"{target[0]} is a file and no RUN; `toolcell audit verify {target[0]}` checks a receipt")
    return (Path(target[0]) if len(target) == 2 else default_directory()), target[-1]


def opened(directory: Path | None) -> Index:
    """The index of a log, as new as the log."""
    index = Index(directory or default_directory())
    if sys.stderr.isatty():
        with stderr().status("reading the log"):
            index.refresh()
    else:
        index.refresh()
    return index


def warn_of_damage(index: Index) -> None:
    """Say that something could not be read, beside what could."""
    if index.damage.pieces:
        text = f"{index.damage.pieces} damaged records were passed over; `toolcell audit verify {index.directory}`"
        stderr().print(safe(text, "bold red"))


def write_heads(log: str, path: Path) -> None:
    """Write what this machine knows of how far a log has got."""
    import json

    try:
        heads = [head.to_dict() for head in saved_heads(log)]
        path.write_text(json.dumps(heads, indent=1) + "\n", encoding="ascii")
    except OSError as exc:
        raise BadInput(f"cannot write {path}: {exc.strerror}") from exc


def make_filter(
    since: str | None,
    until: str | None,
    outcome: str | None,
    tool: str | None,
    sha256: str | None,
    session: str | None,
    user: str | None,
    limit: int,
) -> Filter:
    """The filter that the flags describe.

    Raises:
        UsageError: a flag says nothing that could be meant.
    """
    if outcome is not None and outcome not in OUTCOMES:
        raise UsageError(f"--outcome {outcome!r}: want one of {', '.join(OUTCOMES)}")
    return Filter(
        since_ns=audit_times.parse(since) if since else None,
        until_ns=audit_times.parse(until) if until else None,
        outcome=outcome,
        tool=tool,
        sha256=sha256,
        session=session,
        user=user,
        limit=limit or None,
    )
