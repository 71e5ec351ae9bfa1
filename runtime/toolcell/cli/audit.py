"""`toolcell audit`: list, show, count, verify and export what scripts did, and run them again."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from toolcell.audit import (
    Filter,
    Index,
    RecordedRun,
    RunSummary,
    ShownRun,
    Trust,
    text_search,
)
from toolcell.cli import audit_terminal, exits
from toolcell.cli.arguments import parse_inputs, read_files, read_script
from toolcell.cli.audit_proof import check, export, keygen, keys, prune, rotate
from toolcell.cli.audit_terminal import (
    Dir,
    DirAndRun,
    FilterFlags,
    KeyFiles,
    opened,
    split_target,
    write_output,
)
from toolcell.cli.execution import Watch, run_watched
from toolcell.cli.flags import AsJson, group
from toolcell.cli.render import excerpt
from toolcell.cli.terminal import output, print_json, safe, stderr, stdout, write_text
from toolcell.config import PoolConfig
from toolcell.errors import UsageError
from toolcell.results import Divergence
from toolcell.support.data_text import json_line, jsonable
from toolcell.support.packing import value_digest
from toolcell.support.text import one_line

if TYPE_CHECKING:
    from toolcell.control import Replay


SUMMARY = """Recorded runs: list, show, grep, verify, export and replay them.

FILE is the record (`Runtime(record=FILE)`); the default is $TOOLCELL_AUDIT, or ./runs.db. RUN is a run's id, the
beginning of one, or `last`.
"""


MOST = 1_000_000_000
"""Most runs or matches that may be asked for; a database takes no number of any length."""


def list_runs(
    directory: Dir = None,
    *,
    filters: FilterFlags,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, max=MOST, help="Show at most this many; 0 is all.")
    ] = 50,
    key: KeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """List runs with their trust, the newest last. Older runs are only counted."""
    wanted = filters.filter(limit)
    with opened(directory, key) as index:
        runs = index.runs(wanted)
        older = index.count(wanted) - len(runs)
        if as_json:
            print_json([run.to_dict() for run in runs])
            if older:
                stderr().print(safe(f"and {older} older runs: -n 0 lists all", "yellow"))
        else:
            audit_terminal.show_list(runs, stdout(), older)


def show(
    target: DirAndRun,
    *,
    full: Annotated[bool, typer.Option("--full", help="Cut nothing: the whole script, values and output.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained HTML file.")
    ] = None,
    key: KeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """Show one run: settings, script, calls on a timeline, output and result."""
    directory, wanted = split_target(target)
    with opened(directory, key) as index:
        summary = index.find(wanted)
        run = index.load(summary)
        if html is not None:
            log = f"{directory}, id {directory.id()}"
            write_html(ShownRun(run).to_html(summary.trust, log=log, made_ns=time.time_ns()), html)
            return
        shown = run.to_dict() | {"trust": summary.trust, "runs": [asdict(each) for each in run.family]}
        output(shown, as_json, lambda: audit_terminal.show_run(run, stdout(), summary.trust, is_full=full))


def stats(
    directory: Dir = None,
    *,
    filters: FilterFlags,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Count requests by host instead, with the names of the secrets in them.")
    ] = False,
    key: KeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """Count runs by outcome, trust and day, and calls by tool with how long they took."""
    wanted = filters.filter()
    with opened(directory, key) as index:
        counted: Any = index.hosts(wanted) if hosts else index.stats(wanted)
        show_counted = audit_terminal.show_hosts if hosts else audit_terminal.show_stats
        output(counted, as_json, lambda: show_counted(counted, stdout()))


def write_html(page: str, path: Path) -> None:
    write_output(path, [page])
    stderr().print(safe(f"{path}: {path.stat().st_size} bytes"))


FOLLOW_S = 0.5
"""How often a log that is followed is looked at."""
UNSIGNED_LOOKS = 4
"""So often a run that is not signed yet is looked at again before it is shown."""
MAX_DIFF_LINES = 60
MAX_COMPARED_LINES = 2000
"""Longer texts are not compared line by line: that takes quadratic time in texts made for it."""
LINE_STYLES = {"-": "red", "+": "green"}
MAX_LINES_OF_LONG = 10
"""So many lines of each are shown of texts that are not compared line by line."""
TEXTS = ("source", "stdout", "stderr")
"""Parts of a run that are compared as they are, and not as JSON."""


# grep


def grep(
    target: Annotated[list[str], typer.Argument(metavar="[FILE] PATTERN", help="The record, and what to look for.")],
    *,
    filters: FilterFlags,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i", help="Ignore case.")] = False,
    fixed: Annotated[
        bool, typer.Option("--fixed", "-F", help="PATTERN is plain text, not a regular expression.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, max=MOST, help="Show at most this many matches; 0 is all.")
    ] = 200,
    full: Annotated[bool, typer.Option("--full", help="Show whole lines.")] = False,
    key: KeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """Search scripts, inputs, arguments, answers, output, errors and files' digests. Exits with 1 if nothing is found.

    Each match names its run, the run's trust, and the call.
    """
    directory, text = split_target(target)
    pattern = compile_pattern(text, fixed, ignore_case)
    searched = text_search.Search()
    with opened(directory, key) as index:
        matches = searched.search(index, filters.filter(), pattern)
        shown = list(itertools.islice(matches, limit or None))
        more = sum(1 for _ in matches)  # not kept: only counted
        found = {
            "matches": [match.to_dict() for match in shown],
            "more": more,
            "runs": searched.runs,
            "unreadable": searched.unreadable,
            "not_recorded": searched.not_recorded,
        }
        output(found, as_json, lambda: show_matches(shown, full, stdout()))
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
        UsageError: it is not a regular expression, or empty.
    """
    if not text:
        raise UsageError("the pattern is empty: every line would match")
    try:
        return re.compile(re.escape(text) if fixed else text, re.IGNORECASE if ignore_case else 0)
    except re.error as exc:
        raise UsageError(f"{text!r} is not a regular expression: {exc}; -F looks for it as it is") from exc


