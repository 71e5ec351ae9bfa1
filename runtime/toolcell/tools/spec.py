"""A tool as the registry stores it: definition, options, compiled checks and one way of invoking it; and all that a
registry knows at one moment.

`adapters` turns objects and records into a `ToolSpec`; nothing past this point knows how a tool was written.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, final, get_args

from toolcell.calls.arguments import ArgumentChecker, ArgumentError, Prepare
from toolcell.calls.call import NO_FEATURES, Call, Feature, Features, Hook, RunContext
from toolcell.calls.concurrency import ToolIdentity, run_in_thread
from toolcell.calls.context import ToolContext
from toolcell.calls.definition import MAX_NAME_CHARS, TakenNames, ToolDefinition, check_definition
from toolcell.calls.options import (
    DEFAULT_TOOL_OPTIONS,
    CallPolicy,
    Coercion,
    Extras,
    Origin,
    ToolOptions,
    refused_arguments,
)
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.calls.values import MAX_LISTED_ERRORS, MAX_MESSAGE_CHARS, MAX_PROBLEMS, MAX_STEP_CHARS, ValueProblem
from toolcell.errors import RegistrationError, UsageError
from toolcell.flows import flow_of
from toolcell.support.checks import (
    brief,
    check_count,
    check_kind,
    check_one_of,
    check_seconds,
    is_async,
    suggestion,
)
from toolcell_bridge.guest.tool_names import IN_PLACE_OF_DOT, name_meant
from toolcell_bridge.wire.frozen import frozen

if TYPE_CHECKING:
    from toolcell.calls.type_schema import Signature

Bind = Callable[[ToolContext], Callable[[], Any]]
"""Puts together what a function is given in one call."""
Invoke = Callable[[ToolContext], Any]
Decode = Callable[[dict[str, Any]], Any]
Offered = Callable[[Origin], "Iterable[RegisteredTool]"]
"""The tools that a caller from some origin may use."""

Proceed = Callable[[], Awaitable[ToolResult]]
Middleware = Callable[[Call, Proceed], Awaitable[ToolResult]]
"""Around the execution of a call: `async def middleware(call, proceed): ...; return await proceed()`."""


@frozen(kw_only=True)
class ToolSpec:
    """What an adapter says about one function of a tool."""

    definition: ToolDefinition
    invoke: Invoke | None
    """None: a tool that cannot run."""
    options: ToolOptions
    source: Any
    """What the user registered."""
    prepare: Prepare | None = None
    """Rewrites the raw arguments before they are validated."""
    decode: Decode | None = None
    """Makes the declared Python types out of validated JSON arguments."""
    args_prefix: str | None = None
    """Begins every message about arguments that cannot be used."""
    checked_schema: Mapping[str, Any] | None = None
    """What arguments are checked against, where the tool itself checks the rest; None: the definition's."""
    describe: Callable[[Offered], str] | None = None
    """Makes the description out of what else is offered, for tools whose use depends on it."""
    choose: Callable[[Any, RunContext | None], RegisteredTool | ToolResult] | None = None
    """Returns the form of the tool that a call with these arguments, as they were received, is for, with options of its
    own; or why the call is refused. Without a run it was made before."""
    features: Features = NO_FEATURES
    """What its calls have besides those of its options."""
    is_foreign: bool = False
    """A stranger wrote its schemas: they are compiled, and values checked against them, where that can be killed."""
    requires_result: bool = False
    """Returning None is a mistake of the tool, not an empty result."""

    def compile(self, *, coercion: Coercion = "safe", extras: Extras = "drop") -> RegisteredTool:
        """Check a tool and compile what its calls will need.

        Raises:
            RegistrationError: its definition is wrong.
        """
        check_definition(self.definition)
        options = self.options
        if options.orchestrates and options.exclusive_group is not None:
            raise RegistrationError(
                f"tool {self.definition.name!r}: a tool that runs others cannot hold an exclusive group while it waits"
            )
        checked = self.definition
        if self.checked_schema is not None:
            checked = ToolDefinition(checked.name, checked.description, self.checked_schema)
        checker = ArgumentChecker(
            checked,
            options.coercion or coercion,
            options.extras or extras,
            validate=options.validate,
            is_foreign=self.is_foreign,
            makes_bytes=self.decode is not None,
        )
        return RegisteredTool(self, checker, (self.definition.name,), ToolIdentity())

    @classmethod
    def of_function(
        cls,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        prepare: Prepare | None = None,
        options: ToolOptions | None = None,
    ) -> ToolSpec:
        """Return the spec of a plain function: its name, docstring and signature are the definition."""
        from toolcell.calls.type_schema import name_of, read_docstring, read_signature

        chosen = name or name_of(function)
        check_function(chosen, function)
        prose, described = read_docstring(function)
        signature = read_signature(function, ToolContext, ToolResult, described)
        definition = ToolDefinition(chosen, description or prose, signature.parameters)
        known = options or DEFAULT_TOOL_OPTIONS
        if known.returns is None and signature.returns is not None:
            known = replace(known, returns=signature.returns)
        return cls(
            definition=definition,
            invoke=keyword_invoke(function, signature.context_parameter, known.blocking),
            options=known,
            source=function,
            prepare=prepare,
            decode=_decoder(signature),
            requires_result=signature.wants_result,
        )

    @classmethod
    def positional(
        cls, definition: ToolDefinition, function: Callable[..., Any] | None, options: ToolOptions, source: Any = None
    ) -> ToolSpec:
        """Return the spec of a function that takes all arguments as one dict."""
        if function is None:
            return cls(definition=definition, invoke=None, options=options, source=source)
        check_function(definition.name, function, "args")
        called = function
        return cls.bound(
            lambda context: functools.partial(called, context.call.given),
            function,
            0,
            definition=definition,
            options=options,
            source=source or function,
        )

    @classmethod
    def reverting(cls, tool: str, options: ToolOptions, args: dict[str, Any], value: Any) -> ToolSpec:
        """Return the tool that undoes one call of another one, with the arguments and the result of the call."""
        revert = options.revert
        assert revert is not None
        schema = {"type": "object", "properties": {"args": {"type": "object"}}}
        definition = ToolDefinition(f"revert_{tool}"[:MAX_NAME_CHARS], f"Undo a call of {tool}.", schema)
        own = ToolOptions(timeout_s=options.timeout_s, expose_errors=True)
        undo = _threaded(lambda _context: functools.partial(revert, args, value), revert, own.blocking)
        return cls(definition=definition, invoke=undo, options=own, source=revert)

    @classmethod
    def bound(cls, bind: Bind, function: Callable[..., Any], parameter: int | str, **fields: Any) -> ToolSpec:
        """Return the spec of a function with one parameter for all arguments: a dict, or the record it declares."""
        from toolcell.calls.type_schema import converter, record_in

        record = record_in(function, parameter)
        decode = None if record is None else converter(record)
        return cls(invoke=_threaded(bind, function, fields["options"].blocking), decode=decode, **fields)


