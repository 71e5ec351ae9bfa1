"""Saved scripts as tools of a registry: the latest version under its name, older ones as `NAME_v1` and so on.

A call runs the script in a sandbox of its own, as a part of the run that calls it: under the rules, hooks, budget and
labels of that run, with the tools that its caller may call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.context import ToolContext
from toolcell.calls.names import check_collisions
from toolcell.calls.result import ErrorCode, ToolResult
from toolcell.errors import RegistrationError, ToolError, UsageError
from toolcell.tools.code import CodeRuntime, check_code_runtime, run_code
from toolcell.tools.registry_state import RegistryState, identities
from toolcell.tools.saved_script import MAX_VERSION, SavedScript, tools_mentioned
from toolcell.tools.spec import RegisteredTool, ToolSpec, compile_tool

MAX_NESTED: Final = 4
"""Saved scripts that run inside one another. Each of them holds a sandbox."""


def save(
    script: SavedScript, state: RegistryState, target: ScriptTarget, folder: str | os.PathLike[str] | None
) -> tuple[SavedScript, Sequence[RegisteredTool]]:
    """Make the next version of a script, and write it into the folder. Return it, and the tools of all versions.

    Raises:
        RegistrationError: another tool has the name, or there are too many versions.
        UsageError: the folder cannot be read or written.
    """
    compile_tool(target.spec(script))
    _check_free(script.name, state)
    script = replace(script, tools=tools_mentioned(script.source, state.tools.values()))
    versions = _versions(script.name, state)
    if folder is not None:
        from toolcell.tools import script_folder

        known = script_folder.load_scripts(folder, script.name) if os.path.isdir(folder) else ()
        _check_next(script, known, state, target)
        latest = script_folder.save(folder, script)
        saved = script_folder.load_scripts(folder, script.name)
        versions = {each.version: each for each in saved} | {latest.version: latest}
    elif versions and versions[max(versions)].digest == script.digest:
        latest = replace(script, version=max(versions))
    else:
        latest = replace(script, version=max(versions, default=0) + 1)
    if latest.version > MAX_VERSION:
        raise RegistrationError(f"script {script.name!r} has {MAX_VERSION} versions; save it under another name")
    return latest, _tools_of_versions({**versions, latest.version: latest}, state, target)


def saved_in(folder: str | os.PathLike[str]) -> dict[str, dict[int, SavedScript]]:
    """Return the scripts that were saved in a folder: for each name, its versions by number.

    Raises:
        UsageError: the folder cannot be read, or a file in it is damaged or was changed by hand.
    """
    from toolcell.tools.script_folder import load_scripts

    found = dict[str, dict[int, SavedScript]]()
    for each in load_scripts(folder):
        found.setdefault(each.name, {})[each.version] = each
    return found


def tools_of(
    saved: Mapping[str, Mapping[int, SavedScript]], state: RegistryState, target: ScriptTarget
) -> list[RegisteredTool]:
    """Return saved scripts as tools.

    Raises:
        RegistrationError: the name of a script is taken by another tool.
    """
    for name in saved:
        _check_free(name, state)
    return [tool for versions in saved.values() for tool in _tools_of_versions(versions, state, target)]


def _check_free(name: str, state: RegistryState) -> None:
    known = state.tools.get(name)
    if known is not None and not isinstance(known.spec.source, SavedScript):
        raise RegistrationError(f"{name!r} is already the name of a tool; save the script under another name")


def _check_next(script: SavedScript, saved: Sequence[SavedScript], state: RegistryState, target: ScriptTarget) -> None:
    """Refuse a script that could not be registered beside the other tools: nothing of it is to be written then."""
    versions = {each.version: each for each in saved}
    if not saved or saved[-1].digest != script.digest:
        versions[max(versions, default=0) + 1] = script
    made = {tool.name: tool for tool in _tools_of_versions(versions, state, target)}
    check_collisions([*made], identities({**state.tools, **made}))


def _versions(name: str, state: RegistryState) -> dict[int, SavedScript]:
    """Return the versions of a script that are registered."""
    sources = [tool.spec.source for tool in state.tools.values()]
    return {each.version: each for each in sources if isinstance(each, SavedScript) and each.name == name}


def _tools_of_versions(
    versions: Mapping[int, SavedScript], state: RegistryState, target: ScriptTarget
) -> list[RegisteredTool]:
    """Return the tools of one script's versions.

    Raises:
        RegistrationError: the name of an old version is taken.
    """
    made = []
    for number, script in sorted(versions.items()):
        tool = compile_tool(target.spec(script), coercion=state.settings.coercion, extras=state.settings.extras)
        if number != max(versions):
            tool = tool.renamed(f"{script.name}_v{number}")  # rules about the name hold for it too
            known = state.tools.get(tool.name)
            if known is not None and not _is_version_of(script.name, known):
                raise RegistrationError(f"{tool.name!r} is the name of a tool and of a version of {script.name!r}")
        made.append(tool)
    return made


def _is_version_of(name: str, tool: RegisteredTool) -> bool:
    source = tool.spec.source
    return isinstance(source, SavedScript) and source.name == name


class ScriptTarget:
    """Where saved scripts run, and what they may call there."""

    def __init__(self, runtime: CodeRuntime | None, tools: CallableTools | None) -> None:
        if runtime is not None:
            check_code_runtime(runtime, "a saved script")
        if not (tools is None or hasattr(tools, "snapshot")):
            raise UsageError(
                f"tools= takes a ToolRegistry, not {type(tools).__name__}; some tools are registry.subset(...)"
            )
        self._runtime, self._tools = runtime, tools

    def spec(self, script: SavedScript) -> ToolSpec:
        """Return a script as a tool."""

        async def invoke(context: ToolContext) -> ToolResult:
            return await self._run(script, context)

        return ToolSpec(
            definition=script.definition,
            invoke=invoke,
            options=script.tool_options(),
            source=script,
            requires_result=True,
        )

    async def _run(self, script: SavedScript, context: ToolContext) -> ToolResult:
        call, run = context.call, context.run
        _check_nesting(script, run)
        runtime = self._runtime or run.scope.runtime or call.registry.code_runtime
        if runtime is None:
            raise ToolError(
                f"script {script.name!r} has no Runtime to run in: give save_script or load_scripts runtime=..., or "
                "call it from a script or plan of a Runtime",
                code=ErrorCode.UNAVAILABLE,
            )
        run = run.within(scripts=(*run.scope.scripts, script.name))
        registry: Any = call.registry
        if self._tools is not None:  # other tools, under the rules and hooks of those who call
            run = run.within(
                hooks=(*run.scope.hooks, *registry.hooks), policies=(*run.scope.policies, *registry.policies)
            )
            registry = self._tools
        inputs = script.values(call.args)
        result = await run_code(runtime, registry, script.source, run, context.update, inputs=inputs)
        if result.error is not None:
            message = f"script {script.name} (version {script.version}): {result.message}"
            return replace(result, error=replace(result.error, message=message))
        return result if result.has_value else replace(result, value=None, has_value=True)


def _check_nesting(script: SavedScript, run: RunContext) -> None:
    """Refuse a script that is running already further up, and too many inside one another.

    Raises:
        ToolError: it is one of these.
    """
    path = " -> ".join((*run.scope.scripts, script.name))
    if script.name in run.scope.scripts:
        raise ToolError(f"script {script.name!r} is already running further up: {path}")
    if len(run.scope.scripts) >= MAX_NESTED:
        raise ToolError(f"saved scripts may run {MAX_NESTED} deep inside one another, and this is one more: {path}")
