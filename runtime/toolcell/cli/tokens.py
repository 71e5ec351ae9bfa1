"""`toolcell tokens`: make, list, rotate and revoke the tokens with which callers of the service say who they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from toolcell.cli.flags import AsJson, group
from toolcell.cli.terminal import output, print_json, safe, stderr, stdout, table
from toolcell.errors import UsageError
from toolcell.service.config import ServiceConfig
from toolcell.service.principal import Scope
from toolcell.service.tokens import IssuedToken, TokenDatabase, TokenRecord
from toolcell.support.times import seconds_of

SUMMARY = "Tokens that identify callers of `toolcell serve --tokens FILE`."

File = Annotated[
    Path, typer.Option("--tokens", "-f", metavar="FILE", envvar="TOOLCELL_TOKENS", help="The store: an SQLite file.")
]
Id = Annotated[
    str, typer.Argument(metavar="ID", help="The token's id, as in `tokens list`: the part between the two `_`.")
]


def create(
    tenant: Annotated[
        str, typer.Argument(metavar="TENANT", help="The tenant whose runs, sessions and files it gives access to.")
    ],
    *,
    tokens: File,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="Settings of the service: is it a tenant of theirs?"),
    ] = None,
    scope: Annotated[list[Scope] | None, typer.Option("--scope", "-s", help="May be given more than once.")] = None,
    name: Annotated[str, typer.Option("--name", "-n", help="Who or what uses it; quotas and logs show it.")] = "",
    expires: Annotated[str, typer.Option("--expires", metavar="TIME", help="90d, 12h, 30m, 45s, or never.")] = "90d",
    as_json: AsJson = False,
) -> None:
    """Create a token and print it. It cannot be shown again. Without --scope it may execute and read."""
    with _opened(tokens) as store:
        scopes = scope or [Scope.EXECUTE, Scope.READ]
        issued = store.create(tenant, scopes, name=name, lifetime_s=None if expires == "never" else seconds(expires))
    if config is not None and (unknown := ServiceConfig.from_toml(config).unlisted([tenant])):
        stderr().print(safe(f"warning: {unknown} (settings: {config})", "yellow"))
    _show_issued(issued, as_json)


def show_list(
    tenant: Annotated[str | None, typer.Argument(metavar="TENANT", help="Only those of this tenant.")] = None,
    *,
    tokens: File,
    as_json: AsJson = False,
) -> None:
    """List the tokens with tenant, scopes, expiry and last use."""
    with _opened(tokens, must_exist=True) as store:
        records, now = store.list(tenant), store.now()
    if as_json:
        print_json([_to_dict(each, now) for each in records])
        return
    if not records:
        stderr().print("no tokens")
        return
    headings = ("id", "tenant", "name", "scopes", "state", "expires (UTC)", "last used (UTC)")
    shown = table(*headings, no_wrap=("id", "state"))
    for each in records:
        texts = (each.id, each.tenant, each.name, " ".join(sorted(each.scopes)), each.state(now))
        shown.add_row(*map(safe, (*texts, _moment(each.expires_at) or "never", _moment(each.last_used_at) or "never")))
    stdout().print(shown)


def revoke(token_id: Id, *, tokens: File, as_json: AsJson = False) -> None:
    """Revoke a token now. Running services refuse it from its next request on."""
    with _opened(tokens, must_exist=True) as store:
        record = store.revoke(token_id)
    said = safe(f"token {record.id} of {record.tenant} is revoked")
    output(_to_dict(record, time.time()), as_json, lambda: stderr().print(said))


def rotate(
    token_id: Id,
    *,
    tokens: File,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="TIME", help="How long the old token stays valid: 24h, 30m, 0s.")
    ] = "24h",
    as_json: AsJson = False,
) -> None:
    """Replace a token and print the new one, with the same tenant, name, scopes and lifetime."""
    with _opened(tokens, must_exist=True) as store:
        issued = store.rotate(token_id, overlap_s=seconds(overlap))
    _show_issued(issued, as_json)


def seconds(text: str) -> float:
    """Return a length of time.

    Raises:
        UsageError: it is none.
    """
    if (length_s := seconds_of(text)) is None:
        raise UsageError(f"{text!r:.40} is not a length of time; write a number and s, m, h, d or w, such as 90d")
    return length_s


@contextmanager
def _opened(path: Path, *, must_exist: bool = False) -> Iterator[TokenDatabase]:
    if must_exist and not path.exists():
        raise UsageError(f"there is no store {path}; `toolcell tokens create` makes it")
    store = TokenDatabase(path)
    try:
        yield store
    finally:
        store.close()


def _show_issued(issued: IssuedToken, as_json: bool) -> None:
    """Write the token alone to stdout, so that a script can take it from there."""
    record = issued.record
    if as_json:
        print_json(_to_dict(record, time.time()) | {"token": issued.text})
        return
    until = f"until {_moment(record.expires_at)} UTC" if record.expires_at is not None else "for ever"
    scopes = " ".join(sorted(record.scopes))
    stderr().print(safe(f"token {record.id} of {record.tenant}: {scopes}; {until}. It is not shown again:"))
    typer.echo(issued.text)


def _to_dict(record: TokenRecord, now: float) -> dict[str, object]:
    times = {name: getattr(record, name) for name in ("created_at", "expires_at", "last_used_at", "revoked_at")}
    return {
        "id": record.id,
        "tenant": record.tenant,
        "name": record.name,
        "scopes": sorted(record.scopes),
        "state": record.state(now),
        **times,
        "replaced_by": record.replaced_by,
    }


def _moment(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


register = group(SUMMARY, {"create": create, "list": show_list, "revoke": revoke, "rotate": rotate})
