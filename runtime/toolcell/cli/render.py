"""The parts of a run's result, for a person to read. Text of a script or a tool is never parsed as markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from toolcell.cli.terminal import safe, value_text, write_text
from toolcell.results import ErrorInfo, ExecutionResult, OutputFile, ToolCallRecord
from toolcell.support.text import counted, duration, for_terminal, one_line, shown_findings, size

CONTEXT_LINES = 2
"""Source lines shown before and after the one that failed."""


def show_result(result: ExecutionResult, source: str, out: Console, err: Console) -> None:
    """Write a run's result: its value to `out`, everything about the run to `err`. Its output was shown as it came."""
    if result.has_value:
        show_value(result.value, out)
    show_files(result.files, err)
    for each in result.warnings:
        write_text(err, f"warning: {each}")
    if result.type_findings and not (result.error is not None and result.error.findings):
        write_text(err, f"types: {shown_findings(result.type_findings)}")
    if not result.ok:
        show_failure(result, source, err)
    elif err.is_terminal:
        err.print(safe(summary(result), "dim"))


def show_value(value: Any, console: Console) -> None:
    write_text(console, value_text(value))


def show_failure(result: ExecutionResult, source: str, console: Console) -> None:
    """Write the error as the model would see it, with the source lines around it and the calls already made."""
    error = result.error or ErrorInfo(str(result.outcome), "")
    title = Text(str(result.outcome).replace("_", " "), "bold red")
    if error.type not in (str(result.outcome), ""):
        title.append(f"  {for_terminal(error.type)}", "red")
    console.print(title)
    if error.message and not any(error.message == finding["message"] for finding in error.findings):
        write_text(console, error.message)
    if detail := limit_detail(error):
        console.print(safe(detail))
    for line, column, message in error_locations(error):
        console.print()
        if message:
            console.print(safe(f"line {line}, column {column}: {message}"))
        for text in excerpt(source, line, column):
            console.print(text)
    if error.traceback and error.traceback.count("\n") > 3:  # more than the one frame shown above
        console.print()
        write_text(console, error.traceback.rstrip("\n"))
    if result.calls:
        console.print()
        console.print(Text("calls already made" if len(result.calls) > 1 else "call already made", "bold"))
        show_calls(result.calls, console)
    console.print(safe(summary(result), "dim"))


def limit_detail(error: ErrorInfo) -> str:
    """Name the limit that was hit, its value and what was used; empty when none was."""
    if error.limit is None:
        return ""
    value = "" if error.limit_value is None else f" is {_amount(error.limit, error.limit_value)}"
    used = "" if error.used is None else f", {_amount(error.limit, error.used)} was used"
    if error.used is not None and error.limit_value is not None and error.used < error.limit_value:
        used = f", {_amount(error.limit, error.used)} was in use before that"  # an allocation that was refused
    return f"limit {error.limit}{value}{used} (--{error.limit.replace('_', '-')} changes it)"


def _amount(limit: str, value: float) -> str:
    """Return a value with the unit that ends its field's name."""
    if limit.endswith("_bytes"):
        return size(int(value))
    return f"{value:.3g} s" if limit.endswith("_s") else f"{value:g}"


def error_locations(error: ErrorInfo) -> list[tuple[int, int, str]]:
    """Return (line, column, message) of each place that an error names. An exception's own message is shown already."""
    if error.findings:
        return [(int(f["line"]), int(f["column"]), str(f["message"])) for f in error.findings]
    return [(error.line, error.column or 0, "")] if error.line else []


def excerpt(source: str, line: int, column: int = 0) -> list[Text]:
    """The lines around `line` with their numbers, the line itself marked, and a caret under `column`."""
    lines = source.rstrip("\n").split("\n")
    if not 1 <= line <= len(lines):
        return []
    first, last = max(1, line - CONTEXT_LINES), min(len(lines), line + CONTEXT_LINES)
    width = len(str(last))
    shown = []
    for number in range(first, last + 1):
        is_it = number == line
        gutter = f"{'>' if is_it else ' '} {number:>{width}} | "
        shown.append(Text.assemble((gutter, "bold red" if is_it else "dim"), safe(lines[number - 1].rstrip("\r"))))
        if is_it and column:
            before = for_terminal(lines[number - 1][: column - 1]).replace("\t", "        ")
            shown.append(Text(f"  {'':>{width}} | {' ' * len(before)}^", "bold red"))
    return shown


def show_calls(calls: Iterable[ToolCallRecord], console: Console) -> None:
    """Write one line per call: id, name, arguments, status, duration, and the line that made it."""
    for call in calls:
        line = Text.assemble(
            (f"{call.id:>7}  ", "dim"),
            safe(one_line(call.name, 40), "cyan"),
            safe(f"({one_line(call_arguments(call.args), 80)})"),
            (f"  {for_terminal(call.status)}", "green" if call.status == "ok" else "red"),
            (f"  {duration(call.duration_s)}", "dim"),
            (f"  line {call.line}" if call.line else "", "dim"),
        )
        console.print(line)
        if call.status != "ok" and call.message:
            console.print(safe(f"      {one_line(call.message)}", "red"))


def call_arguments(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in args.items())


def show_files(files: Iterable[OutputFile], console: Console) -> None:
    """Write one line per returned file."""
    for file in files:
        about = file.problem or f"{file.media_type}, {size(file.size)}"
        console.print(Text.assemble(("file  ", "dim"), safe(one_line(file.name), "cyan"), safe(f"  {one_line(about)}")))


def summary(result: ExecutionResult) -> str:
    """Return one line: outcome, time, calls, memory."""
    usage = result.usage
    parts = [str(result.outcome).replace("_", " "), duration(usage.wall_s), f"cpu {duration(usage.cpu_s)}"]
    if usage.peak_memory_bytes:
        parts.append(size(usage.peak_memory_bytes))
    parts.append(counted(len(result.calls), "tool call"))
    parts.append(f"isolation {result.isolation.backend}: {len(result.isolation.layers)} layers")
    return ", ".join(parts)
