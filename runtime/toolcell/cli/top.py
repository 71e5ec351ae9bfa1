"""`toolcell top`: what a service does now: runs, sandboxes, calls per second, each line a tenant."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from toolcell.cli.arguments import read_token
from toolcell.cli.flags import command
from toolcell.cli.terminal import output, safe, stdout
from toolcell.errors import UsageError

TOKEN: Final = "TOOLCELL_TOKEN"
TIMEOUT_S: Final = 10.0
MAX_BYTES: Final = 16_000_000
"""Most bytes of one answer of a service."""

NOW: Final = {
    "running": "toolcell_requests_running",
    "waiting": "toolcell_requests_waiting",
    "idle": "toolcell_sandboxes_idle",
    "busy": "toolcell_sandboxes_busy",
    "starting": "toolcell_sandboxes_starting",
    "sessions": "toolcell_sessions_open",
}
"""Column to gauge."""

RATES: Final = {"runs": "toolcell_runs_total", "calls": "toolcell_calls_total", "cpu_s": "toolcell_cpu_seconds_total"}
"""Column to counter, shown as its growth a second."""


@dataclass(slots=True)
class Reading:
    """The metrics of a service at one moment."""

    at: float
    """Seconds of a clock that does not jump."""
    sums: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """(tenant, sample) to the sum over the other labels."""
    outcomes: dict[tuple[str, str], float] = field(default_factory=dict)
    """(tenant, outcome) to the number of runs."""

    @property
    def tenants(self) -> list[str]:
        """The tenants that have any metric."""
        return sorted({tenant for tenant, _ in self.sums})


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the service.")] = "http://127.0.0.1:8700",
    *,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help=f"File with the token. Default: ${TOKEN}.")
    ] = None,
    interval_s: Annotated[float, typer.Option("--interval-s", metavar="SECONDS", min=0.1, max=3600)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, after one interval.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write it once, as JSON.")] = False,
) -> None:
    """Show what a service does, until Ctrl-C. A token with the scope read shows its tenant, with operator all."""
    source = Source(url, read_token(token_file, TOKEN))
    earlier = source.read()
    if once or as_json or not stdout().is_terminal:
        time.sleep(interval_s)
        rows = state(earlier, source.read())
        output({"url": source.url, "tenants": rows}, as_json, lambda: stdout().print(picture(source.url, rows)))
        return
    with Live(picture(source.url, state(earlier, earlier)), console=stdout(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = source.read()
            except UsageError as exc:  # it may come back
                live.update(Group(safe(str(exc), "red"), safe("Ctrl+C ends", "dim")), refresh=True)
                continue
            live.update(picture(source.url, state(earlier, now)), refresh=True)
            earlier = now


class Source:
    """The metrics of one service."""

    def __init__(self, url: str, token: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"the URL of a service begins with http:// or https://, and this is {url!r:.120}")
        if token and not (token.isascii() and token.isprintable()):
            raise UsageError("the token has characters that no token has")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def read(self) -> Reading:
        """Ask for the metrics.

        Raises:
            UsageError: the service does not answer, or not with metrics.
        """
        import httpx

        try:
            with httpx.stream("GET", f"{self.url}/metrics", headers=self._headers, timeout=TIMEOUT_S) as response:
                body = _bounded(response)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
            problem = str(exc) or type(exc).__name__
            raise UsageError(
                f"{self.url} does not answer: {problem}; does `toolcell serve` run there, and print this URL?"
            ) from exc
        if response.status_code in (401, 403):
            raise UsageError(f"{self.url} wants a token with the scope read: set ${TOKEN} or pass --token-file FILE")
        if response.status_code != 200:
            raise UsageError(f"{self.url}/metrics answers {response.status_code}: is this the URL of `toolcell serve`?")
        return reading_of(body, time.monotonic())


def _bounded(response: Any) -> str:
    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > MAX_BYTES:
            raise ValueError(f"its answer is longer than {MAX_BYTES} bytes")
    return body.decode()


def reading_of(text: str, at: float) -> Reading:
    """Return the samples of a service in Prometheus's text format.

    Raises:
        UsageError: it is not that format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found = Reading(at)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    raise ValueError(f"{sample.name:.80} is {sample.value}")
                if (tenant := sample.labels.get("tenant")) is None:  # of the host
                    continue
                found.sums[tenant, sample.name] += sample.value
                if sample.name == RATES["runs"]:
                    found.outcomes[tenant, sample.labels.get("outcome", "")] = sample.value
    except (ValueError, KeyError, IndexError) as exc:
        raise UsageError(f"the answer is not metrics: {str(exc)[:200]}") from exc
    return found


def state(before: Reading, now: Reading) -> list[dict[str, Any]]:
    """Return a row for each tenant: what it has now, and what it did a second since the earlier reading."""
    past_s = now.at - before.at
    rows: list[dict[str, Any]] = []
    for tenant in now.tenants:
        row: dict[str, Any] = {"tenant": tenant}
        row |= {column: int(now.sums.get((tenant, name), 0)) for column, name in NOW.items()}
        for column, name in RATES.items():
            grown = now.sums.get((tenant, name), 0) - before.sums.get((tenant, name), 0)
            row[f"{column}_per_s"] = max(0.0, grown) / past_s if past_s > 0 else 0.0  # a service begins at 0 again
        row["outcomes"] = {name: int(number) for (whose, name), number in now.outcomes.items() if whose == tenant}
        rows.append(row)
    return rows


def picture(url: str, rows: list[dict[str, Any]]) -> RenderableType:
    """Return the rows as a table."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("tenant", overflow="ellipsis", no_wrap=True)
    for column in ("runs/s", "calls/s", "cpu", "running", "waiting", "busy/idle", "sessions"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("ended")
    for row in rows:
        table.add_row(
            safe(row["tenant"]),
            *(safe(each) for each in (f"{row['runs_per_s']:.1f}", f"{row['calls_per_s']:.1f}")),
            safe(f"{row['cpu_s_per_s']:.0%}"),
            *(safe(f"{row[column]}") for column in ("running", "waiting")),
            safe(f"{row['busy'] + row['starting']}/{row['idle']}"),
            safe(f"{row['sessions']}"),
            safe(_outcomes_text(row["outcomes"])),
        )
    head = Text.assemble((f"{url}  ", "bold"), (time.strftime("%H:%M:%S"), "dim"))
    return Group(head, table if rows else safe("no tenant has run anything yet", "dim"))


def _outcomes_text(outcomes: Mapping[str, int]) -> str:
    ordered = sorted(outcomes.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {number}" for name, number in ordered)


register = command(top)
