"""`ToolRegistry`: the tools that a program offers, with hooks and rules.

Reading never locks: every change makes a new state and swaps it in. Snapshots, subsets and namespaces are registries
too, over the same tools.

Read `registry_state` first (what is known), then `view` (how it is read and called), then this (how it is changed).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar, overload

from toolcell.errors import RegistrationError, UsageError
from toolcell.tools.adapters import FunctionTool, function_spec, positional_spec, specs_of, with_options
from toolcell.tools.arguments import Prepare
from toolcell.tools.call import RunContext
from toolcell.tools.checks import check_kind, shown
from toolcell.tools.definition import ToolDefinition, warn_about_description
from toolcell.tools.enabling import EnablingRegistry
from toolcell.tools.events import EventBus
from toolcell.tools.hooks import AfterHook, BeforeHook, Hook
from toolcell.tools.names import TakenNames, check_collisions
from toolcell.tools.observed import with_observed
from toolcell.tools.options import Origin, ToolOptions
from toolcell.tools.policy import CallPolicy
from toolcell.tools.problems import did_you_mean
from toolcell.tools.registry_state import RegistrySettings, RegistryState, identities, settings_of
from toolcell.tools.spec import Middleware, RegisteredTool, ToolSpec, compile_tool

logger = logging.getLogger("toolcell.tools")

_GLOB_SIGNS = frozenset("*?[")

F = TypeVar("F", bound=Callable[..., Any])


class ToolRegistry(EnablingRegistry):
    """Tools by name. Safe to read, change and call from several threads at once."""

    def __init__(self, tools: Iterable[Any] = (), *, settings: RegistrySettings | None = None, **changes: Any) -> None:
        base = settings_of(settings, changes)
        if isinstance(tools, str) or not isinstance(tools, Iterable):
            raise UsageError(f"ToolRegistry takes a list of tools, not {shown(tools)}; write [...] around it")
        policy, events = CallPolicy(), EventBus()
        state = RegistryState(policies=(policy,), settings=base)
        self._begin(state, events, RunContext(run_id="direct", events=events, is_shared=True), policy)
        for tool in tools:
            self.add(tool)

    def _begin(self, state: RegistryState, events: EventBus, shared_run: RunContext, policy: CallPolicy | None) -> None:
        super().__init__(state, events, shared_run)
        self._policy = policy
        self._lock = threading.RLock()
        self._frozen = False
        self._taken: tuple[Mapping[str, RegisteredTool], TakenNames] | None = None
        """Its names, as long as its tools are these."""

    @property
    def policy(self) -> CallPolicy:
        """Rules about who may call what; they count from the next call on, in snapshots too.

        A snapshot gets rules of its own when somebody asks for them: one is made for every run, and few ever do.
        """
        with self._lock:
            if self._policy is None:
                self._policy = CallPolicy()
                self._change(policies=(*self._state.policies, self._policy))
            return self._policy

    # Registering

    def add(self, tool: Any, *, replace: bool = False, **options: Any) -> None:
        """Register every function of a tool, written in any of the known ways; all of them or none.

        `options` are those of `ToolOptions`; a tool of one function may also be given `name`, `description` and
        `prepare`.

        Raises:
            RegistrationError: a definition is wrong, or a name is taken and `replace` is False.
        """
        self._add(specs_of(tool, options), replace)

    @overload
    def register(self, tool: Any, /, *, replace: bool = ..., **options: Any) -> None: ...
    @overload
    def register(
        self, name: str, description: str, schema: Mapping[str, Any] | None,
        function: Callable[..., Any] | None, /,
        *, replace: bool = ..., **options: Any,
    ) -> None: ...  # fmt: skip

    def register(
        self,
        tool: Any,
        description: str | None = None,
        schema: Mapping[str, Any] | None = None,
        function: Callable[..., Any] | None = None,
        /,
        *,
        replace: bool = False,
        **options: Any,
    ) -> None:
        """`register(tool)`, or `register(name, description, schema, function)` with a function of one dict."""
        if description is None:
            self.add(tool, replace=replace, **options)
            return
        definition = ToolDefinition(tool, description, schema)
        self._add(specs_of(positional_spec(definition, function, ToolOptions()), options), replace)

    def register_or_replace(self, *tool: Any, **options: Any) -> None:
        """Do what `register` does, and replace a tool of the same name."""
        self.register(*tool, replace=True, **options)

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(
        self, /, *, name: str | None = ..., description: str | None = ..., prepare: Prepare | None = ...,
        replace: bool = ..., **options: Any,
    ) -> Callable[[F], F]: ...  # fmt: skip

    def tool(
        self,
        function: Any = None,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        prepare: Prepare | None = None,
        replace: bool = False,
        **options: Any,
    ) -> Any:
        """Decorate a function to register it: name, docstring and signature are its definition."""

        def register(function: F) -> F:
            known = with_options(ToolOptions(), options)
            spec = function_spec(function, name=name, description=description, prepare=prepare, options=known)
            self._add([spec], replace)
            return function

        return register if function is None else register(function)

    def alias(self, name: str, target: str) -> None:
        """Offer `target` under another name as well; rules about either name hold for both.

        Raises:
            RegistrationError: there is no `target`, or `name` is taken or wrong.
        """
        with self._lock:
            tool = self._state.tools.get(target)
            if tool is None:
                raise RegistrationError(f"there is no tool {target!r} to give another name")
            self._put([tool.renamed(name)], replace=False)

    def _add(self, specs: Sequence[ToolSpec], replace: bool) -> None:
        settings = self._state.settings
        tools = [compile_tool(spec, coercion=settings.coercion, extras=settings.extras) for spec in specs]
        self._put(tools, replace)
        for tool in tools:
            warn_about_description(tool.definition)

    def _put(self, new: Sequence[RegisteredTool], replace: bool) -> None:
        with self._lock:
            self._check_open()
            tools = dict(self._state.tools)
            taken, self._taken = self._taken, None
            if taken is None or taken[0] is not self._state.tools or any(tool.name in tools for tool in new):
                taken = tools, TakenNames(tools)
            if len({tool.name for tool in new}) != len(new):
                raise RegistrationError(f"a tool offers one name twice: {[tool.name for tool in new]}")
            for tool in new:
                if tool.name in tools and not replace:
                    raise RegistrationError(f"tool {tool.name!r} is already registered; replace=True replaces it")
                if tool.name in tools:
                    logger.info("tool %s replaced", tool.name)
                tools[tool.name] = tool
            taken[1].add([tool.name for tool in new], lambda name: tools[name].identity)
            self._change(tools=tools)
            self._taken = self._state.tools, taken[1]

    def unregister(self, name: str) -> bool:
        """Take a tool away; False when there was none."""
        with self._lock:
            self._check_open()
            tools = dict(self._state.tools)
            found = tools.pop(name, None) is not None
            self._change(tools=tools)
            return found

    def freeze(self) -> Self:
        """Refuse every later change to tools, hooks and middleware; rules may still change."""
        self._frozen = True
        return self

    def _check_open(self) -> None:
        if self._frozen:
            raise UsageError("this registry is frozen")

    def _change(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)

    # Hooks and rules

    def add_hook(self, hook: Hook | None = None, /, **fields: Any) -> None:
        """Add a hook around every call: `add_hook(before=..., after=..., timeout_s=...)`. First added is outermost."""
        with self._lock:
            self._check_open()
            check_kind("a hook", hook, Hook, type(None), cure="write add_hook(before=...) or add_hook(after=...)")
            self._change(hooks=(*self._state.hooks, hook or Hook(**fields)))

    def before_call(self, function: BeforeHook) -> BeforeHook:
        """Decorate a function to see every call before it runs."""
        self.add_hook(before=function)
        return function

    def after_call(self, function: AfterHook) -> AfterHook:
        """Decorate a function to see every result."""
        self.add_hook(after=function)
        return function

    def add_middleware(self, *middleware: Middleware) -> None:
        """Wrap the execution of every call; first added is outermost."""
        with self._lock:
            self._check_open()
            self._change(middleware=(*self._state.middleware, *middleware))

    def blacklist(self, *names: str, origins: Iterable[Origin] | None = None) -> None:
        """Refuse tools by name or glob, from `origins` or from anywhere. They stay registered.

        Raises:
            UsageError: no tool has such a name; `policy.blacklist` takes names of tools that are to come.
        """
        self._check_names(names)
        self.policy.blacklist(*names, origins=origins)

    def unblacklist(self, *names: str) -> None:
        """Remove these rules again.

        Raises:
            UsageError: there is no such rule.
        """
        self.policy.unblacklist(*names)

    def allow_only(self, *names: str, origins: Iterable[Origin] | None = None) -> None:
        """Refuse every tool no name or glob mentions. `allow_all()` takes it back."""
        self.policy.allow_only(*names, origins=origins)

    def allow_all(self) -> None:
        """Take back every `allow_only`; what is blacklisted stays refused."""
        self.policy.allow_all()

    def _check_names(self, names: Iterable[str]) -> None:
        """Refuse a misspelt name: its rule would do nothing. A glob may be about tools that are to come."""
        known = {each for tool in self._state.tools.values() for each in (tool.name, *tool.aliases)}
        for name in names:
            if str(name) not in known and _GLOB_SIGNS.isdisjoint(str(name)):
                near = did_you_mean(str(name), sorted(known))
                ahead = f"registry.policy.blacklist({name!r})"
                raise UsageError(f"there is no tool {name!r} to blacklist{near}; for a tool that is to come: {ahead}")

    # Other registries over the same tools

    def snapshot(self) -> ToolRegistry:
        """This registry as it is now, frozen: what a run works with."""
        state = with_observed(self._state) if self.settings.observe_outputs else self._state
        if self._frozen and state is self._state:
            return self
        snapshot = ToolRegistry.__new__(ToolRegistry)
        snapshot._begin(state, self.events, self._shared_run, None)
        return snapshot.freeze()

    def subset(self, select: Iterable[str] | Callable[[ToolDefinition], bool]) -> ToolRegistry:
        """Some of the tools, by name or by predicate. Rules and hooks of this registry hold there too.

        Raises:
            UsageError: a name is not registered.
        """
        tools = self._state.tools
        if isinstance(select, str):
            raise UsageError(f"subset takes a list of names, not {select!r}; write subset([{select!r}])")
        if callable(select):
            return self._derived({name: tool for name, tool in tools.items() if select(tool.definition)})
        wanted = set(select)
        if missing := sorted(wanted - tools.keys()):
            raise UsageError(f"no such tools: {', '.join(missing)}")
        return self._derived({name: tool for name, tool in tools.items() if name in wanted})

    def namespaced(self, prefix: str, separator: str = "_") -> ToolRegistry:
        """Return a registry with these tools as `prefix_name`; rules about the old names hold for the new ones."""
        renamed = [tool.renamed(f"{prefix}{separator}{name}") for name, tool in self._state.tools.items()]
        return self._derived({tool.name: tool for tool in renamed})

    def replaced(self, other: ToolRegistry) -> ToolRegistry:
        """Return a registry of the tools of `other`, under the hooks and settings of this one and the rules of both."""
        return self._derived(other._state.tools, other)

    def merged(self, *others: ToolRegistry) -> ToolRegistry:
        """Return a registry of these tools and those of `others`, under this registry's hooks and the rules of all.

        Raises:
            RegistrationError: two of them use one name for different tools.
        """
        tools = dict(self._state.tools)
        for other in others:
            for name, tool in other._state.tools.items():
                if tools.setdefault(name, tool).identity is not tool.identity:
                    raise RegistrationError(f"two registries offer a tool {name!r}")
        check_collisions(tools, identities(tools))
        return self._derived(tools, *others)

    def _derived(self, tools: Mapping[str, RegisteredTool], *others: ToolRegistry) -> ToolRegistry:
        """Return a registry over these tools, under the rules of this one, those of `others`, and rules of its own."""
        policy = CallPolicy()
        shared = [self.policy, *(other.policy for other in others)]  # asked for, so that later rules are shared too
        policies = [each for registry in (self, *others) for each in registry._state.policies]
        unique = dict.fromkeys([*policies, *shared, policy])
        state = replace(self._state, tools=dict(tools), policies=tuple(unique))
        derived = ToolRegistry.__new__(ToolRegistry)
        derived._begin(state, self.events, self._shared_run, policy)
        return derived

    def follow(self, before: RegistryState, now: RegistryState) -> None:
        """Make the changes of tools, hooks and middleware that led another registry from one state to a later one."""
        with self._lock:
            self._check_open()
            gone = {name for name, tool in before.tools.items() if name not in now.tools}
            own = {n: tool for n, tool in self._state.tools.items() if n not in gone or tool is not before.tools[n]}
            new = {name: tool for name, tool in now.tools.items() if before.tools.get(name) is not tool}
            self._change(
                tools=own | new,
                hooks=(*self._state.hooks, *now.hooks[len(before.hooks) :]),
                middleware=(*self._state.middleware, *now.middleware[len(before.middleware) :]),
            )

    def list(self) -> list[str]:
        """Return every registered name, refused ones included."""
        return [*self._state.tools]

    def __repr__(self) -> str:
        frozen = ", frozen" if self._frozen else ""
        return f"<ToolRegistry of {len(self)} tools{frozen}: {', '.join([*self][:8])}>"


def registry_of(tools: Any, what: str) -> Any:
    """Return the registry that was given as `what`, or one of the list of tools that was given instead.

    Raises:
        UsageError: it is neither; `what` names it.
        RegistrationError: something in the list is no tool.
    """
    if tools is None:
        return ToolRegistry()
    if isinstance(tools, type):
        raise UsageError(f"{what} takes a ToolRegistry or a list of tools, not a class; write {tools.__name__}()")
    if hasattr(tools, "snapshot"):
        return tools
    listed = list(tools) if isinstance(tools, Iterable) and not isinstance(tools, str | bytes | Mapping) else None
    if listed is None:
        cure = "; write [...] around it" if callable(tools) or hasattr(tools, "execute") else ""
        raise UsageError(f"{what} takes a ToolRegistry or a list of tools, not {shown(tools)}{cure}")
    if names := [each for each in listed if isinstance(each, str)]:
        raise UsageError(f"{what} takes tools, not names; some tools of a registry are registry.subset({names!r:.80})")
    return ToolRegistry(listed)


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    prepare: Prepare | None = None,
    **options: Any,
) -> Any:
    """Decorate a function to make it a tool without registering it; calling it still calls the function."""
    if function is None:
        return functools.partial(tool, name=name, description=description, prepare=prepare, **options)
    known = with_options(ToolOptions(), options)
    spec = function_spec(function, name=name, description=description, prepare=prepare, options=known)
    return FunctionTool(function, spec)