# How a function is called


def check_function(name: str, function: object, *takes: str) -> None:
    """Refuse what could never answer a call.

    Raises:
        RegistrationError: it is not a function, it is a generator, or it cannot be called with the arguments `takes`.
    """
    if isinstance(function, str) and not takes:
        raise RegistrationError(f"a tool is a function, not {function!r}; write @registry.tool(name={function!r})")
    if isinstance(function, type) or not callable(function):
        raise RegistrationError(f"tool {name!r}: a tool is a function, not {brief(function)}")
    for each in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise RegistrationError(
                f"tool {name!r} is a generator, and a tool returns one value; return a list, and report with "
                "ctx.update(...) meanwhile"
            )
    if takes and (why := refused_arguments(function, *takes)):
        must = f"it must take ({', '.join(takes)}), not {inspect.signature(function)}"
        raise RegistrationError(f"tool {name!r}: {must}: {why}")


def _decoder(signature: Signature) -> Decode | None:
    converters, extra, properties = signature.converters, signature.converts_extra, signature.parameters["properties"]
    if not converters and not extra and not signature.defaults:
        return None

    def decode(args: dict[str, Any]) -> dict[str, Any]:
        made = dict(args)
        for name, value in args.items():
            if convert := converters.get(name) if name in properties else extra:
                try:
                    made[name] = convert(value)
                except (ValueError, TypeError, RecursionError) as exc:
                    exc.add_note(name)  # its path begins there
                    raise
        return {**{name: _made(name, make) for name, make in signature.defaults.items() if name not in made}, **made}

    return decode


