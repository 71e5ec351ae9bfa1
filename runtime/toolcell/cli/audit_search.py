"""`toolcell audit grep`, `diff`, `tail` and `events`: find, compare and follow runs, and hand them to other systems."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from toolcell.audit.events import lines_of, unreadable_line
from toolcell.audit.filters import Filter
from toolcell.audit.format import BadInput
from toolcell.audit.query import UNSIGNED, Index, RunSummary
from toolcell.audit.reader import UNFINISHED
from toolcell.audit.run_diff import RunChange, compare_runs
from toolcell.audit.search import Match, Searched, search
from toolcell.cli import audit_render, exits
from toolcell.cli.audit_arguments import (
    AsJson,
    Dir,
    FilterFlags,
    KeyFiles,
    ReadOnly,
    default_directory,
    known_keys,
    split_target,
)
from toolcell.cli.terminal import print_json, safe, stderr, stdout
from toolcell.errors import AuditError, UsageError
from toolcell.support.text import one_line

FOLLOW_S = 0.5
"""How often a log that is followed is looked at."""
UNSIGNED_LOOKS = 4
"""So often a run that is not signed yet is looked at again before it is shown."""
MAX_DIFF_LINES = 60


@contextmanager
def opened(directory: Path | None, key: list[Path] | None = None, read_only: bool = False) -> Iterator[Index]:
    """Open the index of a log and bring it up to date. Afterwards warn of what is damaged or was changed."""
    with Index(directory or default_directory(), known_keys(key), in_memory=read_only) as index:
        if sys.stderr.isatty():
            with stderr().status("reading the log"):
                index.refresh()
        else:
            index.refresh()
        yield index
        for chain in index.changed:
            text = f"chain {chain} was changed since it was read before; `toolcell audit verify {index.directory}`"
            stderr().print(safe(text, "bold red"))
        if index.damage.pieces:
            text = f"{index.damage.pieces} damaged records were passed over; `toolcell audit verify {index.directory}`"
            stderr().print(safe(text, "bold red"))


# grep


def grep(
    target: Annotated[list[str], typer.Argument(metavar="[DIR] PATTERN", help="The log, and what to look for.")],
    *,
    filters: FilterFlags,
    ignore_case: Annotated[
        bool, typer.Option("--ignore-case", "-i", help="Upper and lower case are the same.")
    ] = False,
    fixed: Annotated[bool, typer.Option("--fixed", "-F", help="PATTERN is a text, not a regular expression.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="The first so many matches; 0 is all.")] = 200,
    full: Annotated[bool, typer.Option("--full", help="Show whole lines.")] = False,
    key: KeyFiles = None,
    read_only: ReadOnly = False,
    as_json: AsJson = False,
) -> None:
    """Search scripts, inputs, arguments, answers, output, errors and files' digests. Exits with 1 if nothing is found.

    Each match has its run, how far that can be trusted, and its call.
    """
    directory, text = split_target(target)
    pattern = compile_pattern(text, fixed, ignore_case)
    searched = Searched()
    with opened(directory, key, read_only) as index:
        matches = search(index, index.runs(filters.filter()), pattern, searched)
        shown = list(itertools.islice(matches, limit or None))
        more = sum(1 for _ in matches)  # not kept: only counted
        if as_json:
            print_json(
                {
                    "matches": [match.to_dict() for match in shown],
                    "more": more,
                    "runs": searched.runs,
                    "unreadable": searched.unreadable,
                    "not_recorded": searched.not_recorded,
                }
            )
        else:
            show_matches(shown, full, stdout())
    if more:
        stderr().print(safe(f"and {more} more matches: -n 0 shows all", "yellow"))
    if searched.not_recorded:
        many = "1 field was" if searched.not_recorded == 1 else f"{searched.not_recorded} fields were"
        stderr().print(safe(f"{many} not recorded in full, and could not be searched", "yellow"))
    if searched.unreadable:
        stderr().print(safe(f"{searched.unreadable} runs could not be read", "bold red"))
    raise typer.Exit(exits.OK if shown else exits.FAILED)


def compile_pattern(text: str, fixed: bool, ignore_case: bool) -> re.Pattern[str]:
    """Compile a pattern.

    Raises:
        UsageError: it is no regular expression, or empty.
    """
    if not text:
        raise UsageError("the pattern is empty: every line would match")
    try:
        return re.compile(re.escape(text) if fixed else text, re.IGNORECASE if ignore_case else 0)
    except re.error as exc:
        raise UsageError(f"{text!r} is no regular expression: {exc}; -F looks for it as it is") from exc


def show_matches(matches: list[Match], full: bool, console: Console) -> None:
    """Write one line per match, below one line per run."""
    for _, group in itertools.groupby(matches, key=lambda match: (match.run.chain, match.run.seq)):
        found = list(group)
        run = found[0].run
        console.print(
            Text.assemble(
                safe(audit_render.in_column(run.id, 100), "bold cyan"), f"  {audit_render.show_time(run.started_ns)}  ",
                (run.trust, audit_render.TRUST_STYLES[run.trust]),
            )
        )  # fmt: skip
        for match in found:
            console.print(Text.assemble("  ", *_match(match, full)))


def _match(match: Match, full: bool) -> list[Any]:
    before, hit, after = match.excerpt(1 << 30) if full else match.excerpt()
    call = f"call {match.call.number} {match.call.tool} " if match.call is not None else ""
    most = 1 << 30 if full else 200
    return [
        safe(one_line(f"{call}{match.where}:{match.line}: ", 120), "dim"),
        safe(one_line(before, most)), safe(one_line(hit, most), "bold red"), safe(one_line(after, most)),
    ]  # fmt: skip


# diff


def diff(
    target: Annotated[list[str], typer.Argument(metavar="[DIR] RUN RUN", help="The log, and two of its runs.")],
    *,
    full: Annotated[bool, typer.Option("--full", help="Cut nothing.")] = False,
    key: KeyFiles = None,
    read_only: ReadOnly = False,
    as_json: AsJson = False,
) -> None:
    """Compare two recorded runs: script, settings, calls, output and result. Exits with 1 if they differ."""
    if len(target) not in (2, 3):
        raise UsageError("expected two runs, and before them their log if it is not the default")
    directory = Path(target[0]) if len(target) == 3 else default_directory()
    with opened(directory, key, read_only) as index:
        found = [index.find(id) for id in target[-2:]]
        changes = compare_runs(*map(index.load, found))
        if as_json:
            runs = [{"id": run.id, "trust": run.trust} for run in found]
            print_json({"runs": runs, "changes": [change.to_dict() for change in changes]})
        else:
            show_changes(found, changes, full, stdout())
    raise typer.Exit(exits.FAILED if changes else exits.OK)


def show_changes(runs: list[RunSummary], changes: list[RunChange], full: bool, console: Console) -> None:
    """Write what differs between two runs."""
    for sign, run in zip("-+", runs, strict=True):
        trust = (run.trust, audit_render.TRUST_STYLES[run.trust])
        console.print(
            Text.assemble(f"{sign} run ", safe(audit_render.in_column(run.id, 100), "bold cyan"), "  ", trust)
        )
    if not changes:
        console.print(Text("no difference in what is recorded", "green"))
    for change in changes:
        console.print(safe(one_line(change.what, 100), "bold"))
        if change.lines:
            shown = change.lines if full else change.lines[:MAX_DIFF_LINES]
            for line in shown:
                console.print(safe(f"  {line}", {"-": "red", "+": "green"}.get(line[:1], "dim")))
            if len(shown) < len(change.lines):
                console.print(Text(f"  ... {len(change.lines) - len(shown)} more lines: --full", "dim"))
            continue
        for sign, value, style in (("-", change.first, "red"), ("+", change.second, "green")):
            console.print(safe(f"  {sign} {one_line(audit_render.as_json(value), 1 << 30 if full else 200)}", style))


# tail


def tail(
    directory: Dir = None,
    *,
    filters: FilterFlags,
    limit: Annotated[int, typer.Option("--lines", "-n", min=0, help="Begin with the newest so many.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with runs as they end, until Ctrl-C.")] = False,
    key: KeyFiles = None,
    read_only: ReadOnly = False,
    as_json: AsJson = False,
) -> None:
    """Show the newest runs, and with -f those to come. With --json, one object per line."""
    wanted = filters.filter(limit)
    with opened(directory, key, read_only) as index:
        runs = index.runs(wanted) if limit else []
        if as_json:
            write_lines(runs)
        else:
            audit_render.show_list(runs, stdout())
        if follow:
            for more in new_runs(index, filters.filter()):
                write_lines(more) if as_json else audit_render.show_list(more, stdout(), has_heading=False)


def write_lines(runs: list[RunSummary]) -> None:
    """Write one JSON object per line."""
    import json

    for run in runs:
        sys.stdout.write(json.dumps(run.to_dict()) + "\n")
    sys.stdout.flush()


def new_runs(index: Index, wanted: Filter) -> Iterator[list[RunSummary]]:
    """Yield runs as they are recorded: when they are signed, or after a few looks without; again when they change."""
    shown = {(run.chain, run.seq): (run.outcome, run.trust) for run in index.runs(wanted)}
    waiting: dict[tuple[str, int], int] = {}
    while True:
        started = time.monotonic()
        index.refresh()
        fresh = []
        for run in index.runs(wanted):
            place, state = (run.chain, run.seq), (run.outcome, run.trust)
            if shown.get(place) == state:
                continue
            looks = waiting[place] = waiting.get(place, 0) + 1
            if (run.trust == UNSIGNED or run.outcome == UNFINISHED) and looks < UNSIGNED_LOOKS:
                continue
            shown[place] = state
            del waiting[place]
            fresh.append(run)
        if fresh:
            yield fresh
        time.sleep(max(FOLLOW_S, 4 * (time.monotonic() - started)))  # a large log is looked at less often


# events


class EventFormat(StrEnum):
    """How events are written."""

    JSONL = "jsonl"
    ECS = "ecs"


def event_lines(index: Index, runs: list[RunSummary], shape: EventFormat) -> Iterator[str]:
    """Yield the lines of all runs. A run that cannot be read has one line that says so."""
    for summary in runs:
        try:
            run = index.load(summary)
        except AuditError as exc:
            yield unreadable_line(summary, str(exc))
        else:
            yield from lines_of(run, summary, "ecs" if shape is EventFormat.ECS else "jsonl")


def events(
    directory: Dir = None,
    *,
    filters: FilterFlags,
    shape: Annotated[
        EventFormat, typer.Option("--format", help="jsonl: all that is recorded; ecs: Elastic Common Schema.")
    ] = EventFormat.JSONL,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: stdout.")] = None,
    key: KeyFiles = None,
    read_only: ReadOnly = False,
) -> None:
    """Write runs for another system, such as a SIEM: a line of JSON for each start, call and end, with its trust."""
    with opened(directory, key, read_only) as index:
        lines = event_lines(index, index.runs(filters.filter()), shape)
        if output is None:
            sys.stdout.writelines(f"{line}\n" for line in lines)
            sys.stdout.flush()
            return
        try:
            with open(output, "w", encoding="ascii") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as exc:
            raise BadInput(f"cannot write {output}: {exc.strerror}") from exc
