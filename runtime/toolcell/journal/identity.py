"""The identity of a call: its tool and its arguments in canonical form, and digests of both and of a registry."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, Final

from toolcell.calls.call import CallableTools
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.options import DEFAULT_TOOL_OPTIONS, Origin, ToolOptions
from toolcell.calls.values import in_thread_if_large
from toolcell.support.packing import bytes_digest, pack
from toolcell.tools.registry import ToolRegistry
from toolcell.tools.spec import RegisteredTool

NESTED: Final = frozenset({dict, list})
"""A call for each number in a large value would take most of the time."""


def canonical(value: Any) -> Any:
    """Return plain data with the keys of every dict in order: the order of arguments does not tell calls apart."""
    if type(value) is dict:
        keys = sorted(value, key=str)
        return {key: canonical(item) if type(item := value[key]) in NESTED else item for key in keys}
    if type(value) is list:
        return [canonical(item) if type(item) in NESTED else item for item in value]
    return value


def call_digest(tool: str, args: Any) -> str:
    """Return the sha256 of a tool's name and arguments, in hex."""
    return bytes_digest(pack([tool, canonical(dict(args) if not isinstance(args, str) else args)]))


async def digest_of_call(tool: str, args: Any) -> str:
    """Return the same as `call_digest`. Large arguments are sorted and hashed in a thread: it may take 0.1 s."""
    return await in_thread_if_large(args, partial(call_digest, tool, args))


def options_of(tools: CallableTools, name: str, args: Any = None) -> ToolOptions:
    """Return what is known about a tool, or about its call with `args`. One that is not there any more counts as one
    that writes."""
    registered = tools.registered(name) if isinstance(tools, ToolRegistry) else None
    if registered is not None and registered.spec.choose is not None and args is not None:
        chosen = registered.spec.choose(args, None)
        return chosen.options if isinstance(chosen, RegisteredTool) else DEFAULT_TOOL_OPTIONS
    return registered.options if registered is not None else DEFAULT_TOOL_OPTIONS


def tool_digests(tools: CallableTools, origin: Origin = Origin.CODE) -> dict[str, str]:
    """Return the sha256 of what a caller from `origin` may call.

    Shape: name to digest of parameters and of the rules for repeating it.
    """
    found = {}
    for each in tools.definitions(origin):
        options = options_of(tools, each.name)
        rules = (options.read_only, options.idempotent, options.requires_approval)
        found[each.name] = _tool_digest(each, rules, options.reads, options.sends)
    return found


@functools.lru_cache(maxsize=4096)
def _tool_digest(
    tool: ToolDefinition, rules: tuple[bool | None, ...], reads: frozenset[str], sends: frozenset[str]
) -> str:
    return bytes_digest(pack([tool.name, canonical(tool.parameters), [*rules, sorted(reads), sorted(sends)]]))


def registry_digest(digests: dict[str, str]) -> str:
    """Return one digest of what `tool_digests` returned."""
    return bytes_digest(pack(canonical(digests)))
