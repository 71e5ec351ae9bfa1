"""What a registry knows at one moment, as frozen data: tools, hooks, rules, settings. And what follows from it.

A run keeps the state it started with; changing a registry makes a new one. Rules are the exception: a policy is
shared, so that forbidding a tool counts at once and everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from toolcell.tools.definition import ToolDefinition
from toolcell.tools.hooks import Hook
from toolcell.tools.options import Coercion, Extras, Origin
from toolcell.tools.policy import CallPolicy
from toolcell.tools.spec import Middleware, RegisteredTool

DEFAULT_TIMEOUT_S = 60.0
MAX_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """How a registry's calls behave unless a tool says otherwise."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    max_workers: int = 10
    """Calls of one batch, plan or run being executed at once."""
    sequential: bool = False
    """Batches run one call at a time."""
    max_batch: int = MAX_BATCH
    """Calls one model response may ask for; each further one gets an error result."""
    coercion: Coercion = "safe"
    extras: Extras = "drop"
    pending_wait_s: float = 30.0
    """How long a plan step or sandboxed code waits for background work before it gets the job's id instead."""
    repeat_hint: int = 3
    """The same call failing this often in a row makes its error say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryState:
    """One moment of a registry."""

    tools: Mapping[str, RegisteredTool] = field(default_factory=dict)
    hooks: tuple[Hook, ...] = ()
    middleware: tuple[Middleware, ...] = ()
    policies: tuple[CallPolicy, ...] = ()
    settings: RegistrySettings = field(default_factory=RegistrySettings)
    _permissions: dict[tuple[str, Origin], tuple[int, bool]] = field(default_factory=dict, init=False, compare=False)
    """Decisions on registered names, each with the version of the rules it was made under."""

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

    def visible(self, origin: Origin, policies: tuple[CallPolicy, ...] = ()) -> Iterator[RegisteredTool]:
        """Iterate over the tools that a caller from `origin` sees, in order of registration.

        `policies`: rules besides the registry's own.
        """
        advertised = all(policy.advertise_blocked for policy in (*policies, *self.policies))
        for tool in self.tools.values():
            if not tool.options.allows(origin):
                continue
            if advertised or (self.permits(tool, origin) and permits_all(policies, tool, origin)):
                yield tool

    def definition(self, tool: RegisteredTool, policies: tuple[CallPolicy, ...] = ()) -> ToolDefinition:
        """Return the definition of one tool that a model sees, given everything else on offer."""
        definition, describe = tool.definition, tool.spec.describe
        if describe is None:
            return definition
        text = describe(lambda origin: self.visible(origin, policies))
        return ToolDefinition(tool.name, text, definition.parameters)


def permits_all(policies: tuple[CallPolicy, ...], tool: RegisteredTool, origin: Origin) -> bool:
    """Return true when no rule forbids the tool under any of its names."""
    return all(_permits_one_of(policy, tool.aliases, origin) for policy in policies)


def _permits_one_of(policy: CallPolicy, names: tuple[str, ...], origin: Origin) -> bool:
    if any(policy.blocks(name, origin) for name in names):
        return False
    return any(policy.permits(name, origin) for name in names)
