"""What a registry knows at one moment, as frozen data: tools, hooks, rules, settings. And what follows from it.

A run keeps the state it started with; changing a registry makes a new one. Rules are the exception: a policy is
shared, so that forbidding a tool counts at once and everywhere.

Read this before `registry`, which is built on it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, fields, replace
from typing import Any, NamedTuple, get_args

from toolcell.calls.call import RunContext
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.hooks import Hook
from toolcell.calls.names import MAX_NAME_CHARS
from toolcell.calls.options import Coercion, Extras, Origin
from toolcell.calls.policy import CallPolicy
from toolcell.errors import UsageError
from toolcell.support.checks import check_count, check_does, check_kind, check_one_of, check_seconds
from toolcell.support.embeddings import PROVIDERS, EmbeddingProvider
from toolcell.support.spelling import suggestion
from toolcell.tools.spec import Middleware, RegisteredTool
from toolcell_bridge.guest.tool_names import IN_PLACE_OF_DOT, name_meant
from toolcell_bridge.wire.frozen import frozen

DEFAULT_TIMEOUT_S = 60.0
MAX_BATCH = 64


@frozen(kw_only=True)
class RegistrySettings:
    """Defaults for a registry's calls, unless a tool's options differ."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    max_workers: int = 10
    """Calls of one batch, plan or run being executed at once."""
    sequential: bool = False
    """Calls of a run are made one at a time."""
    max_batch: int = MAX_BATCH
    """Calls one model response may ask for; each further one gets an error result."""
    coercion: Coercion = "safe"
    extras: Extras = "drop"
    pending_wait_s: float = 30.0
    """How long a plan step or sandboxed code waits for background work before it gets the job's id instead."""
    max_abandoned_threads: int = 16
    """Threads of synchronous tools that may run on after their calls were given up, in the whole process. From then on
    a tool that has such threads is not started again until one of them ends."""
    repeat_hint: int = 3
    """The same call failing this often in a row makes its error say so."""
    embeddings: EmbeddingProvider | None = None
    """Makes `search_tools` look for likeness of meaning too, not in scripts: a replay finds what its run has found."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "pending_wait_s"):
            check_seconds(name, getattr(self, name))
        for name in ("max_workers", "max_abandoned_threads", "repeat_hint"):
            check_count(name, getattr(self, name), 1)
        check_count("max_batch", self.max_batch, 1, optional=True)
        check_kind("sequential", self.sequential, bool)
        if self.embeddings is not None:
            check_does("embeddings", self.embeddings, EmbeddingProvider, PROVIDERS)
        check_one_of("coercion", self.coercion, get_args(Coercion))
        check_one_of("extras", self.extras, get_args(Extras))


def settings_of(given: RegistrySettings | None, changes: Mapping[str, Any]) -> RegistrySettings:
    """Return settings with some of them changed by name.

    Raises:
        UsageError: there is no such setting.
    """
    check_kind("settings=", given, RegistrySettings, type(None), cure="write settings=RegistrySettings(...)")
    known = [field.name for field in fields(RegistrySettings)]
    for name in changes.keys() - set(known):
        hint = suggestion(name, known, f"the settings are {', '.join(known)}")
        raise UsageError(f"ToolRegistry has no setting {name!r}; {hint}")
    return replace(given or RegistrySettings(), **changes)


class Visible(NamedTuple):
    """What callers from one origin see under some rules."""

    rules: list[tuple[int, bool]]
    tools: tuple[RegisteredTool, ...]
    names: str
    """With a space between two."""


@frozen(kw_only=True)
class RegistryState:
    """One moment of a registry."""

    tools: Mapping[str, RegisteredTool] = field(default_factory=dict)
    hooks: tuple[Hook, ...] = ()
    middleware: tuple[Middleware, ...] = ()
    policies: tuple[CallPolicy, ...] = ()
    settings: RegistrySettings = field(default_factory=RegistrySettings)
    _permissions: dict[tuple[str, Origin], tuple[int, bool]] = field(default_factory=dict, init=False, compare=False)
    """Decisions on registered names, each with the version of the rules it was made under."""
    _visible: dict[Origin, Visible] = field(default_factory=dict, init=False, compare=False)
    """What callers see. Every run asks for it."""

    def permits(self, tool: RegisteredTool, origin: Origin) -> bool:
        """Return whether a call from `origin` passes this registry's rules."""
        version = 0
        for policy in self.policies:  # a version only grows, so their sum changes with each of them
            version += policy.version
        known = self._permissions.get((tool.name, origin))
        if known is None or known[0] != version:
            known = version, permits_all(self.policies, tool, origin)
            self._permissions[tool.name, origin] = known
        return known[1]

    def in_turn(self, run: RunContext) -> bool:
        """Return whether calls of a run are made one at a time."""
        return self.settings.sequential if run.scope.sequential is None else run.scope.sequential

    def visible(self, origin: Origin, policies: tuple[CallPolicy, ...] = ()) -> Iterable[RegisteredTool]:
        """Return the tools that a caller from `origin` sees, in order of registration.

        `policies`: rules besides the registry's own.
        """
        return self._find_visible(origin, policies) if policies else self._seen(origin).tools

    def _seen(self, origin: Origin) -> Visible:
        rules = [(policy.version, policy.advertise_blocked) for policy in self.policies]
        known = self._visible.get(origin)
        if known is None or known.rules != rules:
            tools = tuple(self._find_visible(origin, ()))
            known = self._visible[origin] = Visible(rules, tools, " ".join([tool.name for tool in tools]))
        return known

    def _find_visible(self, origin: Origin, policies: tuple[CallPolicy, ...]) -> Iterator[RegisteredTool]:
        advertised = all(policy.advertise_blocked for policy in (*policies, *self.policies))
        for tool in self.tools.values():
            if not (tool.options.listed and tool.options.allows(origin)):
                continue
            if advertised or (self.permits(tool, origin) and permits_all(policies, tool, origin)):
                yield tool

    def registered_name(self, name: str) -> str:
        """Return the registered name behind one that a provider was given in its place; else `name` itself."""
        if name in self.tools or type(name) is not str or IN_PLACE_OF_DOT not in name or len(name) > MAX_NAME_CHARS:
            return name
        dotted = name.replace(IN_PLACE_OF_DOT, ".")
        return dotted if dotted in self.tools else name_meant(name, self.tools)

    def names_text(self, origin: Origin) -> str:
        """Return the names of the tools that a caller from `origin` sees, with a space between two."""
        return self._seen(origin).names

    def definition(self, tool: RegisteredTool, policies: tuple[CallPolicy, ...] = ()) -> ToolDefinition:
        """Return the definition of one tool that a model sees, given everything else on offer."""
        definition, describe = tool.definition, tool.spec.describe
        if describe is None:
            return definition
        text = describe(lambda origin: self.visible(origin, policies))
        return _described(tool.name, text, definition._checked_json)


@functools.lru_cache(maxsize=64)
def _described(name: str, text: str, parameters_json: str) -> ToolDefinition:
    """Return the same definition for the same text: what was made of definitions, such as an index, is kept by them."""
    return ToolDefinition(name, text, json.loads(parameters_json))


def identities(tools: Mapping[str, RegisteredTool]) -> dict[str, object]:
    """Return what tells tools apart, by name. Names of one tool have the same."""
    return {name: tool.identity for name, tool in tools.items()}


def permits_all(policies: tuple[CallPolicy, ...], tool: RegisteredTool, origin: Origin) -> bool:
    """Return true when no rule forbids the tool under any of its names."""
    return all(_permits_one_of(policy, tool.aliases, origin) for policy in policies)


def _permits_one_of(policy: CallPolicy, names: tuple[str, ...], origin: Origin) -> bool:
    if any(policy.blocks(name, origin) for name in names):
        return False
    return any(policy.permits(name, origin) for name in names)
