"""`toolcell demo`: run a script as a model would write it, which calls tools from a sandbox; then try two attacks.

The tools read toolcell's own source files. These are not in the sandbox, so the script can read them only
through tool calls.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

import toolcell_bridge
from toolcell._version import FOLDER
from toolcell.cli import exits, render
from toolcell.cli.execution import Watch, run_watched
from toolcell.cli.flags import command
from toolcell.cli.terminal import output, safe, stdout
from toolcell.config import Policy, PoolConfig, Profile
from toolcell.results import ExecutionResult
from toolcell.support.text import one_line
from toolcell.tools import ToolRegistry

SCRIPT = """\
# Which modules of toolcell are largest, and how much of them explains itself?
names = call_tool("list_modules")
print(f"reading {len(names)} modules at once")
sources = call_tools_parallel([("read_module", {"name": name}) for name in names])

rows = []
for name, text in zip(names, sources):
    lines = text.splitlines()
    explained = sum(line.lstrip().startswith(("#", '\"\"\"')) for line in lines)
    rows.append({"module": name, "lines": len(lines), "explained": explained})

rows.sort(key=lambda row: row["lines"], reverse=True)
note = tools.save_note(title="largest modules", text=", ".join(row["module"] for row in rows[:3]))
set_result({"largest": rows[:3], "total_lines": sum(row["lines"] for row in rows), "note": note})
"""

ATTACKS: dict[str, str] = {
    "read the host's password file": "open('/etc/shadow').read()",
    "open a connection to the network": "import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=2)",
}

HELD_BY: dict[str, tuple[str, ...]] = {
    "read the host's password file": ("mount", "landlock"),
    "open a connection to the network": ("net", "seccomp"),
}
"""Layers that refuse each attack, wherever they are live."""

MODULES = 8
"""As many as the calls that run at once by default."""


def demo(
    profile: Annotated[
        Profile, typer.Option("--profile", help="How to isolate: full, container, or the strongest that runs here.")
    ] = "auto",
    record: Annotated[
        str | None, typer.Option("--record", metavar="FILE", help="Record the runs in this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the results as one JSON document.")] = False,
) -> None:
    """Show a script that calls three tools from a sandbox, and two attacks that fail."""
    results = run_watched(partial(_run_all, Policy(profile=profile), record))
    scripted, attacks = results[0], dict(zip(ATTACKS, results[1:], strict=True))
    held = scripted.ok and not any(result.ok for result in attacks.values())
    shown = {"script": scripted.to_dict(), "attacks": {name: each.to_dict() for name, each in attacks.items()}}
    output({"ok": held, **shown}, as_json, lambda: _show(scripted, attacks, stdout()))
    raise typer.Exit(exits.OK if held else exits.FAILED)


async def _run_all(policy: Policy, record: str | None, watch: Watch) -> list[ExecutionResult]:
    from toolcell.runtime import Runtime

    async with Runtime(make_tools(), policy=policy, pool=PoolConfig(warm=1), record=record) as runtime:
        watch.doing = "running"
        return [
            await runtime.execute_code(source, cancel=watch.cancel, on_log=lambda _, text: watch.say(text))
            for source in (SCRIPT, *ATTACKS.values())
        ]


def make_tools() -> ToolRegistry:
    """Three tools that work on this machine's files."""
    registry = ToolRegistry()
    roots = [Path(FOLDER), Path(toolcell_bridge.__file__ or "").parent]
    modules = {f"{root.name}/{path.relative_to(root)}": path for root in roots for path in sorted(root.rglob("*.py"))}
    notes: list[str] = []

    @registry.tool
    def list_modules() -> list[str]:
        """List some modules of the installed toolcell package, the largest ones first."""
        return sorted(modules, key=lambda name: modules[name].stat().st_size, reverse=True)[:MODULES]

    @registry.tool
    async def read_module(name: str) -> str:
        """Return the source of one module of the installed toolcell package."""
        return modules[name].read_text(encoding="utf-8")

    @registry.tool
    async def save_note(title: str, text: str) -> str:
        """Keep a note for later and return where it was put."""
        notes.append(f"{title}: {text}")
        return f"note {len(notes)}"

    return registry


def _show(scripted: ExecutionResult, attacks: dict[str, ExecutionResult], console: Console) -> None:
    _heading(console, "1. A script as a model writes it")
    for number, line in enumerate(SCRIPT.splitlines(), 1):
        console.print(Text.assemble((f"{number:>4}  ", "dim"), line))
    _heading(console, "2. What it did, from inside a sandbox")
    console.print(Text("tool calls", "bold"))
    render.show_calls(scripted.calls, console)
    console.print(Text("printed", "bold"))
    console.print(safe(f"      {scripted.logs.text.rstrip()}"))
    console.print(Text("result", "bold"))
    if scripted.ok:
        render.show_value(scripted.value, console)
    else:
        render.show_failure(scripted, SCRIPT, console)
    console.print(safe(render.summary(scripted), "dim"))
    profile = scripted.isolation.profile
    _heading(console, f"3. Its isolation, the profile {profile}" if profile else "3. Its isolation")
    for name, detail in scripted.isolation.layers.items():
        console.print(Text.assemble(("  live  ", "green"), (f"{name:<14}", "bold"), safe(one_line(str(detail), 80))))
    if missing := ", ".join(scripted.isolation.missing):
        console.print(Text.assemble(("  none  ", "yellow"), (missing, "bold"), ("  (see toolcell doctor)", "dim")))
    _heading(console, "4. Two attacks")
    for name, result in attacks.items():
        _show_attack(name, ATTACKS[name], result, console)


def _show_attack(name: str, source: str, result: ExecutionResult, console: Console) -> None:
    status = ("SUCCEEDED", "bold red") if result.ok else ("refused", "green")
    console.print(Text.assemble(("  ", ""), status, f"  {name}"))
    for line in source.splitlines():
        console.print(safe(f"           {line}", "dim"))
    if result.error is not None:
        console.print(safe(f"           -> {one_line(f'{result.error.type}: {result.error.message}', 90)}", "yellow"))
        held = [layer for layer in HELD_BY[name] if layer in result.isolation.layers]
        console.print(Text(f"           held by {' and '.join(held)}", "dim"))


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold cyan"))


register = command(demo)
