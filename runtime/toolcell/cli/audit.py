"""`toolcell audit`: list, show, count, verify and export what scripts did, and run them again."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from toolcell.audit import keys, receipt, verify
from toolcell.audit.index import Filter, Index
from toolcell.cli import audit_times, audit_view, exits
from toolcell.cli.audit_replay import replay
from toolcell.cli.output import print_json, reporting, safe, stderr, stdout
from toolcell.errors import AuditError, UsageError

DEFAULT_DIR = "runs"
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
    limit: Annotated[int, typer.Option("--limit", "-n", help="The newest so many; 0 is all.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest last."""
    wanted = make_filter(since, until, outcome, tool, sha256, session, user, limit)
    with opened(directory) as index:
        lines = index.runs(wanted)
        if as_json:
            print_json([asdict(line) for line in lines])
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
    strict: Annotated[bool, typer.Option("--strict", help="An end that is not signed is a failure, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether a log, or a receipt, is what was written; exits with 5 when it is not.

    Finds edits, deletions, reorderings, copies, swapped segments and wrong keys; an end that was cut off against the
    heads that this machine or --head knows.
    """
    place = target or default_directory()
    verifiers = [keys.load_verifier(path) for path in key or [keys.default_key_path()]]
    if place.is_file():
        verdict = receipt.check(receipt.read(place), verifiers)
        if as_json:
            print_json(verdict.to_dict())
        else:
            audit_view.show_verdict(verdict, stdout())
        raise typer.Exit(exits.OK if verdict.ok else exits.BROKEN)
    known = [each for path in head for each in verify.load_heads(path)] if head else None
    report = verify.verify(place, verifiers, heads=known)
    if write_head is not None:
        write_heads(report.log, write_head)
    if as_json:
        print_json(report.to_dict())
    else:
        audit_view.show_report(report, stdout())
    is_sealed = all(chain.is_closed for chain in report.chains)
    raise typer.Exit(exits.OK if report.ok and (is_sealed or not strict) else exits.BROKEN)


def export(
    target: DirAndRun,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: RUN.receipt.json; - is stdout.")
    ] = None,
) -> None:
    """Write a run to one file that proves itself on another machine, with the public key alone."""
    directory, wanted = split(target)
    with opened(directory) as index:
        line = index.find(wanted)
        made = receipt.export(index, line)
    if output == Path("-"):
        print_json(made)
        return
    path = output or Path(f"{line.id}.receipt.json")
    receipt.write(made, path)
    stderr().print(safe(f"{path}: run {line.id}, {path.stat().st_size} bytes"))


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


NAMES = {"list_runs": "list", "check": "verify"}
"""Commands whose function has another name."""


def default_directory() -> Path:
    """$TOOLCELL_AUDIT, or ./runs."""
    return Path(os.environ.get("TOOLCELL_AUDIT") or DEFAULT_DIR)


def split(target: list[str]) -> tuple[Path, str]:
    """Read `DIR RUN`, or `RUN` alone."""
    if len(target) > 2:
        raise UsageError(f"expected a log and a run, not {' '.join(target)}")
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
        heads = [head.to_dict() for head in verify.saved_heads(log)]
        path.write_text(json.dumps(heads, indent=1) + "\n", encoding="ascii")
    except OSError as exc:
        raise AuditError(f"cannot write {path}: {exc.strerror}") from exc


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
    """The filter that the flags describe."""
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
