"""`toolcell audit keygen`, `keys` and `rotate`: make signing keys, say what each signed, and replace one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from toolcell.audit import key_ranges
from toolcell.audit import keys as signing
from toolcell.cli import audit_render, exits
from toolcell.cli.audit_arguments import AsJson, Dir, KeyFiles, default_directory, known_keys
from toolcell.cli.terminal import print_json, safe, stderr, stdout
from toolcell.errors import UsageError
from toolcell.support.text import one_line

STYLES = {key_ranges.VALID: "green", key_ranges.UNKNOWN: "yellow", key_ranges.UNSIGNED: "yellow"}


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the private key.")],
    *,
    hmac: Annotated[bool, typer.Option("--hmac", help="A shared secret instead of a pair of signing.")] = False,
) -> None:
    """Make a key to sign with: an Ed25519 pair, FILE and FILE.pub. Files are never overwritten."""
    try:
        if hmac:
            signer: Any = signing.HmacKey.generate()
            signing.save_private(file, signer.to_text())
        else:
            signer = signing.Ed25519Signer.generate()
            signing.save_private(file, signer.private_text())
            signing.save_private(public := file.with_name(f"{file.name}.pub"), signer.to_text())
            public.chmod(0o644)
    except FileExistsError as exc:
        raise UsageError(f"{exc.filename2 or file} exists; keys are never overwritten") from exc
    stderr().print(safe(f"{file}: {signer.algorithm} key {signer.key_id}"))


def keys(directory: Dir = None, *, key: KeyFiles = None, as_json: AsJson = False) -> None:
    """Show which key signed which records of each chain, and when. Exits with 5 if a signature is forged.

    Keys that `rotate` replaced are found beside ours.
    """
    found = key_ranges.key_ranges(directory or default_directory(), known_keys(key))
    if as_json:
        print_json([each.to_dict() for each in found])
    else:
        show(found)
    raise typer.Exit(exits.BROKEN if any(each.state == key_ranges.FORGED for each in found) else exits.OK)


def show(found: list[key_ranges.KeyRange]) -> None:
    """Write one line per range."""
    console = stdout()
    for each in found:
        what = f"{each.signatures} signatures" if each.key else "no signature"
        times = " to ".join(audit_render.show_time(at_ns) for at_ns in (each.first_ns, each.last_ns))
        key = one_line(f"{each.key} {each.algorithm}", 40)
        console.print(
            Text.assemble(
                f"{each.chain}  ", safe(f"{key:<28}  ", "cyan"),
                (f"{each.state:<8}  ", STYLES.get(each.state, "bold red")),
                f"records {each.first} to {each.last}, {what}, {times}",
            )
        )  # fmt: skip
        if each.successor:
            console.print(safe(f"              the next key is {one_line(each.successor, 40)}", "dim"))


def rotate(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR]...", help="Logs that are to say so.", show_default=False)
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--key", "-k", metavar="FILE", help="The signing key to replace. Default: ours.")
    ] = None,
    algorithm: Annotated[
        Literal["hmac-sha256", "ed25519"] | None, typer.Option("--algorithm", help="Of the new key. Default: the same.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replace the signing key. In each log, a record signed with the old key names the new one.

    The old key is kept as FILE.ID, to verify with. Programs that write a log now go on with the old key until they open
    it again.
    """
    path = file or signing.default_key_path()
    old, new = key_ranges.rotate(path, directories or [default_directory()], algorithm or "")
    if as_json:
        print_json({"file": str(path), "old": old.key_id, "new": new.key_id, "algorithm": new.algorithm})
    else:
        kept = key_ranges.retired_key_path(path, old.key_id)
        stderr().print(safe(f"{path}: {new.algorithm} key {new.key_id}; {kept}: the old one, to verify with"))
