"""Check saved scripts against the tools of today: which of them would break, and where.

Scripts are read and type-checked in sandboxes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import anyio

from toolcell.calls.options import Origin
from toolcell.control.type_check import TypeChecker
from toolcell.errors import ToolcellError
from toolcell.results import Preflight
from toolcell.tools.registry import ToolRegistry
from toolcell.tools.saved_script import SavedScript, load_scripts
from toolcell.tools.stubs import mapping

ScriptStatus = Literal["ok", "may break", "breaks"]

_EXAMPLES: Final[Mapping[Any, Any]] = {
    "string": "",
    "integer": 0,
    "number": 0.0,
    "boolean": False,
    "array": [],
    "object": {},
}
"""A value of each type that a schema names: what the type checker takes the input for."""


@dataclass(frozen=True, slots=True)
class ScriptFinding:
    """One thing that is wrong in a script, or that could not be found out."""

    status: ScriptStatus
    """What it does to the script."""
    message: str
    tool: str = ""
    line: int | None = None
    """Line of the script, where that is known."""

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        return f"{self.status}: {where}{f'{self.tool}: ' if self.tool else ''}{self.message}"


@dataclass(frozen=True, slots=True)
class ScriptReport:
    """The findings for one version of a saved script."""

    name: str
    version: int
    findings: tuple[ScriptFinding, ...] = ()

    @property
    def status(self) -> ScriptStatus:
        """The worst of the findings."""
        order: tuple[ScriptStatus, ...] = ("breaks", "may break")
        return next((each for each in order if any(found.status == each for found in self.findings)), "ok")

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain data, with its status."""
        return {**asdict(self), "status": self.status}


async def check_script(
    script: SavedScript, tools: ToolRegistry, preflight: Callable[..., Awaitable[Preflight]], checker: TypeChecker
) -> ScriptReport:
    """Compare a saved script with the tools of today. `preflight`: that of an open Runtime.

    Raises:
        UsageError: ty is not installed.
        SandboxUnavailable: no sandbox could be started to read the script in.
    """
    planned = await preflight(script.source, tools=tools)
    found = await checker.findings(script.source, tools, example_inputs(script))
    types = [ScriptFinding("breaks", each["message"], line=each["line"]) for each in found]
    known = set(tools.names(Origin.CODE))
    unknown = {each.line for each in planned.problems if each.tool not in known}
    findings = [*_of_calls(planned, known, {each.line for each in types})]
    findings += [each for each in types if each.line not in unknown]
    if planned.note:
        is_wrong = planned.error_line is not None
        findings.append(ScriptFinding("breaks" if is_wrong else "may break", planned.note, line=planned.error_line))
    return ScriptReport(script.name, script.version, tuple(findings))


def _of_calls(planned: Preflight, known: set[str], typed_lines: set[int | None]) -> Iterator[ScriptFinding]:
    """Return calls of unknown tools, and missing arguments that the type checker did not find."""
    for call in planned.problems:
        if call.tool not in known:
            yield ScriptFinding("breaks", "there is no tool of this name", call.tool, call.line)
        elif call.line not in typed_lines:
            yield ScriptFinding("breaks", call.problem, call.tool, call.line)


def example_inputs(script: SavedScript) -> dict[str, Any]:
    """Return a value of the right type for each input; None where several types are possible."""
    properties = mapping(script.inputs.get("properties"))
    required = script.inputs.get("required") or ()
    values = {}
    for name, part in properties.items():
        kind = mapping(part).get("type")
        is_given = name in required or mapping(part).get("default") is not None
        values[name] = _EXAMPLES.get(kind) if is_given and isinstance(kind, str) else None
    return values


async def check_scripts(
    folder: Path,
    tools: ToolRegistry,
    runtime: Callable[..., Any],
    on_script: Callable[[str], None] = lambda script: None,
    *,
    every_version: bool = False,
) -> list[ScriptReport]:
    """Check the scripts of a folder, one after the other. `runtime` is the class `Runtime`; `on_script` hears of each.

    Raises:
        UsageError: the folder cannot be read, or a script in it is damaged.
        UsageError, SandboxUnavailable: as from `check_script`.
    """
    scripts = [
        script
        for versions in load_scripts(folder).values()
        for script in (versions.values() if every_version else [versions[max(versions)]])
    ]
    reports, problem = list[ScriptReport](), None
    async with runtime(tools) as opened, anyio.create_task_group() as tasks:
        checker = TypeChecker(runtime, lambda: tasks)
        try:
            for script in scripts:
                on_script(f"{script.name} v{script.version}")
                reports.append(await check_script(script, tools, opened.preflight, checker))
        except ToolcellError as exc:  # raised here, it would come out in a group
            problem = exc
        finally:
            await checker.close()
            tasks.cancel_scope.cancel()
    if problem is not None:
        raise problem
    return reports
