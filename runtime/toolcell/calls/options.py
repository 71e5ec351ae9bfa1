"""What is known about a tool besides its definition: who may call it, how long, how many at once; and the rules.

The pipeline and batches act on it; the model never sees it.
"""

from __future__ import annotations

import enum
import fnmatch
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Literal, Self, get_args

from toolcell.errors import RegistrationError, UsageError
from toolcell.flows import Flow, labels_of
from toolcell.support.checks import SYNONYMS, brief, check_count, check_kind, check_one_of, check_seconds, suggestion
from toolcell_bridge.wire.frozen import frozen


class Origin(enum.StrEnum):
    """Where a call comes from."""

    MODEL = "model"
    """A model's tool call, or the program itself."""
    PLAN = "plan"
    """A step of execute_plan."""
    CODE = "code"
    """`call_tool` in sandboxed code."""
    SUBAGENT = "subagent"
    """The model of an agent that is itself a tool."""

    __hash__ = str.__hash__  # Enum's own is Python code, and every call is looked up by origin


EVERY_ORIGIN = frozenset(Origin)

CallableFrom = frozenset[Origin]

ExecutionMode = Literal["", "parallel", "sequential"]
"""Empty inherits; while a call of a sequential tool runs, no other call of its run does."""

Coercion = Literal["safe", "lenient", "off"]
"""`safe` mends common model mistakes; `lenient` also turns null into 0, "" or false; `off` mends nothing."""

Extras = Literal["drop", "allow", "forbid"]
"""What happens to properties a schema does not mention when it does not say: silent schemas drop them by default."""


@frozen(kw_only=True)
class ToolOptions:
    """Options of one tool. docs/authoring-tools.md explains each."""

    label: str = ""
    """For a user interface only."""
    read_only: bool = False
    """Changes nothing; identical plan steps may share one call."""
    idempotent: bool = False
    """Calling twice is the same as calling once, so a failed call may be retried."""
    expose_errors: bool = False
    """Models and scripts may read what an unexpected exception says, like a `ToolError`. Otherwise a script gets
    only its class."""
    requires_approval: bool = False
    """Each call needs the approval of a hook, of its run's `Approvals`, or of whoever commits a draft; else it is
    refused."""
    reads: frozenset[str] = frozenset()
    """Labels of what it gives: from its first call on, the run has read them. One label may be written as a text."""
    sends: frozenset[str] = frozenset()
    """Labels of where its arguments go. A `Flow` decides which runs may call it."""
    preview: Callable[..., Any] | None = None
    """Called in a dry run in place of the tool, with its arguments by name: returns what the tool would return."""
    revert: Callable[..., Any] | None = None
    """Undoes a call: `revert(args, result)`, with what the tool received and returned."""
    timeout_s: float | None = None
    """Seconds one call may take; None is the registry's default, `math.inf` means no limit."""
    max_result_bytes: int | None = None
    """Larger data, images and files are an error; longer text, of errors too, is cut. None: no limit."""
    listed: bool = True
    """False: models and scripts are not told of it. Who calls it by its name is answered as by any other tool."""
    callable_from: CallableFrom = EVERY_ORIGIN
    """Who may call it. An agent's model counts as a model."""
    exclusive_group: str | None = None
    """Calls of tools in one group never overlap."""
    max_concurrency: int | None = None
    """Calls of this tool at once; None means no limit of its own."""
    mode: ExecutionMode = ""
    returns: Mapping[str, Any] | None = None
    """JSON Schema of the structured result."""
    raw: bool = False
    """Text stays text for scripts and plans, also where it is JSON."""
    orchestrates: bool = False
    """Runs other tools (plan, code, sub-agent): holds no worker while it waits for them."""
    is_agent: bool = False
    """Its calls are shown as an agent's work."""
    blocking: bool = True
    """A synchronous function runs in a worker thread; False runs it on the event loop."""
    validate: bool = True
    coercion: Coercion | None = None
    """None is the registry's default."""
    extras: Extras | None = None
    """None is the registry's default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "callable_from", origins_of(self.callable_from, "callable_from"))
        for name in ("preview", "revert"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise UsageError(f"{name} must be a function, not {brief(getattr(self, name))}")
        if self.revert is not None and refused_arguments(self.revert, None, None):
            raise UsageError(f"revert is called as revert(args, result), which {brief(self.revert)} does not take")
        for name in ("reads", "sends"):
            object.__setattr__(self, name, labels_of(getattr(self, name), name))
        for name, kinds in _KINDS.items():
            check_kind(name, getattr(self, name), *kinds)
        check_seconds("timeout_s", self.timeout_s, optional=True)
        check_count("max_concurrency", self.max_concurrency, 1, optional=True)
        check_count("max_result_bytes", self.max_result_bytes, 0, optional=True)
        check_one_of("mode", self.mode, get_args(ExecutionMode))
        check_one_of("coercion", self.coercion, (None, *get_args(Coercion)))
        check_one_of("extras", self.extras, (None, *get_args(Extras)))

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return these options with keyword changes; unknown names are refused.

        Raises:
            RegistrationError: there is no such option.
        """
        if not changes:
            return self
        known = [field.name for field in fields(self)]
        for name in changes.keys() - set(known):
            if name in SYNONYMS:
                raise RegistrationError(
                    f"{name}: a schema written by hand is registry.register(name, description, schema, function), and "
                    "the function takes one dict of all arguments"
                )
            hint = suggestion(name, sorted(known), f"there are: {', '.join(sorted(known))}")
            raise RegistrationError(f"no option is called {name!r}; {hint}")
        try:
            return replace(self, **changes)
        except UsageError as exc:
            raise RegistrationError(f"option {exc}") from exc

    @property
    def is_repeatable(self) -> bool:
        """True when a call may be made again without anybody's decision."""
        return self.read_only or self.idempotent

    def allows(self, origin: Origin) -> bool:
        """True when a call from `origin` may reach this tool."""
        allowed = self.callable_from
        return origin in allowed or (origin is Origin.SUBAGENT and Origin.MODEL in allowed)


