"""The identity of a call: its tool and its arguments in canonical form, and digests of both and of a registry."""

from __future__ import annotations

from typing import Any, Final

from toolcell.packing import bytes_digest, pack
from toolcell.tools.call import CallableTools
from toolcell.tools.options import DEFAULT_TOOL_OPTIONS, Origin, ToolOptions
from toolcell.tools.view import RegistryView

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
    plain = dict(args) if not isinstance(args, str) else args
    return bytes_digest(pack([tool, canonical(plain)]))


def options_of(tools: CallableTools, name: str) -> ToolOptions:
    """Return what is known about a tool. One that is not there any more counts as one that writes."""
    registered = tools.registered(name) if isinstance(tools, RegistryView) else None
    return registered.options if registered is not None else DEFAULT_TOOL_OPTIONS


def tool_digests(tools: CallableTools, origin: Origin = Origin.CODE) -> dict[str, str]:
    """Return the sha256 of what a caller from `origin` may call.

    Shape: name to digest of parameters and of the rules for repeating it.
    """
    found = {}
    for each in tools.definitions(origin):
        options = options_of(tools, each.name)
        rules: list[Any] = [options.read_only, options.idempotent, options.requires_approval]
        rules += [sorted(options.reads), sorted(options.sends)]
        found[each.name] = bytes_digest(pack([each.name, canonical(each.parameters), rules]))
    return found


def registry_digest(digests: dict[str, str]) -> str:
    """Return one digest of what `tool_digests` returned."""
    return bytes_digest(pack(canonical(digests)))
