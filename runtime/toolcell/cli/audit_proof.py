"""`toolcell audit verify`, `export`, `prune`, `keygen`, `keys` and `rotate`: what proves a log, and its keys."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from toolcell.audit import (
    AuditLog,
    Ed25519Signer,
    Head,
    HmacKey,
    RecordConfig,
    Report,
    key_ranges,
    load_verifiers,
    receipt,
    removals,
    verify,
)
from toolcell.cli import audit_terminal, exits
from toolcell.cli.audit_terminal import (
    Dir,
    DirAndRun,
    KeyFiles,
    check_signer,
    known_keys,
    load_keys,
    opened,
    record_of,
    split_target,
    write_output,
)
from toolcell.cli.flags import AsJson
from toolcell.cli.places import check_output_file
from toolcell.cli.terminal import output, print_json, safe, stderr, stdout
from toolcell.errors import BadInput, UsageError
from toolcell.support.text import one_line
from toolcell.support.times import parse_time

SHARED_KEY = """\
note: it is signed with an HMAC key, so only those who have that key can verify it. For receipts that anyone can verify:
      pip install 'toolcell[audit]'; toolcell audit keygen sign.pem; then record with AuditLog(key="sign.pem") or
      TOOLCELL_AUDIT_KEY=sign.pem, and give away sign.pem.pub: toolcell audit verify RECEIPT --key sign.pem.pub"""


def check(
    target: Annotated[str | None, typer.Argument(metavar="[FILE|RECEIPT]", help="A record or a receipt.")] = None,
    *,
    key: KeyFiles = None,
    head: Annotated[
        list[Path] | None, typer.Option("--head", metavar="FILE", help="A head that was kept elsewhere; repeatable.")
    ] = None,
    write_head: Annotated[
        Path | None, typer.Option("--write-head", metavar="FILE", help="Write the heads that this machine knows.")
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Fail also for a chain that is not closed: in use, killed or cut off."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check that a record or a receipt was not changed. Exits with 5 if it was.

    Finds edits, deletions, reorderings, copies, forged prunes and wrong keys; an end that was cut off against the
    heads that this machine or --head knows. Exits with 2 when there was nothing to check, or no key to
    check it with.
    """
    path = record_of(target)
    verifiers = load_keys(key)
    if write_head is not None:
        check_output_file("--write-head", write_head)
    if path.file is not None and receipt.is_one(path.file):
        checked = receipt.check(receipt.read(path.file), verifiers)
        output(checked.to_dict(), as_json, lambda: audit_terminal.show_receipt_check(checked, stdout()))
        raise typer.Exit(status_of(checked))
    known = [each for path in head for each in Head.load(path)] if head else None
    report = verify(path, verifiers, heads=known, strict=strict)
    output(report.to_dict(), as_json, lambda: audit_terminal.show_report(report, stdout()))
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
    target: DirAndRun = [],  # noqa: B006 - Typer's default
    *,
    whole: Annotated[
        bool,
        typer.Option(
            "--all", help="The whole record, as one of its own, also while it is written; with -o and without RUN."
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: RUN.receipt.json; - is stdout.")
    ] = None,
) -> None:
    """Write a run to one file that can be verified on another machine with the key.

    If the log is signed with Ed25519, the public key is enough; by default it is signed with an HMAC key, which is
    needed to verify.
    """
    if whole:
        if output is None or len(target) > 1:
            raise UsageError("`toolcell audit export [FILE] --all -o COPY` copies a whole record: it takes no RUN")
        with opened(target[0] if target else None) as index:
            index.copy_to(output)
        return
    directory, wanted = split_target(target)
    with opened(directory) as index:
        summary = index.find(wanted)
        made = receipt.export(index, summary)
    path = output or Path(receipt.file_name(summary.id))
    if path == Path("-"):
        print_json(made)
    else:
        write_output(path, [json.dumps(made, indent=1), "\n"])
        stderr().print(safe(f"{path}: run {summary.id}, {path.stat().st_size} bytes"))
    if receipt.needs_shared_key(made):
        stderr().print(safe(SHARED_KEY, "yellow"))


def status_of(checked: receipt.ReceiptCheck | Report) -> int:
    """Return the exit status of a check. A missing key is a usage error: it is not a sign of a change."""
    if isinstance(checked, receipt.ReceiptCheck) and checked.is_partial:
        return exits.FAILED
    return exits.OK if checked.ok else exits.USAGE if checked.is_unchecked else exits.BROKEN


def write_heads(log: str, path: Path) -> None:
    """Write the heads of a record that are saved on this machine."""
    heads = [head.to_dict() for head in Head.saved(log)]
    if not heads:
        raise BadInput(f"this machine has no heads of record {log}, so {path} was not written; its writer saves them")
    write_output(path, [json.dumps(heads, indent=1), "\n"])


SignWith = Annotated[
    Path | None,
    typer.Option("--sign", metavar="FILE", help="The key to sign the record with. Default: the log's usual key."),
]