_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("read_only", "idempotent", "requires_approval", "orchestrates", "is_agent"), (bool,)),
    **dict.fromkeys(("blocking", "listed", "validate", "expose_errors", "raw"), (bool,)),
    "label": (str,),
    "exclusive_group": (str, type(None)),
    "returns": (Mapping, type(None)),
}


def origins_of(given: Iterable[str], what: str) -> CallableFrom:
    """Return one name or several as the origins they are.

    Raises:
        UsageError: one is none; `what` names it.
    """
    if given is EVERY_ORIGIN:
        return EVERY_ORIGIN
    names = [given] if isinstance(given, str) else [*given]
    for name in names:
        check_one_of(f"{what}: each", str(name), [str(origin) for origin in Origin])
    return frozenset(Origin(name) for name in names)


DEFAULT_TOOL_OPTIONS = ToolOptions()


def refused_arguments(function: Callable[..., Any], *args: object) -> str:
    """Return why a function cannot be called with these arguments; empty where it can, or does not say."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError as exc:
        return str(exc)
    except ValueError:  # one written in C says nothing
        pass
    return ""


# Rules about who may call which tool. The pipeline asks them, and a change counts from the next call on


@frozen
class Rule:
    """A glob over tool names, and the origins it is about."""

    pattern: str
    origins: frozenset[Origin] = EVERY_ORIGIN

    def matches(self, name: str, origin: Origin) -> bool:
        """Return true when this rule is about such a call."""
        return origin in self.origins and fnmatch.fnmatchcase(name, self.pattern)


def _rules(patterns: Iterable[str], origins: Iterable[Origin] | None) -> tuple[Rule, ...]:
    chosen = EVERY_ORIGIN if origins is None else origins_of(origins, "origins=")
    for pattern in patterns:
        check_kind("a rule's name", pattern, str, cure='write the names one by one: ("a", "b")')
    return tuple(Rule(pattern, chosen) for pattern in patterns)


class CallPolicy:
    """Rules about which tools may be called from where. Without rules, all may."""

    def __init__(self, *, advertise_blocked: bool = False) -> None:
        self.advertise_blocked = advertise_blocked
        """Show refused tools to the model all the same."""
        self._lock = threading.Lock()
        self._blocked: tuple[Rule, ...] = ()
        self._allowed: tuple[Rule, ...] = ()
        self.flows: tuple[Flow, ...] = ()
        """Where runs must not send what they have read."""
        self.version = 0
        """Grows with every change of the rules, so that decisions can be remembered until then."""

    def blacklist(self, *patterns: str, origins: Iterable[Origin] | None = None) -> None:
        """Refuse names that match, from `origins` or from anywhere; also of tools that are to come."""
        with self._lock:
            self._blocked = (*self._blocked, *_rules(patterns, origins))
            self.version += 1

    def unblacklist(self, *patterns: str) -> None:
        """Remove the rules with exactly these patterns.

        Raises:
            UsageError: there is none.
        """
        with self._lock:
            known = dict.fromkeys(rule.pattern for rule in self._blocked)
            for pattern in patterns:
                if pattern not in known:
                    there_are = ", ".join(map(repr, known)) or "none"
                    raise UsageError(f"there is no rule {pattern!r} to take back; there are: {there_are}")
            self._blocked = tuple(rule for rule in self._blocked if rule.pattern not in patterns)
            self.version += 1

    def allow_only(self, *patterns: str, origins: Iterable[Origin] | None = None) -> None:
        """Refuse every name that matches none of these; more calls allow more names. `allow_all` undoes it."""
        with self._lock:
            self._allowed = (*self._allowed, *_rules(patterns, origins))
            self.version += 1

    def allow_all(self) -> None:
        """Undo every `allow_only`. Blacklisted tools stay refused."""
        with self._lock:
            self._allowed = ()
            self.version += 1

    def add_flow(self, *flows: Flow) -> None:
        """Decide about calls that send what their run has read, wherever they come from. Nothing takes it back."""
        for flow in flows:
            check_kind("a flow", flow, Flow, cure='write Flow("private", "public", "deny")')
        with self._lock:
            self.flows = tuple(dict.fromkeys((*self.flows, *flows)))

    def permits(self, name: str, origin: Origin) -> bool:
        """Return whether the rules let such a call pass."""
        if self.blocks(name, origin):
            return False
        limiting = [rule for rule in self._allowed if origin in rule.origins]
        return not limiting or any(rule.matches(name, origin) for rule in limiting)

    def blocks(self, name: str, origin: Origin) -> bool:
        """True when a black-list names it; an allow-list that does not mention a name is no such rule."""
        return any(rule.matches(name, origin) for rule in self._blocked)