def _made(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (ValueError, TypeError, RecursionError) as exc:  # the arguments are not wrong
        raise RuntimeError(f"the default of {name} cannot be made: {exc}") from exc


def keyword_invoke(function: Callable[..., Any], context_parameter: str | None, blocking: bool) -> Invoke:
    """Return how a function is called with a call's arguments by name."""
    if context_parameter is None and (is_async(function) or not blocking):
        return lambda context: function(**context.call.named)

    def bind(context: ToolContext) -> Callable[[], Any]:
        own = {} if context_parameter is None else {context_parameter: context.for_any_thread()}
        return functools.partial(function, **context.call.named, **own)

    return _threaded(bind, function, blocking)


def _threaded(bind: Bind, function: Callable[..., Any], blocking: bool) -> Invoke:
    """Move a synchronous function off the event loop. What it is given is put together before."""
    if is_async(function) or not blocking:
        return lambda context: bind(context)()
    return lambda context: run_in_thread(bind(context.for_any_thread()), context.call.give_up)


@final
class RegisteredTool:
    """One callable name of a registry. Whatever is the same in every call is computed here, once."""

    __slots__ = (
        "aliases",
        "checker",
        "definition",
        "features",
        "has_own_limits",
        "identity",
        "name",
        "options",
        "spec",
        "timeout_s",
    )

    def __init__(
        self, spec: ToolSpec, checker: ArgumentChecker, aliases: tuple[str, ...], identity: ToolIdentity
    ) -> None:
        options = spec.options
        self.name = spec.definition.name
        self.definition = spec.definition
        """What the model sees."""
        self.spec = spec
        self.options = options
        self.checker = checker
        self.aliases = aliases
        """Every name the tool ever had, this one included: a rule about one is a rule about all."""
        self.identity = identity
        self.timeout_s = math.inf if options.orchestrates and options.timeout_s is None else options.timeout_s
        """Its own. Orchestrating tools end with what they run, so without one of their own they have none."""
        self.has_own_limits = options.exclusive_group is not None or options.max_concurrency is not None
        """Its calls wait for more than a worker, which few do."""
        self.features = spec.features.after(features_of(options))

    def decode(self, args: dict[str, Any]) -> Any:
        """Return validated arguments as the Python types the tool declares; None where these are no more than JSON.

        Raises:
            ArgumentError: a type has rules its JSON Schema cannot express, and they are not met.
        """
        try:
            return None if self.spec.decode is None else self.spec.decode(args)
        except (ValueError, TypeError, RecursionError) as exc:
            from pydantic import ValidationError

            # pydantic's errors take many times the memory of what was sent: they are not kept.
            cause = None if isinstance(exc, ValidationError) else exc
            raise ArgumentError(f'validation failed for tool "{self.name}":\n  - {_refusal(exc)}') from cause
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # `GeneratorExit` and cancellations too: nothing is awaited here
            raise RuntimeError(f"a type of its own raised {type(exc).__name__}") from exc

    def preview(self) -> RegisteredTool:
        """Return the tool that shows, in place of this one, what a call of it would do."""
        assert self.options.preview is not None
        spec = replace(self.spec, invoke=keyword_invoke(self.options.preview, None, self.options.blocking))
        return RegisteredTool(spec, self.checker, self.aliases, self.identity)

    def renamed(self, name: str) -> RegisteredTool:
        """Return the same tool under another name; rules about the old name still hold."""
        spec = replace(self.spec, definition=self.definition.renamed(name))
        check_definition(spec.definition)
        return RegisteredTool(spec, self.checker.renamed(name), (*self.aliases, name), self.identity)

    def to_mcp(self, definition: ToolDefinition) -> dict[str, Any]:
        """Return the tool as MCP's tools/list gives it. `definition`: what a model sees of it.

        Source: Model Context Protocol, revision 2025-06-18: `outputSchema` must be of type object, and hints are hints.
        """
        options = self.options
        plain: dict[str, Any] = definition.to_mcp()
        if options.label:
            plain["title"] = options.label
        returns = options.returns
        if returns is not None and returns.get("type") == "object":
            plain["outputSchema"] = dict(returns)
        plain["annotations"] = {
            "readOnlyHint": options.read_only,
            "idempotentHint": options.is_repeatable,
            "destructiveHint": options.requires_approval and not options.read_only,
        }
        return plain


def _refusal(exc: ValueError | TypeError | RecursionError) -> str:
    """Say what a tool's own Python types found wrong with arguments that fit its schema."""
    from pydantic import ValidationError

    above = getattr(exc, "__notes__", ())
    if not isinstance(exc, ValidationError):
        return ": ".join((*above, str(exc)))[:MAX_MESSAGE_CHARS]
    if (count := exc.error_count()) > MAX_LISTED_ERRORS:
        return f"{count} validation errors for {exc.title[:MAX_STEP_CHARS]}"
    errors = exc.errors(include_url=False, include_context=False, include_input=False)[:MAX_PROBLEMS]
    named = [
        str(ValueProblem((*above, *map(_type_name, error["loc"])), error["msg"][:MAX_MESSAGE_CHARS]))
        for error in errors
    ]
    if count > MAX_PROBLEMS:
        named.append("and more problems")
    return "\n  - ".join(named)


_FUNCTION = re.compile(r"function-(?:before|after)\[[^\[\]()]*\(\), |[\[\]]")


def _type_name(step: str | int) -> str | int:
    """Return a step of pydantic's, which names members of a union by their types, without the functions around them."""
    if isinstance(step, int):
        return step
    ends = list[str]()

    def bare(found: re.Match[str]) -> str:
        if found[0] == "]":
            return ends.pop() if ends else "]"
        ends.append("]" if found[0] == "[" else "")
        return found[0] if found[0] == "[" else ""

    return _FUNCTION.sub(bare, step)


# What the options of a tool add to its calls: the need of approval, and the labels of what it reads and sends


class _Approval(Feature):
    """Of a tool with `requires_approval`."""

    def permit(self, call: Call, /) -> None:
        """Note that somebody has to approve the call."""
        call.approval_reason = call.NEEDS_APPROVAL


class _Labels(Feature):
    """Of a tool with `reads` or `sends`."""

    def permit(self, call: Call, /) -> ToolResult | None:
        """Return why what the run has read must not be sent with this call, or note why somebody has to approve it."""
        sends, run = call.options.sends, call.run
        if not sends or run.scope.is_shared or not (held := run.state.labels.names):
            return None
        flows = (flow for policy in (*call.registry.policies, *run.scope.policies) for flow in policy.flows)
        match flow_of(flows, sends, held):
            case "deny", reason:
                message = f'tool "{call.name}" is not permitted: {reason}'
                return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)
            case "ask", reason:
                call.approval_reason = f"{call.NEEDS_APPROVAL}: {reason}"
        return None

    def admitted(self, call: Call, /) -> None:
        """Add the labels of a call to those of its run, before its tool runs: whoever has an answer has its labels too.

        A hook may answer for a tool, and what it says is as private. A call that was blocked has read nothing.
        """
        reads, refusal = call.options.reads, call.refusal
        if reads and not call.run.scope.is_shared and (refusal is None or refusal.status is not Status.BLOCKED):
            call.run.state.labels.add(reads)


