"""What the `toolcell audit` commands are given, and how they show what they found.

All text in a record is untrusted, so all of it passes `safe` and `one_line`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from toolcell.audit import (
    Filter,
    Index,
    RecordDatabase,
    RecordedCall,
    RecordedRun,
    Report,
    RunSummary,
    Trust,
    Verifier,
    database_of,
    load_signer,
    load_verifier,
    load_verifiers,
    receipt,
)
from toolcell.cli.terminal import safe, table, write_text
from toolcell.errors import AuditError, BadInput, UsageError
from toolcell.results import standing_of
from toolcell.support.data_text import json_line
from toolcell.support.files import write_named
from toolcell.support.text import counted, duration, one_line, size, with_line
from toolcell.support.times import parse_time

DEFAULT_FILE = "runs.db"

Dir = Annotated[
    str | None, typer.Argument(metavar="[FILE]", help="The record: a file, or postgresql://...", show_default=False)
]
DirAndRun = Annotated[
    list[str], typer.Argument(metavar="[FILE] RUN", help="The record and the run.", show_default=False)
]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--key", "-k", metavar="FILE", help="A key to check signatures with; repeatable. Default: your audit.key."
    ),
]


def record_of(named: str | None = None) -> RecordDatabase:
    """Return the record that is named; else $TOOLCELL_AUDIT, or ./runs.db.

    Raises:
        UsageError: there is no record.
    """
    if named is not None:
        return database_of(named)
    directory = database_of(os.environ.get("TOOLCELL_AUDIT") or DEFAULT_FILE)
    try:
        directory.id()
    except BadInput as exc:
        raise UsageError(f"{exc}; name the record's file (to `verify`, or a receipt) or set $TOOLCELL_AUDIT") from exc
    return directory


def load_keys(files: list[Path] | None) -> list[Verifier]:
    """Load the keys to check signatures with: those named, or our own.

    Raises:
        UsageError: a file cannot be read, or is not a key.
    """
    try:
        return [load_verifier(path) for path in files] if files else load_verifiers()
    except AuditError as exc:
        raise UsageError(f"{exc}{'' if files else '; name it with --key FILE'}") from exc


def check_signer(file: Path) -> None:
    """Check that a named key can sign.

    Raises:
        UsageError: the file cannot be read, or is not such a key.
    """
    try:
        load_signer(file)
    except AuditError as exc:
        raise UsageError(str(exc)) from exc


def known_keys(files: list[Path] | None) -> list[Verifier]:
    """Load the keys named, or our own as far as they can be read. Without a key, runs are shown as unverified.

    Raises:
        UsageError: a key that was named cannot be read.
    """
    return load_keys(files) if files else load_verifiers(is_needed=False)


def split_target(target: list[str]) -> tuple[RecordDatabase, str]:
    """Split `FILE RUN`, or `RUN` alone, into record and run.

    Raises:
        UsageError: there are more than two arguments, or the only one is a file.
    """
    if len(target) > 2:
        raise UsageError(f"expected a record and a run, not {' '.join(target)}")
    if len(target) == 1 and target[0].endswith(".json") and os.path.isfile(target[0]):
        raise UsageError(f"{target[0]} is a file and no RUN; `toolcell audit verify {target[0]}` checks a receipt")
    if len(target) == 1 and (target[0].endswith("/") or "://" in target[0] or os.path.isfile(target[0])):
        target = [database_of(target[0]).place]
        why = f"`toolcell audit list {target[0]}` shows its runs, and `last` is the newest"
        raise UsageError(f"RUN is missing: {target[0]} is taken for the record, which comes before RUN; {why}")
    return record_of(target[0] if len(target) == 2 else None), target[-1]


@dataclass(frozen=True, slots=True)
class FilterFlags:
    """Flags that say which runs are meant."""

    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Runs since 2026-11-21, 2026-11-21T14:30, 90m, 2d.")
    ] = None
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Runs before this time.")] = None
    outcome: Annotated[str | None, typer.Option("--outcome", metavar="NAME", help="ok, error, unfinished, ...")] = None
    tool: Annotated[
        str | None, typer.Option("--tool", "-t", metavar="NAME", help="Runs that called this tool; may have * and ?.")
    ] = None
    sha256: Annotated[
        str | None, typer.Option("--sha256", metavar="HEX", help="The script's digest, or its beginning.")
    ] = None
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="Thread, chat, channel, or parent run.")
    ] = None
    user: Annotated[str | None, typer.Option("--user", metavar="ID", help="User of the run.")] = None
    decided_by: Annotated[
        str | None, typer.Option("--decided-by", metavar="ID", help="Who decided about the run or a call of it.")
    ] = None
    host: Annotated[
        str | None, typer.Option("--host", metavar="NAME", help="Runs that sent a request there; may have * and ?.")
    ] = None
    secret: Annotated[
        str | None, typer.Option("--secret", metavar="NAME", help="Runs with a request that had this secret in it.")
    ] = None
    trust: Annotated[
        str | None, typer.Option("--trust", metavar="NAME", help="verified, unsigned, unverified or broken.")
    ] = None

    def filter(self, limit: int = 0) -> Filter:
        """Make the filter that the flags describe. `limit`: the newest so many runs; 0 is all.

        Raises:
            UsageError: the value of a flag is wrong.
        """
        if self.outcome is not None and self.outcome not in RunSummary.OUTCOMES:
            raise UsageError(f"--outcome {self.outcome!r}: want one of {', '.join(RunSummary.OUTCOMES)}")
        if self.trust is not None and self.trust not in [*Trust]:
            raise UsageError(f"--trust {self.trust!r}: want one of {', '.join(Trust)}")
        return Filter(
            trust=self.trust,
            since_ns=parse_time(self.since) if self.since else None,
            until_ns=parse_time(self.until) if self.until else None,
            outcome=self.outcome,
            tool=self.tool,
            sha256=self.sha256,
            session=self.session,
            user=self.user,
            decided_by=self.decided_by,
            host=self.host,
            secret=self.secret,
            limit=limit or None,
        )


def write_output(path: Path, pieces: Iterable[str]) -> None:
    """Write a file.

    Raises:
        BadInput: it cannot be written.
    """
    try:
        write_named(path, pieces)
    except OSError as exc:
        raise BadInput(f"cannot write {path}: {exc.strerror}") from exc


def opened(path: str | RecordDatabase | None, key: list[Path] | None = None) -> Index:
    return Index(path if isinstance(path, RecordDatabase) else record_of(path), known_keys(key))


BAR_CELLS = 28
MAX_FINDINGS = 50
ID_CHARS = 12

TRUST_STYLES: Final[Mapping[str, str]] = {
    Trust.VERIFIED: "green",
    Trust.UNSIGNED: "yellow",
    Trust.UNVERIFIED: "yellow",
    Trust.BROKEN: "bold red",
}
TRUST_TEXTS: Final[Mapping[str, str]] = {
    Trust.VERIFIED: "verified",
    Trust.UNSIGNED: "unsigned: no signature covers its end yet",
    Trust.UNVERIFIED: "unverified: the key that signed it was not given (--key)",
    Trust.BROKEN: "broken: this is not what was signed; `toolcell audit verify` says where",
}

MAX_TIME_NS = 253_000_000_000 * 10**9
"""In the year 9987. A record may hold any number for a time."""

COUNTED = ("events", "runs", "checkpoints")
HOST_COLUMNS = ("host", "requests", "runs", "failed", "secrets", "last")
TOOL_COLUMNS = ("tool", "calls", "failed", "median", "95 %", "in all")

STYLES: Final = {"good": "green", "open": "yellow", "bad": "red"}
_FULL, _LIGHT = "█", "▏"


def show_time(at_ns: int, *, with_fraction: bool = False) -> str:
    """Return a time in this machine's time zone, with the zone's offset."""
    at = datetime.fromtimestamp(min(at_ns, MAX_TIME_NS) / 1e9).astimezone()
    fraction = f".{at.microsecond // 1000:03d}" if with_fraction else ""
    return f"{at:%Y-%m-%d %H:%M:%S}{fraction} {at:%z}"


_NOT_IN_COLUMNS = re.compile(r"[^A-Za-z0-9_.:@+=/-]")


def in_column(text: str, columns: int) -> str:
    """Return an identifier for a table. With blanks in it, it would look like several columns."""
    return (
        _NOT_IN_COLUMNS.sub("?", text[: columns + 1])
        if len(text) <= columns
        else f"{in_column(text[:columns], columns)}…"
    )


def style_of(status: str) -> str:
    return STYLES[standing_of(status)]


# The list


def show_list(lines: Sequence[RunSummary], console: Console, older: int = 0, *, has_heading: bool = True) -> None:
    """Write one line per run. The last column fills the terminal; elsewhere it has 120 columns."""
    rows = [("started", "run", "outcome", "trust", "calls", "took", "script", "what"), *map(_row, lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    left = max(20, console.width - sum(widths) - 2 * len(widths)) if console.is_terminal else 120
    styles = [("bold", "bold"), *((style_of(line.outcome), TRUST_STYLES[line.trust]) for line in lines)]
    for number, (row, (style, trust)) in enumerate(zip(rows, styles, strict=True)):
        if not (number or has_heading):
            continue
        cells = [f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False)]
        columns = ("", "cyan", style, trust, "", "", "dim") if number else ("bold",) * len(cells)
        what = safe(one_line(row[-1], left), "" if number else "bold")
        console.print(Text.assemble(*zip(cells, columns, strict=True), what))
    if older:
        console.print(Text(f"and {counted(older, 'older run')}: -n 0 shows all", "yellow"))


def _row(line: RunSummary) -> tuple[str, ...]:
    failed = f" ({line.failed} failed)" if line.failed else ""
    return (
        show_time(line.started_ns),
        in_column(line.id, 40)[: max(ID_CHARS, line.id.find(".") + 9, line.id.find(":") + 19)],
        in_column(line.outcome, 20).replace("_", " "),
        line.trust,
        f"{line.calls}{failed}",
        duration(line.wall_s) if line.wall_s is not None else "",
        one_line(line.sha256 or "", 9)[:8],
        line.title,
    )


# One run


AMOUNTS: Final = {"source": 40, "output": 20, "value": 100, "result": 400, "fact": 150}
"""How much is shown of what may be long: lines of the source and of the output, and characters of the others."""
ALL: Final = 1 << 30


def show_run(run: RecordedRun, console: Console, trust: str, *, is_full: bool = False) -> None:
    """Write everything about a run: its trust, user, settings, script, calls, output and result."""
    most = dict.fromkeys(AMOUNTS, ALL) if is_full else AMOUNTS
    _show_head(run, console, trust, most["fact"])
    _show_source(run, console, most["source"])
    if run.calls:
        console.print()
        show_timeline(run, console, most["value"])
    _show_output(run, console, most["output"])
    _show_end(run, console, most["result"])


def _show_head(run: RecordedRun, console: Console, trust: str, most: int) -> None:
    outcome = safe(one_line(run.outcome.replace("_", " "), 20), style_of(run.outcome))
    title = Text.assemble(("run ", "bold"), safe(one_line(run.id, 100), "bold cyan"), "  ", outcome)
    wall_s = (run.end.get("usage") or {}).get("wall_s")
    if wall_s is not None:
        title.append(f"  {duration(wall_s)}")
    console.print(title)
    console.print(Text.assemble(("  trust     ", "dim"), (TRUST_TEXTS[trust], TRUST_STYLES[trust])))
    for name, value in _facts(run):
        console.print(Text.assemble((f"  {name:<9} ", "dim"), safe(one_line(value, most))))


def _facts(run: RecordedRun) -> Iterable[tuple[str, str]]:
    yield "started", show_time(run.started_ns, with_fraction=True)
    who = {name: value for name, value in run.who_lines() if not (name == "for run" and value == run.id)}
    for_whom = ", ".join(f"{name[4:]} {value}" for name, value in who.items() if name.startswith("for "))
    if for_whom:
        yield "for", for_whom
    yield from ((name, value) for name, value in who.items() if not name.startswith("for "))
    yield from (("runs", line) for line in run.family_lines())
    yield from run.decision_lines()
    if run.isolation.get("backend"):
        layers = run.isolation.get("layers") or {}
        yield "isolation", f"{run.isolation['backend']}, {len(layers)} layers: {' '.join(layers)}"
    packages = (run.isolation.get("environment") or {}).get("packages")
    if packages:
        yield "packages", " ".join(map(str, packages))
    limits = run.limits
    if limits:
        amounts = f"{limits['wall_s']:g} s, cpu {limits['cpu_s']:g} s, {size(limits['memory_bytes'])}"
        yield "limits", f"{amounts}, {limits['tool_calls']} tool calls"
    for rule in run.egress:
        secrets = f", with {', '.join(map(str, names))}" if (names := rule.get("secret_names")) else ""
        yield "egress", f"{','.join(map(str, rule.get('methods') or ()))} {rule['host']}{secrets}"
    if run.kind == "code":
        policy = run.policy
        yield "repeat", f"seed {policy['seed']}, clock {policy['clock']}, hash seed {policy.get('hash_seed')}"
        yield "script", f"sha256 {run.sha256}"
    if run.start.get("inputs"):
        yield "inputs", json_line(run.start["inputs"])
    for name, length, sha256, _ in run.start.get("files") or ():
        yield "file", f"{name}, {size(length)}, sha256 {sha256}"
    if redacted := (run.start.get("more") or {}).get("redacted"):
        yield "redacted", f"{redacted} in script and inputs"


def _show_source(run: RecordedRun, console: Console, most: int) -> None:
    if run.source is None:
        return
    console.print()
    lines = run.source.rstrip("\n").split("\n")
    called = {call.line for call in run.calls if call.line}
    failed = (run.end.get("error") or {}).get("line")
    width = len(str(len(lines)))
    for number, line in enumerate(lines[:most], start=1):
        mark = "red" if number == failed else "cyan" if number in called else "dim"
        console.print(Text.assemble((f"  {number:>{width}} | ", mark), safe(line.rstrip("\r"))))
    if len(lines) > most:
        console.print(Text(f"  ... {len(lines) - most} more lines: --full", "dim"))


def show_timeline(run: RecordedRun, console: Console, most: int) -> None:
    """Write one line per call, with a bar over the duration of the run."""
    end_ns = run.ended_ns or max((call.ended_ns or call.started_ns for call in run.calls), default=run.started_ns)
    total_ns = max(1, end_ns - run.started_ns)
    depths = _depths(run.calls)
    names = {call.number: one_line("  " * depths[call.number] + in_column(call.tool, 60), 28) for call in run.calls}
    width = max(len(name) for name in names.values())
    span = duration(total_ns / 1e9)
    ruler = f"0{span:>{BAR_CELLS - 1}}"
    console.print(Text(f"  {'#':>3}  {'call':<{width}}  {'line':>4}  {ruler}  took", "dim"))
    for call in run.calls:
        line = Text.assemble(
            (f"  {call.number:>3}  ", "dim"),
            safe(f"{names[call.number]:<{width}}", "cyan"),
            (f"  {call.line or '':>4}  ", "dim"),
            (bar(call, run.started_ns, total_ns, console.encoding), style_of(call.status)),
            f"  {duration(call.duration_s) if call.is_finished else '':<8} ",
            safe(one_line(call.status, 20), style_of(call.status)),
        )
        console.print(line)
        _show_call(call, console, most)


def bar(call: RecordedCall, started_ns: int, total_ns: int, encoding: str = "utf-8") -> str:
    """Draw when a call ran within its run."""
    full, light = (_FULL, _LIGHT) if encoding.lower().startswith("utf") else ("#", "|")
    start = min(BAR_CELLS - 1, max(0, (call.started_ns - started_ns) * BAR_CELLS // total_ns))
    cells = round(call.duration_s * 1e9 * BAR_CELLS / total_ns) if call.is_finished else BAR_CELLS - start
    cells = min(cells, BAR_CELLS - start)
    drawn = full * cells if cells else light
    return f"{' ' * start}{drawn}".ljust(BAR_CELLS)


def _depths(calls: Iterable[RecordedCall]) -> dict[int, int]:
    depths: dict[int, int] = {}
    for call in calls:
        depths[call.number] = depths.get(call.parent, -1) + 1 if call.parent is not None else 0
    return depths


def _show_call(call: RecordedCall, console: Console, most: int) -> None:
    if call.origin != "code" or most == ALL:
        console.print(safe(f"       {one_line(call.place, most)}", "dim"))
    for label, text in call.lines():
        style = "" if label == "answer" else "dim" if standing_of(call.status) == "good" else style_of(call.status)
        name = "->" if label == "answer" else safe(one_line(label, 40))
        console.print(Text.assemble("       ", (str(name), "dim"), " ", safe(one_line(text, most), style)))


def _show_output(run: RecordedRun, console: Console, most: int) -> None:
    logs = run.end.get("logs") or ()
    if not logs:
        return
    console.print()
    console.print(Text("printed", "bold"))
    text = "".join(text for _, text in logs)
    lines = text.rstrip("\n").split("\n")
    for line in lines[:most]:
        console.print(Text.assemble(("  | ", "dim"), safe(line)))
    if len(lines) > most:
        console.print(Text(f"  ... {len(lines) - most} more lines: --full", "dim"))


def _show_end(run: RecordedRun, console: Console, most: int) -> None:
    end = run.end
    console.print()
    if not end:
        console.print(Text("no end is recorded: the run is under way, or its host was killed", "yellow"))
        return
    if end.get("has_value"):
        console.print(Text.assemble(("result  ", "bold"), safe(one_line(run.value_text, most))))
        if end["value_sha256"]:
            console.print(safe(f"        sha256 {end['value_sha256']}", "dim"))
    if error := end.get("error"):
        message = with_line(one_line(str(error.get("message", "")), most), error.get("line") or None)
        write_text(console, f"{error.get('type')}: {message}")
    for name, media_type, length, sha256, problem in end.get("files") or ():
        about = problem or f"{media_type}, {size(length)}, sha256 {sha256}"
        console.print(Text.assemble(("file    ", "bold"), safe(one_line(f"{name}  {about}"))))
    usage = end.get("usage") or {}
    if usage:
        used = f"cpu {duration(usage['cpu_s'] or 0)}, {size(usage['peak_memory_bytes'] or 0)}"
        console.print(Text(f"used    {used}, waited {duration(usage['start_s'])} for its sandbox", "dim"))


# Counts


def show_hosts(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    shown = table(*HOST_COLUMNS, no_wrap=HOST_COLUMNS)
    for row in rows:
        shown.add_row(
            safe(one_line(row["host"], 60), "cyan"),
            str(row["requests"]),
            str(row["runs"]),
            Text(str(row["failed"]), "red" if row["failed"] else ""),
            safe(one_line(", ".join(row["secrets"]), 60)),
            show_time(row["last_ns"]),
        )
    console.print(shown)


def show_stats(stats: Mapping[str, Any], console: Console) -> None:
    runs = stats["runs"]
    times = f"{duration(stats['wall_s'])} in all, cpu {duration(stats['cpu_s'])}"
    console.print(Text.assemble((counted(runs, "run"), "bold"), f" of {counted(stats['scripts'], 'script')}, {times}"))
    if not runs:
        return
    console.print()
    trusts = ", ".join(f"{count} {name}" for name, count in stats["trust"].items())
    console.print(Text(trusts, "bold red" if stats["trust"].get(Trust.BROKEN) else "dim"))
    console.print()
    for outcome, count in stats["outcomes"].items():
        cells = max(1, round(count / runs * BAR_CELLS))
        name = safe(f"  {one_line(outcome, 20):<16}")
        console.print(Text.assemble(name, f"{count:>7}  ", (_FULL * cells, style_of(outcome))))
    if stats["tools"]:
        console.print()
        shown = table(*TOOL_COLUMNS, no_wrap=TOOL_COLUMNS)
        for row in stats["tools"]:
            shown.add_row(
                safe(one_line(row["tool"], 40), "cyan"),
                str(row["calls"]),
                Text(str(row["failed"]), "red" if row["failed"] else ""),
                duration(row["p50_ms"] / 1000),
                duration(row["p95_ms"] / 1000),
                duration(row["total_s"]),
            )
        console.print(shown)
    console.print()
    console.print(Text("runs by day, in UTC", "dim"))
    busiest = max(stats["days"].values())
    for day, count in stats["days"].items():
        console.print(f"  {day}  {count:>7}  {_FULL * max(1, round(count / busiest * BAR_CELLS))}")


# Verifying


def show_report(report: Report, console: Console) -> None:
    for finding in report.findings[:MAX_FINDINGS]:
        chain = one_line(f"chain {finding.chain}", 40) if finding.chain else "the file"
        where = f"{chain}, event {finding.seq}" if finding.seq is not None else chain
        console.print(Text.assemble((f"{finding.kind:<14}", "bold red"), safe(where)))
        console.print(safe(f"              {finding.message}"))
    if len(report.findings) > MAX_FINDINGS:
        kinds = Counter(finding.kind for finding in report.findings[MAX_FINDINGS:])
        more = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        console.print(Text(f"and {more}", "red"))
    for note in report.notes:
        console.print(safe(f"note: {note}", "yellow"))
    sums = {name: sum(getattr(chain, name) for chain in report.chains) for name in COUNTED}
    sums = {"chains": len(report.chains), **sums}
    counts = ", ".join(f"{count} {name if count != 1 else name.removesuffix('s')}" for name, count in sums.items())
    found = "not checked" if report.is_unchecked else counted(len(report.findings), "finding")
    result = ("ok", "bold green") if report.ok else (found, "bold red")
    console.print(Text.assemble(result, f"  {counts}"))


def show_receipt_check(checked: receipt.ReceiptCheck, console: Console) -> None:
    """Write the result of checking a receipt, and its run."""
    for problem in checked.problems:
        console.print(safe(problem, "red"))
    for missing in checked.missing:
        console.print(safe(f"partial: {missing}", "bold yellow"))
    if checked.run is not None and checked.ok:
        signed = show_time(checked.signed_ns) if checked.signed_ns else "?"
        run = checked.run
        word = Text("partial", "bold yellow") if checked.is_partial else Text("ok", "bold green")
        console.print(
            Text.assemble(
                word,
                safe(f"  run {run.id}, {run.outcome}, {counted(len(run.calls), 'call')}, "),
                safe(f"signed {signed} with key {checked.key}"),
            )
        )
    elif not checked.is_unchecked:
        console.print(Text("this receipt does not hold what was recorded", "bold red"))
