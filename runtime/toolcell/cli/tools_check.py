"""`toolcell tools check`: which saved scripts today's tools would break, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolcell.cli import exits
from toolcell.cli.arguments import load_registry
from toolcell.cli.execution import Watch, run_watched
from toolcell.cli.terminal import print_json, stdout, write_text
from toolcell.control import ScriptReport, check_scripts
from toolcell.runtime import Runtime
from toolcell.tools import SavedScript, ToolRegistry, load_scripts


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of registry.save_script.")],
    sources: Annotated[
        list[str], typer.Option("--tools", metavar="FILE|MODULE", help="The current tools; repeatable.")
    ],
    every: Annotated[bool, typer.Option("--all-versions", help="Check old versions too, not only the latest.")] = False,
    is_strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 also for scripts that may break.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Check saved scripts against the current tools: removed tools, parameters, types, and use of results.

    A script breaks when a call in it cannot succeed or has a wrong type; it may break when a tool that it calls has
    changed in a way that can matter; otherwise it is changed, or ok. Scripts are read and type-checked in sandboxes.

    Exit status: 0 when no script breaks, 1 when one does, 2 for a wrong folder, file or option, 3 without a sandbox.
    """
    registry = load_registry(sources)
    found = load_scripts(folder)
    latest = {each.name: each for each in found}
    chosen = found if every else list(latest.values())
    registry = registry.merged()  # saved scripts may call each other
    registry.load_scripts(folder)
    reports = run_watched(lambda watch: _reports(chosen, registry, watch))
    if as_json:
        print_json([each.to_plain() for each in reports])
    else:
        write_text(stdout(), "\n".join(_lines(reports)) or "no saved scripts")
    failing = {"breaks", "may break"} if is_strict else {"breaks"}
    if any(each.status in failing for each in reports):
        raise typer.Exit(exits.FAILED)


async def _reports(scripts: list[SavedScript], tools: ToolRegistry, watch: Watch) -> list[ScriptReport]:
    watch.doing = "checking"
    return await check_scripts(scripts, tools, Runtime, lambda script: watch.say(f"{script.name} v{script.version}"))


def _lines(reports: list[ScriptReport]) -> list[str]:
    lines = []
    for each in reports:
        lines.append(f"{each.status:<10} {each.name} v{each.version}")
        lines += [f"           {found}" for found in each.findings]
    return lines
