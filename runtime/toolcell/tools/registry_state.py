"""What a registry knows at one moment, as frozen data: tools, hooks, rules, settings. And what follows from it.

A run keeps the state it started with; changing a registry makes a new one. Rules are the exception: a policy is
shared, so that forbidding a tool counts at once and everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from toolcell.tools.definition import ToolDefinition
from toolcell.tools.execution import DEFAULT_TIMEOUT_S
from toolcell.tools.hooks import Hook
from toolcell.tools.options import Coercion, Extras, Origin
from toolcell.tools.policy import CallPolicy
from toolcell.tools.spec import Middleware, RegisteredTool

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

    def visible(self, origin: Origin, policies: tuple[CallPolicy, ...] = ()) -> Iterator[RegisteredTool]:
        """What a caller from `origin` is told about, in order of registration."""
        every = (*policies, *self.policies)
        advertised = all(policy.advertise_blocked for policy in every)
        for tool in self.tools.values():
            if tool.options.allows(origin) and (advertised or is_permitted(tool, origin, every)):
                yield tool

    def definition(self, tool: RegisteredTool, policies: tuple[CallPolicy, ...] = ()) -> ToolDefinition:
        """What a model is told about one tool, given everything else on offer."""
        definition = tool.definition
        if tool.spec.describe is None:
            return definition
        return ToolDefinition(tool.name, tool.spec.describe(self, policies), definition.parameters)


def is_permitted(tool: RegisteredTool, origin: Origin, policies: tuple[CallPolicy, ...]) -> bool:
    """True when no rule forbids the tool under any of its names."""
    aliases = tool.aliases
    if len(aliases) == 1:
        name = aliases[0]
        for policy in policies:  # noqa: SIM110  a loop is faster than all(), and this is asked of every call
            if not policy.permits(name, origin):
                return False
        return True
    return all(_permits_one_of(policy, aliases, origin) for policy in policies)


def _permits_one_of(policy: CallPolicy, names: tuple[str, ...], origin: Origin) -> bool:
    if any(policy.blocks(name, origin) for name in names):
        return False
    return any(policy.permits(name, origin) for name in names)