def show_matches(matches: list[text_search.Match], full: bool, console: Console) -> None:
    for _, of_run in itertools.groupby(matches, key=lambda match: (match.run.chain, match.run.seq)):
        found = list(of_run)
        run = found[0].run
        console.print(
            Text.assemble(
                safe(audit_terminal.in_column(run.id, 100), "bold cyan"),
                f"  {audit_terminal.show_time(run.started_ns)}  ",
                (run.trust, audit_terminal.TRUST_STYLES[run.trust]),
            )
        )
        for match in found:
            console.print(Text.assemble("  ", *_match(match, full)))


def _match(match: text_search.Match, full: bool) -> list[Any]:
    before, hit, after = match.excerpt(1 << 30) if full else match.excerpt()
    call = f"call {match.call.number} {match.call.tool} " if match.call is not None else ""
    most = 1 << 30 if full else 200
    return [
        safe(one_line(f"{call}{match.where}:{match.line}: ", 120), "dim"),
        safe(one_line(before, most)),
        safe(one_line(hit, most), "bold red"),
        safe(one_line(after, most)),
    ]


# diff


def diff(
    target: Annotated[list[str], typer.Argument(metavar="[FILE] RUN RUN", help="The record, and two of its runs.")],
    *,
    full: Annotated[bool, typer.Option("--full", help="Cut nothing.")] = False,
    key: KeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """Compare two recorded runs: script, settings, calls, output and result. Exits with 1 if they differ."""
    if len(target) not in (2, 3):
        raise UsageError("expected two runs, and before them their record if it is not the default")
    with opened(target[0] if len(target) == 3 else None, key) as index:
        found = [index.find(id) for id in target[-2:]]
        changes = changed_parts(*map(index.load, found))
    runs = [{"id": run.id, "trust": run.trust} for run in found]
    plain = [{"what": what, "lines": lines} for what, lines in changes.items()]
    output({"runs": runs, "changes": plain}, as_json, lambda: show_changes(found, changes, full, stdout()))
    raise typer.Exit(exits.FAILED if changes else exits.OK)


def changed_parts(first: RecordedRun, second: RecordedRun) -> dict[str, list[str]]:
    """Return what differs in two runs: the parts, and the lines of each after `-`, `+` or a space."""
    is_cut = any("logs_cut" in (run.end.get("more") or ()) for run in (first, second))
    both = [parts_of(run, ("logs",) if is_cut else TEXTS[1:]) for run in (first, second)]
    changes = dict[str, list[str]]()
    for what in dict.fromkeys(name.removesuffix("_cut") for parts in both for name in parts):
        found = [[parts[name] for name in (f"{what}_cut", what) if name in parts][:1] for parts in both]
        if any(f"{what}_cut" in parts for parts in both):
            digests = [digest_of(parts, what) for parts in both]
            found = found if None in digests else [[digest] for digest in digests]
        before, after = ([line for part in parts for line in text_of(what, part).split("\n")] for parts in found)
        if before != after:
            changes[what] = changed_lines(before, after)
    return changes


def changed_lines(before: list[str], after: list[str]) -> list[str]:
    if max(len(before), len(after)) <= MAX_COMPARED_LINES:
        return [*difflib.unified_diff(before, after, lineterm="", n=2)][2:]  # without names of files
    at = next(n for n, (old, new) in enumerate(itertools.zip_longest(before, after)) if old != new)
    lines = [f"@@ line {at + 1} of {len(before)} and {len(after)} is the first that differs @@"]
    for sign, side in (("-", before[at:]), ("+", after[at:])):
        lines += [sign + line for line in side[:MAX_LINES_OF_LONG]]
        lines += [f"  ... {len(side) - MAX_LINES_OF_LONG} more lines"] if len(side) > MAX_LINES_OF_LONG else []
    return lines


def parts_of(run: RecordedRun, streams: Sequence[str]) -> dict[str, Any]:
    """Return what two runs that did the same have in common. `NAME_cut` says what was not kept."""
    start, end, logs = run.start, run.end, run.end.get("logs") or ()
    return {
        "source": run.source or "",
        "inputs": start.get("inputs"),
        "input files": sorted((entry[:3] for entry in start.get("files") or ()), key=str),
        **{name: getattr(run, name) for name in ("limits", "policy", "isolation", "egress")},
        "tools": sorted(each[0] for each in run.definitions),
        "who": {name: value for name, value in run.who.items() if name not in ("run", "parent_call")},
        **{
            f"call {call.number} {name}".rstrip(): part
            for call in run.calls
            for name, part in {"": [call.tool, call.line, call.status], **call.facts}.items()
        },
        "outcome": run.outcome,
        "error": end.get("error"),
        **({"value": end.get("value")} if end.get("has_value") else {}),
        **{name: "".join(text for each, text in logs if each == name) if name in TEXTS else logs for name in streams},
        "files": sorted(end.get("files") or (), key=str),
        **{
            name: part
            for each in (start, end)
            for name, part in (each.get("more") or {}).items()
            if name.endswith("_cut")
        },
    }


def digest_of(parts: dict[str, Any], name: str) -> str | None:
    """Return the digest of a part, also of one that was not kept. None: it was not recorded either."""
    if (missing := parts.get(f"{name}_cut")) is not None:
        return missing.get("sha256") if isinstance(missing, Mapping) else None
    return value_digest(parts[name]) if name in parts else None


def text_of(name: str, part: Any) -> str:
    if name in TEXTS and isinstance(part, str):
        return part
    return json.dumps(jsonable(part), ensure_ascii=False, indent=1, sort_keys=True)


def show_changes(runs: list[RunSummary], changes: dict[str, list[str]], full: bool, console: Console) -> None:
    for sign, run in zip("-+", runs, strict=True):
        trust = (run.trust, audit_terminal.TRUST_STYLES[run.trust])
        name = safe(audit_terminal.in_column(run.id, 100), "bold cyan")
        console.print(Text.assemble(f"{sign} run ", name, "  ", trust))
    if not changes:
        console.print(Text("no difference in what is recorded", "green"))
    for what, lines in changes.items():
        console.print(safe(one_line(what, 100), "bold"))
        shown = lines if full else lines[:MAX_DIFF_LINES]
        for line in shown:
            console.print(safe(f"  {line if full else one_line(line, 200)}", LINE_STYLES.get(line[:1], "dim")))
        if len(shown) < len(lines):
            console.print(Text(f"  ... {len(lines) - len(shown)} more lines: --full", "dim"))


# tail


def tail(
    directory: Dir = None,
    *,
    filters: FilterFlags,
    limit: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=MOST, help="Begin with this many of the newest runs.")
    ] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep showing runs as they end, until Ctrl-C.")
    ] = False,
    key: KeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest runs, and with -f new ones as they end. With --json, one object per line."""
    with opened(directory, key) as index:
        coming = new_runs(index, filters.filter()) if follow else ()  # first: what comes meanwhile is shown twice
        newest = index.runs(filters.filter(limit)) if limit else []
        for number, runs in enumerate(itertools.chain([newest], coming)):
            if as_json:
                sys.stdout.writelines(json.dumps(run.to_dict()) + "\n" for run in runs)
                sys.stdout.flush()
            else:
                audit_terminal.show_list(runs, stdout(), has_heading=not number)


def new_runs(index: Index, wanted: Filter) -> Iterator[list[RunSummary]]:
    """Return runs from now on: when they are signed, or after a few looks without; again when they change."""
    return _new_runs(index, wanted, {(run.chain, run.seq): (run.outcome, run.trust) for run in index.runs(wanted)})


def _new_runs(
    index: Index, wanted: Filter, shown: dict[tuple[str, int], tuple[str, str]]
) -> Iterator[list[RunSummary]]:
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
            if (run.trust == Trust.UNSIGNED or run.ended_ns is None) and looks < UNSIGNED_LOOKS:
                continue
            shown[place] = state
            del waiting[place]
            fresh.append(run)
        if fresh:
            yield fresh
        time.sleep(max(FOLLOW_S, 4 * (time.monotonic() - started)))  # a large log is looked at less often


# events


def events(
    directory: Dir = None,
    *,
    filters: FilterFlags,
    shape: Annotated[
        Literal["jsonl", "ecs"],
        typer.Option("--format", help="jsonl: all that is recorded; ecs: Elastic Common Schema."),
    ] = "jsonl",
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: stdout.")] = None,
    key: KeyFiles = None,
) -> None:
    """Write runs for another system, such as a SIEM: a line of JSON for each start, call and end, with its trust."""
    with opened(directory, key) as index:
        runs = index.runs(filters.filter())
        lines = (f"{line}\n" for run in runs for line in index.event_lines(run, shape))
        if output is None:
            sys.stdout.writelines(lines)
            sys.stdout.flush()
            return
        write_output(output, lines)


# replay


ALL = "all"


def replay(
    target: Annotated[
        list[str], typer.Argument(metavar="[FILE] RUN", help="The record and the run, or `all`.", show_default=False)
    ],
    *,
    check: Annotated[bool, typer.Option("--check", help="One line per run, for CI.")] = False,
    until: Annotated[int | None, typer.Option("--until", metavar="N", min=1, help="Stop at the Nth call.")] = None,
    source: Annotated[
        Path | None, typer.Option("--source", metavar="FILE", help="Run this script instead of the recorded one.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="NAME=JSON", help="An input that was not recorded.")
    ] = None,
    put_files: Annotated[
        list[str] | None, typer.Option("--file", "-f", metavar="[NAME=]PATH", help="A file that was not recorded.")
    ] = None,
    secrets: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="NAME", help="Hide the value of this environment variable in differences."),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", metavar="NAME", help="process or docker.")] = "process",
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON document.")] = False,
) -> None:
    """Run a script again with the recorded answers, without calling tools. Exits with 1 on a difference.

    Seed, clock, hash seed, inputs and files are those of the recorded run.
    """
    runs = recorded_runs(target)
    given: dict[str, Any] = {
        "source": read_script(str(source)) if source is not None else None,
        "inputs": parse_inputs(inputs) if inputs else None,
        "files": read_files(put_files or ()),
        "until": until,
        "secrets": read_secrets(secrets or ()),
    }
    done = replay_all(runs, given, backend)
    if as_json:
        plain = [jsonable(each.to_dict()) for each in done]
        print_json(plain if target[-1] == ALL else plain[0])
    else:
        for each, run in zip(done, runs, strict=True):
            show_replay(each, run, given["source"], stdout(), is_short=check or len(runs) > 1)
    raise typer.Exit(exits.OK if all(each.ok for each in done) else exits.FAILED)


def read_secrets(names: Sequence[str]) -> list[str]:
    """Return the values of environment variables.

    Raises:
        UsageError: one is not set.
    """
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise UsageError(f"--secret {missing[0]}: the environment has no such variable; name one that holds the secret")
    return [os.environ[name] for name in names]


def recorded_runs(target: list[str]) -> list[RecordedRun]:
    directory, wanted = split_target(target)
    with Index(directory) as index:
        if wanted != ALL:
            return [index.load(index.find(wanted))]
        runs = [index.load(summary) for summary in index.runs(Filter(limit=None)) if summary.kind == "code"]
        if not runs:
            raise UsageError(f"there are no scripts in {directory}")
        return runs


def replay_all(runs: Sequence[RecordedRun], given: dict[str, Any], backend: str) -> list[Replay]:
    """Replay runs. Runs with the same runtime options share one runtime."""
    from toolcell.control import replay  # with the tools: the other commands load neither
    from toolcell.runtime import Runtime

    async def work(watch: Watch) -> list[Replay]:
        done: list[Replay] = []
        at = 0
        while at < len(runs):
            options = runs[at].runtime_options()
            pool = PoolConfig(warm=min(2, len(runs) - at))
            async with Runtime(None, backend=backend, pool=pool, **options) as runtime:
                while at < len(runs) and runs[at].runtime_options() == options:
                    watch.doing = f"replaying {at + 1} of {len(runs)}"
                    done.append(await replay(runtime, runs[at], **given))
                    at += 1
        return done

    return run_watched(work)


def show_replay(done: Replay, run: RecordedRun, source: str | None, console: Console, is_short: bool) -> None:
    if done.ok:
        calls = f"{done.answered} of {done.recorded} calls answered from the record"
        partly = "" if done.stopped or not done.not_compared else " as far as it was compared"
        text = f"{done.stopped or 'the same result'}{partly}, {calls}"
        console.print(Text.assemble(("ok  ", "bold green"), safe(f"run {run.id}: {text}")))
    else:
        assert done.divergence is not None
        console.print(Text.assemble(("differs  ", "bold red"), safe(f"run {run.id}: {place_of(done.divergence)}")))
    if is_short:
        return
    for left_out in done.not_compared:
        console.print(safe(f"not compared: {left_out}", "yellow"))
    for note in done.notes:
        console.print(safe(f"note: {note}", "yellow"))
    if done.divergence is not None:
        _show_divergence(done.divergence, run.source, run.source if source is None else source, console)


def place_of(found: Divergence) -> str:
    at = f"call {found.index}" if found.index is not None else found.kind
    of_record = " as recorded" if found.kind == found.MISSING_CALL else ""
    line = f", line {found.line}{of_record}" if found.line is not None else ""
    return f"{at}{line}: {found.message}"


def _show_divergence(found: Divergence, recorded: str | None, source: str | None, console: Console) -> None:
    """Quote the lines of the scripts, and write both values."""
    if found.kind == found.MISSING_CALL:
        _quote("as recorded", recorded, found.line, console)
        _quote("now", source, (found.got or {}).get("line"), console)
    else:
        _quote("", source, found.line, console)
    console.print()
    for name, value, style in (("expected", found.expected, "green"), ("got", found.got, "red")):
        console.print(Text(f"{name:<9}", style), end="")
        write_text(console, one_line(json_line(value), 500))


def _quote(title: str, source: str | None, line: int | None, console: Console) -> None:
    if not line or not source:
        return
    console.print()
    if title:
        console.print(Text(title, "dim"))
    for text in excerpt(source, line):
        console.print(text)


register = group(
    SUMMARY,
    {
        "list": list_runs,
        "show": show,
        "stats": stats,
        "grep": grep,
        "diff": diff,
        "tail": tail,
        "events": events,
        "prune": prune,
        "verify": check,
        "export": export,
        "replay": replay,
        "keygen": keygen,
        "keys": keys,
        "rotate": rotate,
    },
)
