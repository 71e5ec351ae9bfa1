"""A tool as the registry keeps it: definition, options, compiled checks and one way of being invoked.

Whatever spec a tool was written in, `adapters` turns it into tools; nothing past this point knows the specs.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from toolcell.errors import RegistrationError
from toolcell.tools.argument_parsing import ArgumentError
from toolcell.tools.arguments import ArgumentChecker, CheckedArguments, InvalidArguments
from toolcell.tools.call import Call
from toolcell.tools.definition import ToolDefinition, check_definition
from toolcell.tools.options import Coercion, Extras, ToolOptions
from toolcell.tools.result import ToolResult
from toolcell.tools.values import path_text

if TYPE_CHECKING:
    from toolcell.tools.policy import CallPolicy
    from toolcell.tools.registry_state import RegistryState

Prepare = Callable[[dict[str, Any]], Any]
Invoke = Callable[[Call], Any]
Decode = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """What an adapter says about one function of a tool."""

    definition: ToolDefinition
    invoke: Invoke | None
    """None: a tool that cannot run."""
    options: ToolOptions
    source: Any
    """What the user registered."""
    prepare: Prepare | None = None
    decode: Decode | None = None
    """Makes the declared Python types out of validated JSON arguments."""
    args_prefix: str | None = None
    """Begins every message about arguments that cannot be used."""
    describe: Callable[[RegistryState, tuple[CallPolicy, ...]], str] | None = None
    """Makes the description out of what else is on offer, for tools whose use depends on it."""
    requires_result: bool = False
    """Returning None is a mistake of the tool, not an empty result."""


class ToolIdentity:
    """Identity of a tool under whatever names, for limits of its own."""


@dataclass(frozen=True, slots=True)
class RegisteredTool:
    """One callable name of a registry."""

    name: str
    spec: ToolSpec
    options: ToolOptions
    checker: ArgumentChecker
    aliases: tuple[str, ...]
    """Every name the tool ever went by, this one included: a rule about one is a rule about all."""
    identity: ToolIdentity = field(default_factory=ToolIdentity)

    @property
    def timeout_s(self) -> float | None:
        """Its own; orchestrating tools end with what they run, so without one of their own they have none."""
        options = self.options
        return math.inf if options.orchestrates and options.timeout_s is None else options.timeout_s

    @property
    def definition(self) -> ToolDefinition:
        """What the model sees, under this tool's name."""
        definition = self.spec.definition
        return definition if definition.name == self.name else definition.renamed(self.name)

    def check(self, received: Any) -> CheckedArguments:
        """Arguments fit for the tool.

        Raises:
            NotPrepared: they are not, and why.
        """
        try:
            return self.checker.check(received)
        except InvalidArguments as exc:
            fields = {path_text(problem.path): problem.message for problem in exc.problems}
            raise ArgumentError(f"invalid tool arguments: {exc}", fields=fields) from exc

    def decode(self, args: dict[str, Any]) -> dict[str, Any]:
        """Validated arguments as the Python types the tool declares.

        Raises:
            NotPrepared: a type has rules its JSON Schema cannot express, and they are not met.
        """
        assert self.spec.decode is not None
        try:
            return self.spec.decode(args)
        except (ValueError, TypeError) as exc:
            problem = f'invalid tool arguments: validation failed for tool "{self.name}":\n  - {exc}'
            raise ArgumentError(problem) from exc

    def renamed(self, name: str) -> RegisteredTool:
        """The same tool under another name; rules about the old name still hold."""
        renamed = replace(self.spec, definition=self.definition.renamed(name))
        check_definition(renamed.definition)
        checker = self.checker.renamed(name)
        return RegisteredTool(name, renamed, self.options, checker, (*self.aliases, name), self.identity)


def compile_tool(spec: ToolSpec, *, coercion: Coercion = "safe", extras: Extras = "drop") -> RegisteredTool:
    """Check a tool and compile what its calls will need.

    Raises:
        RegistrationError: its definition is wrong.
    """
    check_definition(spec.definition)
    options = spec.options
    if options.orchestrates and options.exclusive_group is not None:
        raise RegistrationError(
            f"tool {spec.definition.name!r}: a tool that runs others cannot hold an exclusive group while it waits"
        )
    checker = ArgumentChecker(
        spec.definition, options.coercion or coercion, options.extras or extras, validate=options.validate
    )
    name = spec.definition.name
    return RegisteredTool(name, spec, options, checker, (name,))


Proceed = Callable[[], Awaitable[ToolResult]]
Middleware = Callable[[Call, Proceed], Awaitable[ToolResult]]
"""Around the execution of a call: `async def middleware(call, proceed): ...; return await proceed()`."""