def prune(
    directory: Dir = None,
    *,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Remove runs older than 90m, 30d or a date.")
    ] = None,
    keep_bytes: Annotated[
        int | None, typer.Option("--keep-bytes", metavar="N", min=0, help="Keep at most this many bytes.")
    ] = None,
    record_config: Annotated[
        Path | None, typer.Option("--record-config", metavar="FILE", help="Take keep_s, keep_bytes and key from it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    sign_with: SignWith = None,
    key: KeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """Remove old runs, and say what stays and why. A signed checkpoint stands for what was removed.

    Runs that are under way stay, and so do chains that do not verify.
    """
    given = RecordConfig.from_toml(record_config) if record_config is not None else RecordConfig()
    keep_bytes = given.keep_bytes if keep_bytes is None else keep_bytes
    if older_than is None and given.keep_s is None and keep_bytes is None:
        raise UsageError("say what is to go: --older-than 90d, --keep-bytes N, or --record-config with one of them")
    path = record_of(directory)
    keep_s = max(1e-9, time.time() - parse_time(older_than) / 1e9) if older_than is not None else given.keep_s
    config = RecordConfig(keep_s=keep_s, keep_bytes=keep_bytes, fsync="always")
    signing = sign_with or given.key
    if signing is not None:
        check_signer(signing)
    keys = known_keys(key)
    if dry_run:
        found = removals(path, config, [*keys, *load_verifiers(signing, is_needed=False)])
    else:
        path.id()
        with AuditLog(path, key=signing, config=config) as log:
            found = [each for each in log.prune(keys) if each.chain != log.chain or each.count]
    if as_json:
        print_json([each.to_dict() for each in found])
        return
    for each in found:
        if each.count:
            at = datetime.fromtimestamp(each.newest_ns / 1e9).astimezone().isoformat(" ", "seconds")
            stdout().print(safe(f"chain {each.chain}: {each.count} events, up to {at} ({each.reason})"))
        else:
            stdout().print(safe(f"chain {each.chain} stays: {one_line(each.reason, 200)}", "dim"))
    total = sum(each.count for each in found)
    stderr().print(safe(f"{total} events {'would be' if dry_run else 'were'} removed"))


STYLES = {key_ranges.VALID: "green", key_ranges.UNKNOWN: "yellow", key_ranges.UNSIGNED: "yellow"}


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the private key.")],
    *,
    hmac: Annotated[bool, typer.Option("--hmac", help="A shared secret instead of a pair of ")] = False,
) -> None:
    """Create a signing key: an Ed25519 pair, FILE and FILE.pub. Existing files are not overwritten."""
    signer = HmacKey.generate() if hmac else Ed25519Signer.generate()
    try:
        signer.save(file)
    except FileExistsError as exc:
        raise UsageError(f"{exc.filename2 or file} exists; keys are never overwritten") from exc
    stderr().print(safe(f"{file}: {signer.algorithm} key {signer.key_id}"))


def keys(directory: Dir = None, *, key: KeyFiles = None, as_json: AsJson = False) -> None:
    """Show which key signed which events of each chain, and when. Exits with 5 if a signature is forged.

    Keys that `rotate` replaced are found beside ours.
    """
    found = key_ranges.key_ranges(record_of(directory), known_keys(key))
    output([asdict(each) for each in found], as_json, lambda: show_ranges(found))
    raise typer.Exit(exits.BROKEN if any(each.state == key_ranges.FORGED for each in found) else exits.OK)


def show_ranges(found: list[key_ranges.KeyRange]) -> None:
    console = stdout()
    for each in found:
        what = f"{each.signatures} signatures" if each.key else "no signature"
        times = " to ".join(audit_terminal.show_time(at_ns) for at_ns in (each.first_ns, each.last_ns))
        key = one_line(f"{each.key} {each.algorithm}", 40)
        console.print(
            Text.assemble(
                f"{each.chain}  ",
                safe(f"{key:<28}  ", "cyan"),
                (f"{each.state:<8}  ", STYLES.get(each.state, "bold red")),
                f"up to event {each.last}, {what}, {times}",
            )
        )
        if each.successor:
            console.print(safe(f"              the next key is {one_line(each.successor, 40)}", "dim"))


def rotate(
    directories: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="Records that get to know the new key.", show_default=False),
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option("--key", "-k", metavar="FILE", help="The signing key to replace. Default: the log's usual key."),
    ] = None,
    algorithm: Annotated[
        Literal["hmac-sha256", "ed25519"] | None,
        typer.Option("--algorithm", help="Algorithm of the new key. Default: the same."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replace the signing key. In each record, an event signed with the old key names the new one.

    The old key is kept as FILE.ID, to verify with. Programs that have a record open use the old key until they open it
    again.
    """
    path, old, new = key_ranges.rotate(file, directories or [record_of()], algorithm or "")
    said = safe(f"{path}: {new.algorithm} key {new.key_id}; {path}.{old.key_id}: the old one, to verify with")
    made = {"file": str(path), "old": old.key_id, "new": new.key_id, "algorithm": new.algorithm}
    output(made, as_json, lambda: stderr().print(said))