_APPROVAL, _LABELS = _Approval(), _Labels()


def features_of(options: ToolOptions) -> Features:
    """Return what these options add to calls."""
    asks, labels = options.requires_approval, options.reads or options.sends
    return Features([*([_APPROVAL] if asks else ()), *([_LABELS] if labels else ())])


# What a registry knows at one moment


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

    def __post_init__(self) -> None:
        for name in ("timeout_s", "pending_wait_s"):
            check_seconds(name, getattr(self, name))
        for name in ("max_workers", "max_abandoned_threads", "repeat_hint"):
            check_count(name, getattr(self, name), 1)
        check_count("max_batch", self.max_batch, 1, optional=True)
        check_kind("sequential", self.sequential, bool)
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
        if name in self.tools or type(name) is not str or len(name) > MAX_NAME_CHARS:
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
        return _described(tool.name, describe(lambda origin: self.visible(origin, policies)), definition.checked_json)


@functools.lru_cache(maxsize=64)
def _described(name: str, text: str, parameters_json: str) -> ToolDefinition:
    """Return the same definition for the same text: what was made of definitions, such as an index, is kept by them."""
    return ToolDefinition(name, text, json.loads(parameters_json))


def check_collisions(new: Iterable[str], tools: Mapping[str, RegisteredTool]) -> None:
    """Refuse names that a model or a script could take for one another. Two names of one tool may be alike.

    `tools`: what there will be, the new names among it.

    Raises:
        RegistrationError: two names differ in case or signs only, or a name is also a namespace.
    """
    TakenNames(tools).add(new, lambda name: tools[name].identity)


def permits_all(policies: tuple[CallPolicy, ...], tool: RegisteredTool, origin: Origin) -> bool:
    """Return true when no rule forbids the tool under any of its names."""
    return all(
        not any(policy.blocks(name, origin) for name in tool.aliases)
        and any(policy.permits(name, origin) for name in tool.aliases)
        for policy in policies
    )
