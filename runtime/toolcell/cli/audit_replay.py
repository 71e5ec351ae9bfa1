"""`toolcell audit replay`: run a recorded script again with the recorded answers, and show the first difference."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from toolcell.audit.diff import MISSING_CALL
from toolcell.audit.filters import Filter
from toolcell.audit.query import Index
from toolcell.audit.reader import RecordedCall, RecordedRun, jsonable
from toolcell.cli import exits
from toolcell.cli.arguments import parse_inputs, read_files, read_script
from toolcell.cli.audit_arguments import split_target
from toolcell.cli.execution import Watch, run_watched
from toolcell.cli.render import excerpt
from toolcell.cli.terminal import print_json, safe, stdout, write_text
from toolcell.config import PoolConfig
from toolcell.errors import UsageError
from toolcell.results import Divergence
from toolcell.support.text import one_line

if TYPE_CHECKING:
    from toolcell.audit.replay import Replay

ALL = "all"


def replay(
    target: Annotated[
        list[str], typer.Argument(metavar="[DIR] RUN", help="The log and the run, or `all`.", show_default=False)
    ],
    *,
    check: Annotated[bool, typer.Option("--check", help="One line per run, for CI.")] = False,
    start: Annotated[
        int | None, typer.Option("--from", metavar="N", min=1, help="Show every call from the Nth on.")
    ] = None,
    until: Annotated[int | None, typer.Option("--until", metavar="N", min=1, help="Stop at the Nth call.")] = None,
    source: Annotated[
        Path | None, typer.Option("--source", metavar="FILE", help="Run this script in place of the recorded one.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="NAME=JSON", help="An input that was not recorded.")
    ] = None,
    put_files: Annotated[
        list[str] | None, typer.Option("--file", "-f", metavar="[NAME=]PATH", help="A file that was not recorded.")
    ] = None,
    secrets: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="NAME", help="Show the value of this environment variable in no difference."),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", metavar="NAME", help="process or docker.")] = "process",
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON document.")] = False,
) -> None:
    """Run a script again with the answers it got: no tool is called. Exits with 1 when it does something else.

    Seed, clock, hash seed, inputs and files are those of the recorded run.
    """
    runs = load(target)
    check_steps(runs, start, until)
    given: dict[str, Any] = {
        "source": read_script(str(source)) if source is not None else None,
        "inputs": parse_inputs(inputs) if inputs else None,
        "files": read_files(put_files or ()),
        "until": until,
        "secrets": read_secrets(secrets or ()),
    }
    steps = Steps(start, stdout()) if start is not None and not as_json else None
    done = replay_all(runs, given, backend, steps)
    if as_json:
        plain = [jsonable(each.to_dict()) for each in done]
        print_json(plain if target[-1] == ALL else plain[0])
    else:
        for each, run in zip(done, runs, strict=True):
            show(each, run, given["source"], stdout(), is_short=check or len(runs) > 1)
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


def load(target: list[str]) -> list[RecordedRun]:
    """Load the runs to replay."""
    directory, wanted = split_target(target)
    with Index(directory) as index:
        index.refresh()
        if wanted != ALL:
            return [index.load(index.find(wanted))]
        runs = [index.load(summary) for summary in index.runs(Filter(limit=None)) if summary.kind == "code"]
        if not runs:
            raise UsageError(f"there are no scripts in {directory}")
        return runs


def check_steps(runs: Sequence[RecordedRun], start: int | None, until: int | None) -> None:
    """Check --from and --until against the recorded calls.

    Raises:
        UsageError: a number is too large, or --until is before --from.
    """
    if start is None:
        return
    from toolcell.audit.replay import script_calls

    most = max(len(script_calls(run)) for run in runs)
    if start > max(1, most):
        raise UsageError(f"--from {start}: want 1 to {max(1, most)}; calls of the script on record: {most}")
    if until is not None and until < start:
        raise UsageError(f"--from {start} --until {until}: want --until to be at least {start}")


def replay_all(runs: Sequence[RecordedRun], given: dict[str, Any], backend: str, steps: Steps | None) -> list[Replay]:
    """Replay runs. Runs with the same runtime options share one runtime."""
    from toolcell.audit import replay  # with the tools: the other commands load neither
    from toolcell.runtime import Runtime

    async def work(watch: Watch) -> list[Replay]:
        done: list[Replay] = []
        at = 0
        while at < len(runs):
            options = replay.runtime_options(runs[at])
            pool = PoolConfig(warm=min(2, len(runs) - at))
            async with Runtime(None, backend=backend, pool=pool, **options) as runtime:
                while at < len(runs) and replay.runtime_options(runs[at]) == options:
                    watch.doing = f"replaying {at + 1} of {len(runs)}"
                    hooks: dict[str, Any] = {"on_call": steps.call, "on_log": steps.log} if steps is not None else {}
                    done.append(await replay.replay(runtime, runs[at], **given, **hooks))
                    at += 1
        return done

    return run_watched(work)


class Steps:
    """Writes each call and each output of a script while it runs, from one of its calls on."""

    def __init__(self, start: int, console: Console) -> None:
        self._start = start
        self._console = console
        self._is_on = start <= 1

    def call(self, index: int, call: RecordedCall) -> None:
        """A call is about to be answered."""
        self._is_on = self._is_on or index >= self._start
        if not self._is_on:
            return
        answer = jsonable(call.value) if call.code is None else f"{call.code}: {call.message}"
        shown = safe(f"{call.tool}({one_line(json.dumps(jsonable(call.args), ensure_ascii=False), 90)})", "cyan")
        self._console.print(Text.assemble((f"{index:>4}  ", "dim"), shown, (f"  line {call.line}", "dim")))
        self._console.print(safe(f"      -> {one_line(json.dumps(answer, ensure_ascii=False), 110)}"))

    def log(self, stream: str, text: str) -> None:
        """The script printed something."""
        if self._is_on:
            for line in text.rstrip("\n").split("\n"):
                self._console.print(Text.assemble(("      | ", "dim"), safe(line)))


def show(done: Replay, run: RecordedRun, source: str | None, console: Console, is_short: bool) -> None:
    """Write the result of a replay."""
    if done.ok:
        calls = f"{done.answered} of {done.recorded} calls answered from the record"
        partly = "" if done.stopped or not done.not_compared else " as far as it was compared"
        text = f"{done.stopped or 'the same result'}{partly}, {calls}"
        console.print(Text.assemble(("ok  ", "bold green"), safe(f"run {run.id}: {text}")))
    else:
        assert done.divergence is not None
        console.print(Text.assemble(("differs  ", "bold red"), safe(f"run {run.id}: {where(done.divergence)}")))
    if is_short:
        return
    for left_out in done.not_compared:
        console.print(safe(f"not compared: {left_out}", "yellow"))
    for note in done.notes:
        console.print(safe(f"note: {note}", "yellow"))
    if done.divergence is not None:
        _show_divergence(done.divergence, run.source, run.source if source is None else source, console)


def where(found: Divergence) -> str:
    """Return a divergence in one line."""
    at = f"call {found.index}" if found.index is not None else found.kind
    of_record = " as recorded" if found.kind == MISSING_CALL else ""
    line = f", line {found.line}{of_record}" if found.line is not None else ""
    return f"{at}{line}: {found.message}"


def _show_divergence(found: Divergence, recorded: str | None, source: str | None, console: Console) -> None:
    """Quote the lines of the scripts, and write both values."""
    if found.kind == MISSING_CALL:
        _quote("as recorded", recorded, found.line, console)
        _quote("now", source, (found.got or {}).get("line"), console)
    else:
        _quote("", source, found.line, console)
    console.print()
    for name, value, style in (("expected", found.expected, "green"), ("got", found.got, "red")):
        console.print(Text(f"{name:<9}", style), end="")
        write_text(console, one_line(json.dumps(jsonable(value), ensure_ascii=False), 500))


def _quote(title: str, source: str | None, line: int | None, console: Console) -> None:
    if not line or not source:
        return
    console.print()
    if title:
        console.print(Text(title, "dim"))
    for text in excerpt(source, line):
        console.print(text)
