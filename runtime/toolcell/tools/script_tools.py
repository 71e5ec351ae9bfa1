"""Saved scripts as tools of a registry: the latest version under its name, older ones as `NAME_v1` and so on.

A call runs the script in a sandbox of its own, as a part of the run that calls it: under the rules, hooks, budget and
labels of that run, with the tools that its caller may call.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from toolcell.errors import RegistrationError, ToolError, UsageError
from toolcell.tools import script_folder
from toolcell.tools.call import CallableTools, RunContext
from toolcell.tools.code import CodeRuntime, check_code_runtime, run_code
from toolcell.tools.context import ToolContext
from toolcell.tools.descriptions import CODE_TOOL
from toolcell.tools.names import check_collisions
from toolcell.tools.registry_state import identities
from toolcell.tools.result import ErrorCode, ToolResult
from toolcell.tools.saved_script import MAX_VERSION, SavedScript, saved_script, tools_mentioned
from toolcell.tools.sources import ConnectedRegistry
from toolcell.tools.spec import RegisteredTool, ToolSpec, compile_tool
from toolcell.tools.view import RegistryView

MAX_NESTED: Final = 4
"""Saved scripts that run inside one another. Each of them holds a sandbox."""


class ScriptRegistry(ConnectedRegistry):
    """The part of a registry that keeps scripts as tools."""

    _lock: threading.RLock

    @abstractmethod
    def _put(self, new: Sequence[RegisteredTool], replace: bool) -> None:
        """Register tools."""

    def save_script(
        self,
        name: str,
        source: str,
        *,
        inputs: Mapping[str, Any] | type | None = None,
        description: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        runtime: CodeRuntime | None = None,
        tools: CallableTools | None = None,
        **options: Any,
    ) -> SavedScript:
        """Make a script a tool of this name. Saving it again with other content makes the next version.

        `inputs`: JSON Schema of the arguments, or a record type; each is a name in the script. `folder`: where it is
        kept as files, for `load_scripts` and `toolcell tools check`. `runtime`: where it runs; None: in the runtime of
        the run that calls it, else in that of `enable_code_execution`. `tools`: what it may call; None: what its caller
        may call. `options` are those of `ToolOptions`. An older version stays as the tool `NAME_v1`.

        Raises:
            RegistrationError: another tool has the name; or name, inputs, description or an option are wrong.
            UsageError: the source is empty or too large, or the folder cannot be read or written.
        """
        self._check_open()
        script = saved_script(name, source, inputs, description, options)
        target = _Target(runtime, tools)
        with self._lock:
            compile_tool(target.spec(script))
            self._check_free(name)
            script = replace(script, tools=tools_mentioned(source, self.state.tools.values()))
            versions = self._versions(name)
            if folder is not None:
                self._check_next(script, script_folder.load(folder, name) if os.path.isdir(folder) else (), target)
                latest = script_folder.save(folder, script)
                versions = {each.version: each for each in script_folder.load(folder, name)} | {latest.version: latest}
            elif versions and versions[max(versions)].digest == script.digest:
                latest = replace(script, version=max(versions))
            else:
                latest = replace(script, version=max(versions, default=0) + 1)
            if latest.version > MAX_VERSION:
                raise RegistrationError(f"script {name!r} has {MAX_VERSION} versions; save it under another name")
            self._put_versions({**versions, latest.version: latest}, target)
            return latest

    def load_scripts(
        self,
        folder: str | os.PathLike[str],
        *,
        runtime: CodeRuntime | None = None,
        tools: CallableTools | None = None,
    ) -> list[SavedScript]:
        """Make tools of the scripts that were saved in a folder; return the latest version of each.

        Raises:
            RegistrationError: the name of a script is taken by another tool. No script was registered.
            UsageError: the folder cannot be read, or a file in it is damaged or was changed by hand.
        """
        self._check_open()
        target, found = _Target(runtime, tools), dict[str, dict[int, SavedScript]]()
        for each in script_folder.load(folder):
            found.setdefault(each.name, {})[each.version] = each
        with self._lock:
            for name in found:
                self._check_free(name)
            made = [tool for versions in found.values() for tool in self._tools_of(versions, target)]
            self._put(made, replace=True)
        return [versions[max(versions)] for versions in found.values()]

    def _check_free(self, name: str) -> None:
        known = self.state.tools.get(name)
        if known is not None and not isinstance(known.spec.source, SavedScript):
            raise RegistrationError(f"{name!r} is already the name of a tool; save the script under another name")

    def _check_next(self, script: SavedScript, saved: Sequence[SavedScript], target: _Target) -> None:
        """Refuse a script that could not be registered beside the other tools: nothing of it is to be written then."""
        versions = {each.version: each for each in saved}
        if not saved or saved[-1].digest != script.digest:
            versions[max(versions, default=0) + 1] = script
        made = {tool.name: tool for tool in self._tools_of(versions, target)}
        check_collisions([*made], identities({**self.state.tools, **made}))

    def _versions(self, name: str) -> dict[int, SavedScript]:
        """Return the versions of a script that are registered."""
        sources = [tool.spec.source for tool in self.state.tools.values()]
        return {each.version: each for each in sources if isinstance(each, SavedScript) and each.name == name}

    def _put_versions(self, versions: Mapping[int, SavedScript], target: _Target) -> None:
        self._put(self._tools_of(versions, target), replace=True)

    def _tools_of(self, versions: Mapping[int, SavedScript], target: _Target) -> list[RegisteredTool]:
        """Return the tools of one script's versions.

        Raises:
            RegistrationError: the name of an old version is taken.
        """
        made = []
        settings = self.state.settings
        for number, script in sorted(versions.items()):
            tool = compile_tool(target.spec(script), coercion=settings.coercion, extras=settings.extras)
            if number != max(versions):
                tool = tool.renamed(f"{script.name}_v{number}")  # rules about the name hold for it too
                known = self.state.tools.get(tool.name)
                if known is not None and getattr(known.spec.source, "name", "") != script.name:
                    raise RegistrationError(f"{tool.name!r} is the name of a tool and of a version of {script.name!r}")
            made.append(tool)
        return made


class _Target:
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
        runtime = self._runtime or run.runtime or _code_runtime(call.registry)
        if runtime is None:
            raise ToolError(
                f"script {script.name!r} has no Runtime to run in: give save_script or load_scripts runtime=..., or "
                "call it from a script or plan of a Runtime",
                code=ErrorCode.UNAVAILABLE,
            )
        run = run.child(scripts=(*run.scripts, script.name))
        registry: Any = call.registry
        if self._tools is not None:  # other tools, under the rules and hooks of those who call
            run = run.child(hooks=(*run.hooks, *registry.hooks), policies=(*run.policies, *registry.policies))
            registry = self._tools
        inputs = script.values(call.args)
        result = await run_code(runtime, registry, script.source, run, context.update, inputs=inputs)
        if result.is_error:
            return result.with_message(f"script {script.name} (version {script.version}): {result.message}")
        return result if result.has_value else replace(result, value=None, has_value=True)


def _check_nesting(script: SavedScript, run: RunContext) -> None:
    """Refuse a script that is running already further up, and too many inside one another.

    Raises:
        ToolError: it is one of these.
    """
    path = " -> ".join((*run.scripts, script.name))
    if script.name in run.scripts:
        raise ToolError(f"script {script.name!r} is already running further up: {path}")
    if len(run.scripts) >= MAX_NESTED:
        raise ToolError(f"saved scripts may run {MAX_NESTED} deep inside one another, and this is one more: {path}")


def _code_runtime(registry: object) -> Any:
    """Return the runtime of the registry's execute_code, if it has one."""
    tool = registry.registered(CODE_TOOL) if isinstance(registry, RegistryView) else None
    return tool.spec.source if tool is not None else None
