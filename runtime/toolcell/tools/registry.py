"""`ToolRegistry`: the tools that a program offers, with hooks and rules; how they are read, called and changed.

Reading never locks: every change makes a new state and swaps it in. Snapshots, subsets and namespaces are registries
too, over the same tools. Read `RegistryState` first: what a registry knows at one moment.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from toolcell.calls.arguments import Prepare, ToolCall, unique_ids
from toolcell.calls.call import BeforeHook, Call, CallableTools, Hook, RunContext, RunScope
from toolcell.calls.context import current, share_labels
from toolcell.calls.definition import (
    AnthropicToolDef,
    ProviderToolDef,
    TakenNames,
    ToolDefinition,
    warn_about_description,
)
from toolcell.calls.events import EventBus
from toolcell.calls.options import DEFAULT_TOOL_OPTIONS, CallPolicy, Origin
from toolcell.calls.result import ToolResult
from toolcell.config import SHOWN_CHARS
from toolcell.errors import RegistrationError, UsageError
from toolcell.support.checks import brief, check_kind, did_you_mean
from toolcell.support.log import logger_of
from toolcell.tools.adapters import FunctionTool, specs_of
from toolcell.tools.code import CODE_TOOL, SEARCH_TOOL, CodeRuntime, CodeTool
from toolcell.tools.pipeline import OnResult, answer_call, check_arguments, run_batch, run_call
from toolcell.tools.search import FOUND, find_soon, is_large, listed_within, named_of, search_spec
from toolcell.tools.spec import (
    Middleware,
    RegisteredTool,
    RegistrySettings,
    RegistryState,
    ToolSpec,
    check_collisions,
    settings_of,
)
from toolcell.tools.stubs import Detail, python_module, shown_within, tools_text
from toolcell_bridge.wire.messages import HTTP

if TYPE_CHECKING:
    from toolcell.tools.plan import PlanRecord, Step
    from toolcell.tools.saved_script import SavedScript

logger = logger_of("toolcell.tools")

_GLOB_SIGNS = frozenset("*?[")

F = TypeVar("F", bound=Callable[..., Any])


def _client_module() -> Any:
    """Return the module that connects a registry with a server: it imports this one.

    Raises:
        UsageError: what it needs is not installed.
    """
    try:
        return importlib.import_module("toolcell.mcp.client")
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.startswith("toolcell"):
            raise
        raise UsageError(f"{exc.name} is not installed; run: pip install 'toolcell[mcp]'") from exc


class ToolRegistry:
    """Tools by name. Safe to read, change and call from several threads at once."""

    def __init__(self, tools: Iterable[Any] = (), *, settings: RegistrySettings | None = None, **changes: Any) -> None:
        base = settings_of(settings, changes)
        if isinstance(tools, str) or not isinstance(tools, Iterable):
            raise UsageError(f"ToolRegistry takes a list of tools, not {brief(tools)}; write [...] around it")
        policy, events = CallPolicy(), EventBus()
        state = RegistryState(policies=(policy,), settings=base)
        self._begin(state, events, RunContext(run_id="direct", events=events, scope=RunScope(is_shared=True)), policy)
        for tool in tools:
            self.add(tool)

    def _begin(self, state: RegistryState, events: EventBus, shared_run: RunContext, policy: CallPolicy | None) -> None:
        self._state = state
        self.events = events
        """Events of calls that are made without a run of their own."""
        self._shared_run = shared_run
        self._policy = policy
        self._lock = threading.RLock()
        self._frozen = False
        self._taken: tuple[Mapping[str, RegisteredTool], TakenNames] | None = None
        """Its names, as long as its tools are these."""
        self._clients: list[Any] = []
        """Of MCP servers whose tools it has."""
        self._connecting = set[str]()
        """Names of servers that are being connected with."""

    @property
    def state(self) -> RegistryState:
        """Everything this registry knows at this moment."""
        return self._state

    @property
    def settings(self) -> RegistrySettings:
        """How calls behave unless a tool says otherwise."""
        return self._state.settings

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """Around every call."""
        return self._state.hooks

    @property
    def policies(self) -> tuple[CallPolicy, ...]:
        """Rules about who may call what."""
        return self._state.policies

    @property
    def policy(self) -> CallPolicy:
        """Rules about who may call what. Changes apply from the next call on, also in snapshots.

        A snapshot gets rules of its own when somebody asks for them: one is made for every run, and few ever do.
        """
        with self._lock:
            if self._policy is None:
                self._policy = CallPolicy()
                self._change(policies=(*self._state.policies, self._policy))
            return self._policy

    # Registering

    def add(self, tool: Any, *, replace: bool = False, **options: Any) -> None:
        """Register every function of a tool, written in any of the known forms; all of them or none.

        `options` are those of `ToolOptions`; a tool of one function may also be given `name`, `description` and
        `prepare`.

        Raises:
            RegistrationError: a definition is wrong, or a name is taken and `replace` is False.
        """
        self._add(specs_of(tool, options), replace)

    def register(self, name: str, description: str, schema: Any, function: Any, **options: Any) -> None:
        """Register a function that takes one dict of all arguments, with a schema written by hand.

        Raises:
            RegistrationError: as from `add`.
        """
        definition = ToolDefinition(name, description, schema)
        self.add(ToolSpec.positional(definition, function, DEFAULT_TOOL_OPTIONS), **options)

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(
        self,
        /,
        *,
        name: str | None = ...,
        description: str | None = ...,
        prepare: Prepare | None = ...,
        replace: bool = ...,
        **options: Any,
    ) -> Callable[[F], F]: ...

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
            known = DEFAULT_TOOL_OPTIONS.changed(options)
            spec = ToolSpec.of_function(function, name=name, description=description, prepare=prepare, options=known)
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
        tools = [spec.compile(coercion=settings.coercion, extras=settings.extras) for spec in specs]
        self._put(tools, replace)
        for tool in tools:
            if not tool.spec.is_foreign:  # Python keeps each warning for good, and strangers have many tools
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

    def unregister(self, *names: str) -> bool:
        """Remove tools; False if there was none of them."""
        with self._lock:
            self._check_open()
            known, gone = self._state.tools, {*names}
            self._change(tools={name: tool for name, tool in known.items() if name not in gone})
            return not gone.isdisjoint(known)

    def freeze(self) -> Self:
        """Refuse every later change to tools, hooks and middleware; rules may still change."""
        self._frozen = True
        return self

    def _check_open(self) -> None:
        if self._frozen:
            raise UsageError("this registry is frozen")

    def _change(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)

    # Tools that toolcell itself has

    @staticmethod
    def of(tools: Any, what: str) -> Any:
        """Return the registry that was given as `what`, or one of the list of tools that was given instead.

        Raises:
            UsageError: it is neither; `what` names it.
            RegistrationError: something in the list is not a tool.
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
            raise UsageError(f"{what} takes a ToolRegistry or a list of tools, not {brief(tools)}{cure}")
        if names := [each for each in listed if isinstance(each, str)]:
            cure = f"some tools of a registry are registry.subset({names!r:.80})"
            raise UsageError(f"{what} takes tools, not names; {cure}")
        return ToolRegistry(listed)

    def enable_plan_execution(self, **options: Any) -> None:
        """Offer `execute_plan` to the model.

        Raises:
            RegistrationError: another tool has this name.
        """
        from toolcell.tools.plan import plan_spec

        self.enable(plan_spec(options))

    def enable_code_execution(self, runtime: CodeRuntime, *, shown_chars: int = SHOWN_CHARS, **options: Any) -> None:
        """Offer `execute_code` to the model, run by `runtime`.

        `shown_chars`: its description tells of the tools in the most detailed way that has at most so many characters:
        stubs, a line each, names, or only how to search for them.

        Raises:
            RegistrationError: another tool has this name.
        """
        self.enable(CodeTool(runtime).spec(options, shown_chars))
        self.policy.add_flow(*CodeTool(runtime).flows)

    def enable_tool_search(self, **options: Any) -> None:
        """Offer `search_tools` to the model. `definitions(shown_chars=...)` then leaves out what a search finds.

        Raises:
            RegistrationError: another tool has this name.
        """
        self.enable(search_spec(options))

    def enable_search_of_many(self, shown_chars: int) -> None:
        """Offer `search_tools` where the catalogue is too large to be shown, unless a tool of that name is there."""
        if is_large(self._state.visible(Origin.MODEL), shown_chars) and not self.has(SEARCH_TOOL):
            self.add(search_spec({}))

    def enable(self, spec: ToolSpec) -> None:
        """Offer one of these tools in place of the one before.

        Raises:
            RegistrationError: a tool of that name is of another kind.
        """
        name = spec.definition.name
        known = self._state.tools.get(name)
        if known is not None and known.spec.describe is None:  # these alone are described by what else is offered
            raise RegistrationError(f"tool {name!r}: toolcell's own tool of that name would hide it; rename it")
        self._put([spec.compile()], replace=True)

    @property
    def code_runtime(self) -> CodeRuntime | None:
        """Where its `execute_code` runs; None when it was not enabled."""
        tool = self._state.tools.get(CODE_TOOL)
        return tool.spec.source if tool is not None and tool.spec.describe is not None else None

    # Saved scripts

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
        """Save a script as a tool. Saving other content under the same name creates the next version.

        `inputs`: JSON Schema of the arguments, or a record type; each is a name in the script. `folder`: where it is
        kept as files, for `load_scripts` and `toolcell tools check`. `runtime`: where it runs; None: in the runtime of
        the run that calls it, else in that of `enable_code_execution`. `tools`: what it may call; None: what its caller
        may call. `options` are those of `ToolOptions`. An older version stays as the tool `NAME_v1`.

        Raises:
            RegistrationError: another tool has the name; or name, inputs, description or an option are wrong.
            UsageError: the source is empty or too large, or the folder cannot be read or written.
        """
        from toolcell.tools.saved_script import ScriptTarget, save_version, saved_script

        self._check_open()
        script = saved_script(name, source, inputs, description, options)
        target = ScriptTarget(runtime, tools)
        with self._lock:
            latest, made = save_version(script, self._state, target, folder)
            self._put(made, replace=True)
            return latest

    def load_scripts(
        self,
        folder: str | os.PathLike[str],
        *,
        runtime: CodeRuntime | None = None,
        tools: CallableTools | None = None,
    ) -> builtins.list[SavedScript]:
        """Load the scripts saved in a folder as tools; return the latest version of each.

        Raises:
            RegistrationError: the name of a script is taken by another tool. No script was registered.
            UsageError: the folder cannot be read, or a file in it is damaged or was changed by hand.
        """
        from toolcell.tools.saved_script import ScriptTarget, load_scripts, tools_of

        self._check_open()
        target = ScriptTarget(runtime, tools)
        saved = load_scripts(folder)
        with self._lock:
            self._put(tools_of(saved, self._state, target), replace=True)
        return [versions[max(versions)] for versions in saved.values()]

    # Tools of MCP servers

    async def add_mcp_server(self, name: str, **options: Any) -> Any:
        """Connect to an MCP server, and register its tools as `name.tool`. `close()` ends the connection.

        `options`: `command=[...]` with `env` and `cwd`, or `url=...` with `headers`, `auth` or `egress`; `allow` and
        `deny`, globs over the server's names; `labels`, `timeout_s`, `approve`, `changed`, `broken`, `pins`,
        `elicitation`, `sampling`, `max_restarts`, `restart_window_s`, and those of `ToolOptions`. Returns an
        `McpClient` of `toolcell.mcp.client`.

        Raises:
            McpServerError: the server cannot be started or reached, or does not speak MCP.
            RegistrationError: there is a server of that name already.
            UsageError: an option is wrong, or the extra `mcp` is not installed.
        """
        self._check_open()
        name = str(name)
        if name in self._connecting or name in self.mcp_servers():
            raise RegistrationError(f"MCP server {name[:80]!r}: there is one of that name; close it, or choose another")
        self._connecting.add(name)
        try:
            client = await _client_module().add_mcp_server(self, name, **options)
            self._clients.append(client)
        finally:
            self._connecting.discard(name)
        return client

    def mcp_servers(self) -> dict[str, Any]:
        """Return the `McpClient` of each open server, by name. `client.state` says whether it is connected."""
        return {client.name: client for client in self._clients if client.state != "closed"}

    async def close(self) -> None:
        """End the connections of `add_mcp_server`. Safe to call twice."""
        while self._clients:
            await self._clients.pop().close()

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

    def add_middleware(self, *middleware: Middleware) -> None:
        """Wrap the execution of every call with `async def (call, proceed)`, where `await proceed()` goes on with it.

        The first added is outermost. It runs inside the call's deadline, after its before hooks.
        """
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
        """Refuse every tool that no name or glob matches. `allow_all()` undoes it."""
        self.policy.allow_only(*names, origins=origins)

    def allow_all(self) -> None:
        """Undo every `allow_only`; blacklisted tools stay refused."""
        self.policy.allow_all()

    def _check_names(self, names: Iterable[str]) -> None:
        """Refuse a misspelt name: its rule would do nothing. A glob may be about tools that are to come."""
        known = {each for tool in self._state.tools.values() for each in (tool.name, *tool.aliases)}
        for name in names:
            if str(name) not in known and _GLOB_SIGNS.isdisjoint(str(name)):
                near = did_you_mean(str(name), sorted(known))
                ahead = f"registry.policy.blacklist({name!r})"
                raise UsageError(f"there is no tool {name!r} to blacklist{near}; for a tool that is to come: {ahead}")

    # Reading

    def list(self) -> builtins.list[str]:
        """Return every registered name, refused ones included."""
        return [*self._state.tools]

    def definitions(
        self,
        origin: Origin = Origin.MODEL,
        *,
        policies: tuple[CallPolicy, ...] = (),
        shown_chars: int | None = None,
        found: Iterable[str] = (),
    ) -> builtins.list[ToolDefinition]:
        """Return the definitions that a caller from `origin` sees, in order of registration, without refused tools.

        `shown_chars`: when they have more characters and `search_tools` is offered, only it, tools that run others such
        as execute_code, and those of the names in `found`. The others can be called all the same.
        """
        state = self._state
        tools = [*state.visible(origin, policies)]
        shown = tools if shown_chars is None else listed_within(tools, shown_chars, found)
        return [state.definition(tool, policies) for tool in shown]

    def names(self, origin: Origin = Origin.MODEL) -> builtins.list[str]:
        """Return the names that a caller from `origin` may use."""
        return self._state.names_text(origin).split()

    def names_text(self, origin: Origin = Origin.MODEL) -> str:
        """Return the same names as one text, with a space between two."""
        return self._state.names_text(origin)

    def registered_name(self, name: str) -> str:
        """Return the registered name behind one such as `github__create_issue`; else `name` itself."""
        return self._state.registered_name(name)

    def get(self, name: str) -> tuple[Any, bool]:
        """Shape: (the tool as it was registered, True), or (None, False)."""
        tool = self._state.tools.get(name)
        return (tool.spec.source, True) if tool is not None else (None, False)

    def registered(self, name: str) -> RegisteredTool | None:
        """Return a tool as the registry stores it."""
        return self._state.tools.get(name)

    def returns(self, name: str) -> Mapping[str, Any] | None:
        """Return the JSON Schema that a tool declares of what it returns; None where it says nothing."""
        tool = self._state.tools.get(name)
        return tool.options.returns if tool is not None else None

    def has(self, name: str) -> bool:
        """True when a tool of that name is registered, refused or not."""
        return name in self._state.tools

    def count(self) -> int:
        """How many names are registered."""
        return len(self._state.tools)

    def is_empty(self) -> bool:
        """True when there are none."""
        return not self._state.tools

    def to_provider_defs(self, origin: Origin = Origin.MODEL) -> builtins.list[ProviderToolDef]:
        """Return definitions in OpenAI's form."""
        return [definition.to_openai() for definition in self.definitions(origin)]

    def schemas(self, origin: Origin = Origin.MODEL) -> builtins.list[AnthropicToolDef]:
        """Return definitions in Anthropic's form."""
        return [definition.to_anthropic() for definition in self.definitions(origin)]

    def to_mcp(self, origin: Origin = Origin.MODEL) -> builtins.list[dict[str, Any]]:
        """Return definitions in the form of MCP's tools/list, with options as annotations."""
        state = self._state
        return [tool.to_mcp(state.definition(tool)) for tool in state.visible(origin)]

    def to_python(self, origin: Origin = Origin.CODE, *, asynchronous: bool = False) -> str:
        """Return the tools as typed Python functions without bodies, for a model that writes code, or its author.

        Shape: the text of a `.pyi` module that type-checks on its own. `asynchronous`: with `async def`.
        """
        tools = ((tool.definition, tool.options.returns) for tool in self._state.visible(origin))
        return python_module(tools, asynchronous)

    async def search_tools(
        self,
        query: str,
        *,
        limit: int = FOUND,
        origin: Origin = Origin.CODE,
        policies: tuple[CallPolicy, ...] = (),
    ) -> builtins.list[ToolDefinition]:
        """Return the tools that fit a query, best first, among those that a caller from `origin` sees.

        Words count in names, then in descriptions, then in parameters; tools that the query names come first.

        Raises:
            UsageError: the query has more than 1,000 characters, or `limit` is not from 1 to 100.
        """
        return await find_soon(self.definitions(origin, policies=policies), query, limit)

    def describe_tools(
        self,
        names: Iterable[str] | None = None,
        *,
        detail: Detail = "full",
        origin: Origin = Origin.CODE,
        policies: tuple[CallPolicy, ...] = (),
    ) -> str:
        """Return tools as text for a model: as names, as signatures on a line each, or as full stubs. None: all.

        Raises:
            UsageError: there is no such tool or no such detail, or the text has more than 200,000 characters.
        """
        if isinstance(names, str):
            raise UsageError(f"describe_tools takes a list of names, not {names!r:.80}; write [{names!r:.80}]")
        state = self._state
        tools = {tool.name: tool for tool in state.visible(origin, policies)}
        definitions = [state.definition(tool, policies) for tool in tools.values()]
        wanted = definitions if names is None else named_of(definitions, names)
        return tools_text([(each, tools[each.name].options.returns) for each in wanted], detail)

    def shown_within(self, max_chars: int, origin: Origin = Origin.CODE) -> tuple[Detail | None, str]:
        """Return the most detailed text of all tools that has at most so many characters; (None, "") when none has."""
        return shown_within(
            [(tool.definition, tool.options.returns) for tool in self._state.visible(origin)], max_chars
        )

    def __len__(self) -> int:
        return len(self._state.tools)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._state.tools

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.tools)

    # Calling

    async def dispatch(
        self,
        name: str,
        args: Mapping[str, Any] | str | None,
        *,
        call_id: str = "",
        origin: Origin | None = None,
        context: RunContext | None = None,
    ) -> ToolResult:
        """Make one call, in the caller's task.

        `args` may be JSON text. Without a `context` the call belongs to the tool call it is made in, if any. Without
        an `origin` it has that call's, else `MODEL`.

        Raises:
            ToolAbort: the tool, or a hook, ended the run.
            AuditError: the call could not be recorded; unless it had started, it was not made.

        Cancellation: passes through; the tool was cancelled, and its end was recorded.
        """
        if context is not None and type(context) is not RunContext:
            check_kind("context=", context, RunContext, cure="write RunContext(user_id=...)")
        return await run_call(self._state, self.new_call(name, args, call_id, origin, context))

    def make(self, call: Call, *, preview: bool = False) -> Awaitable[ToolResult]:
        """Make a call that `new_call` returned. `preview`: its tool shows only what the call would do."""
        state = self._state
        if preview:
            state = replace(state, tools={call.name: state.tools[call.name].preview()})
        return run_call(state, call)

    def new_call(
        self,
        name: str,
        args: Mapping[str, Any] | str | None,
        call_id: str = "",
        origin: Origin | None = None,
        context: RunContext | None = None,
        **more: Any,
    ) -> Call:
        """Return the record of a call about to be made. `more`: `step`, `message` and `timeout_s` of a `Call`."""
        above = current.get()
        parent = None if above is None else above.call
        if context is None:
            context = self._shared_run if parent is None else parent.nested_run()
        elif parent is not None and parent.run.state is not context.state:
            share_labels(context)
            parent = None
        if origin is None:
            origin = Origin.MODEL if parent is None else parent.origin
        return Call(
            self,
            self._state.registered_name(name),
            raw_args=args,
            call_id=call_id,
            origin=origin,
            run=context,
            parent=parent,
            **more,
        )

    @staticmethod
    def check_plan(steps: object) -> dict[str, Any]:
        """Return a program's plan as the arguments of `execute_plan`, checked as a model's are.

        Raises:
            UsageError: it is not a list of steps, or holds what is not data.
        """
        from toolcell.tools.plan import plan_of

        return plan_of(steps)

    async def run_plan(self, args: Mapping[str, Any], run: RunContext, record: PlanRecord | None = None) -> ToolResult:
        """Run the steps of a plan; what `execute_plan` takes as arguments. `record`: of a plan that may wait."""
        from toolcell.tools.plan import run_plan

        def new_call(step: Step, args: Mapping[str, Any]) -> Call:
            call_id = f"plan_step_{step.index}"
            return self.new_call(step.tool, args, call_id, Origin.PLAN, run, step=step.index, timeout_s=step.timeout_s)

        return await run_plan(self._state, args, new_call, record)

    async def execute_batch(
        self,
        calls: Iterable[Any],
        *,
        context: RunContext | None = None,
        origin: Origin | None = None,
        sequential: bool | None = None,
        message: Any = None,
        on_result: OnResult | None = None,
    ) -> builtins.list[ToolResult]:
        """Make the calls of one model response, concurrently unless a tool or a setting says otherwise.

        Result i belongs to call i. A call is a ToolCall, a (name, arguments) pair, or a provider's dict. With `origin`
        or `message` the calls are a model's: of more than `max_batch` of them the rest is refused.

        Raises:
            ToolAbort, AuditError: as from `dispatch`.
        """
        run = self.new_run() if context is None else context
        made = [
            self.new_call(call.name, call.arguments, call_id=call.id, origin=origin, context=run, message=message)
            for call in unique_ids(map(ToolCall.read, calls))
        ]
        in_turn = self._state.in_turn(run) if sequential is None else sequential
        limit = None if origin is None and message is None else self.settings.max_batch
        return await run_batch(self._state, made, sequential=in_turn, limit=limit, on_result=on_result)

    @staticmethod
    def answer(call: Call, answer: ToolResult, note: str) -> Awaitable[ToolResult]:
        """Give a call an answer from elsewhere, and its place in the record. `note`: says where it comes from."""
        call.warnings = (note,)
        return answer_call(call, answer)

    def new_run(self, **fields: Any) -> RunContext:
        """Return a new run with this registry's settings; inside a tool call, a part of that call's run."""
        above = current.get()
        if above is not None and not above.call.run.scope.is_shared:
            return above.call.nested_run().child(**fields)
        fields.setdefault("events", self.events)
        run = RunContext(**fields)
        return run if above is None else run.within(parent_call_id=above.call_id)

    async def execute(
        self, name: str, args: Mapping[str, Any] | str | None = None, *, context: RunContext | None = None
    ) -> ToolResult:
        """Make one call, as a part of the run that `context` is about."""
        check_kind("a tool call's name", name, str, cure="write the name that the tool is registered by")
        return await self.dispatch(name, args if args is not None else {}, context=context)

    def execute_sync(
        self, name: str, args: Mapping[str, Any] | str | None = None, *, context: RunContext | None = None
    ) -> ToolResult:
        """Make one call and wait for it, in a program without an event loop and in synchronous tools.

        Raises:
            UsageError: an event loop runs in this thread.
        """
        work = functools.partial(self.execute, name, args, context=context)
        from toolcell.support.loop_thread import wait_for  # only programs without an event loop pay for it

        return wait_for(work, "execute_sync", "await registry.execute(...)")

    # Other registries over the same tools

    def snapshot(self) -> ToolRegistry:
        """Return this registry as it is now, frozen, for a run to work with."""
        return self if self._frozen else self._over(self._state, None).freeze()

    def with_tools(self, tools: Sequence[RegisteredTool]) -> ToolRegistry:
        """Return a snapshot that has these tools too, under the same rules and hooks.

        Raises:
            UsageError: another tool has one of their names.
        """
        known = self._state.tools
        for tool in tools:
            if (other := known.get(tool.name)) is not None and other.identity is not tool.identity:
                raise UsageError(f"a tool of the registry has the name {tool.name!r}, which is taken; rename it")
        state = replace(self._state, tools={**known, **{tool.name: tool for tool in tools}})
        return self._over(state, None).freeze()

    def _over(self, state: RegistryState, policy: CallPolicy | None) -> ToolRegistry:
        made = ToolRegistry.__new__(ToolRegistry)
        made._begin(state, self.events, self._shared_run, policy)
        return made

    @property
    def makes_requests(self) -> bool:
        """True when the libraries of a script may send HTTP requests."""
        return (tool := self._state.tools.get(HTTP)) is not None and not tool.options.listed

    def subset(self, select: Iterable[str] | Callable[[ToolDefinition], bool]) -> ToolRegistry:
        """Return a registry with some of the tools, by name or predicate, under this registry's rules and hooks.

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

    async def check_arguments(self, definition: ToolDefinition, received: Any) -> None:
        """Check in a checker process what a tool may be called with later, whoever described it.

        Raises:
            InvalidArguments: it does not fit.
        """
        await check_arguments(definition, received)

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
        check_collisions(tools.keys(), tools)
        return self._derived(tools, *others)

    def _derived(self, tools: Mapping[str, RegisteredTool], *others: ToolRegistry) -> ToolRegistry:
        """Return a registry over these tools, under the rules of this one, those of `others`, and rules of its own."""
        policy = CallPolicy()
        shared = [self.policy, *(other.policy for other in others)]  # asked for, so that later rules are shared too
        policies = [each for registry in (self, *others) for each in registry._state.policies]
        unique = dict.fromkeys([*policies, *shared, policy])
        return self._over(replace(self._state, tools=dict(tools), policies=tuple(unique)), policy)

    def follow(self, before: RegistryState, now: RegistryState) -> None:
        """Make the changes of tools, hooks and middleware that led another registry from one state to a later one."""
        with self._lock:
            self._check_open()
            gone = {name for name, tool in before.tools.items() if name not in now.tools}
            own = {n: tool for n, tool in self._state.tools.items() if n not in gone or tool is not before.tools[n]}
            self._change(
                tools=own | {name: tool for name, tool in now.tools.items() if before.tools.get(name) is not tool},
                hooks=(*self._state.hooks, *now.hooks[len(before.hooks) :]),
                middleware=(*self._state.middleware, *now.middleware[len(before.middleware) :]),
            )

    def __repr__(self) -> str:
        frozen = ", frozen" if self._frozen else ""
        return f"<ToolRegistry of {len(self)} tools{frozen}: {', '.join([*self][:8])}>"


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
    known = DEFAULT_TOOL_OPTIONS.changed(options)
    spec = ToolSpec.of_function(function, name=name, description=description, prepare=prepare, options=known)
    return FunctionTool(function, spec)
