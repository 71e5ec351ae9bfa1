"""DSPy: a `CodeInterpreter` for `dspy.RLM`, `dspy.CodeAct` and `dspy.ProgramOfThought`, with DSPy's tools.

    with SyncRuntime(registry) as runtime:
        rlm = dspy.RLM("question -> answer", tools=[search], interpreter_factory=interpreter_factory(runtime))

Each interpreter is a session: names, imports and files stay from one execution to the next.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import keyword
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from pydantic_core import PydanticSerializationError, to_jsonable_python

from toolcell.calls.result import to_json
from toolcell.config import Limits
from toolcell.errors import ToolcellError, UsageError
from toolcell.integrations.base import SyncRuntimeOwner, framework_tool, missing_package, tools_with
from toolcell.results import ExecutionResult, Outcome
from toolcell.sessions import SyncSession
from toolcell.sync import SyncRuntime
from toolcell.tools import CodeTool, ToolRegistry, ToolSpec
from toolcell_bridge.guest.tools import GUEST_NAMES
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge

try:
    import dspy
    from dspy.primitives.code_interpreter import CodeExecutionError, CodeInterpreterError, FinalOutput
    from dspy.utils.callback import with_callbacks
except ModuleNotFoundError as exc:
    raise missing_package(exc, "dspy") from exc

__all__ = ["ToolcellInterpreter", "interpreter_factory"]

SUBMIT = "SUBMIT"
"""What a model calls with its final answer."""

SUBMITTED = "dspy.SUBMIT"
"""Key of the final answer in a script's result."""

BIND = """\
def _toolcell_bind(call_tool, set_result, parameters, fields):
    def tool(name, registered, order):
        def function(*values, **given):
            if len(values) > len(order):
                raise TypeError(f"{name}() takes at most {len(order)} positional arguments: {', '.join(order)}")
            first = dict(zip(order, values))
            if twice := first.keys() & given.keys():
                raise TypeError(f"{name}() got multiple values for argument {min(twice)!r}")
            return call_tool(registered, {**first, **given})

        function.__name__ = function.__qualname__ = name
        return function

    def SUBMIT(*values, **given):
        names = ["output"] if fields is None else fields
        if values and given:
            raise TypeError("SUBMIT() takes values in order or by name, not both")
        answer = dict(zip(names, values)) if values else given
        if len(values) > len(names) or set(answer) != set(names):
            raise TypeError(f"SUBMIT() takes these output fields, each once: {', '.join(names)}")
        set_result({"dspy.SUBMIT": answer})
        raise SystemExit

    return {"SUBMIT": SUBMIT, **{name: tool(name, *each) for name, each in parameters.items()}}

globals().update(_toolcell_bind(call_tool, set_result, _toolcell_parameters, _toolcell_fields))
del _toolcell_bind, _toolcell_parameters, _toolcell_fields, _toolcell_source
"""
"""Defines the tools and SUBMIT as functions in the session."""

BEGIN = "exec(compile(_toolcell_source, '<frozen toolcell>', 'exec'), globals())"
"""Runs `BIND` under a file name of its own, so that its lines are in no traceback."""

SET_VARIABLES = "globals().update(_toolcell_variables)\ndel _toolcell_variables"


class ToolcellInterpreter:
    """A `dspy.primitives.code_interpreter.CodeInterpreter` whose code runs in a toolcell session.

    `tools` maps names to functions of the host, as in DSPy's own interpreters. Scripts call them by name, beside the
    tools of the runtime's registry, whose rules, hooks and audit log hold for both. Without `runtime` the interpreter
    opens one of its own, and `options` are the arguments of `Runtime`. `limits`: of each execution.
    """

    execution_instructions = (
        "Code runs as full CPython in a sandbox without network access and without files or environment of the host. "
        "Names, imports and files persist between executions. Tools and SUBMIT are global functions; tools are the "
        "only way out of the sandbox."
    )

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]] | None = None,
        output_fields: Sequence[Mapping[str, Any]] | None = None,
        *,
        runtime: SyncRuntime | None = None,
        limits: Limits | None = None,
        callbacks: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        self.tools: dict[str, Callable[..., Any]] = dict(tools or {})
        """Functions of the host by name. `dspy.RLM` adds its own before each execution."""
        self.output_fields = None if output_fields is None else [dict(field) for field in output_fields]
        """Fields of the final answer: dicts with a `name`. None: SUBMIT takes one value."""
        self.callbacks = list(callbacks or [])
        self._owner = SyncRuntimeOwner(runtime, options)
        self._limits = limits
        self._session: SyncSession | None = None
        self._is_over = False
        self._context = contextvars.copy_context()
        self._registry: tuple[Any, ToolRegistry] = (None, self._owner.registry)
        self._bound: Any = None

    # The protocol of DSPy.

    @with_callbacks  # type: ignore[untyped-decorator, unused-ignore]
    def start(self) -> None:
        """Open the session. May be called any number of times before `shutdown`; `execute` does it too.

        Raises:
            CodeInterpreterError: it was shut down, or no sandbox could be started.
        """
        if self._is_over:
            raise CodeInterpreterError("this ToolcellInterpreter was shut down; make another one")
        if self._session is not None:
            return
        try:
            self._session = self._owner.open().session(limits=self._limits).__enter__()
        except ToolcellError as exc:
            raise CodeInterpreterError(f"no session could be opened: {exc}") from exc

    @with_callbacks  # type: ignore[untyped-decorator, unused-ignore]
    def execute(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        """Run code in the session, with `variables` as names in it.

        Returns `FinalOutput` after SUBMIT, otherwise the value of the last expression, or what was printed, or both
        as text.

        Raises:
            SyntaxError: it does not compile.
            CodeExecutionError: it failed, reached a limit, or a tool that it called failed. The next execution finds
                the state that was left; a sandbox that was lost is rebuilt without calling a tool again.
            CodeInterpreterError: it could not be run.
        """
        self._context = contextvars.copy_context()
        self.start()
        try:
            registry = self._tools()
            inputs = self._inputs(registry, variables or {})
            if self._is_source_of_a_tool(code, registry):
                return None  # dspy.CodeAct defines its tools in the sandbox; these are functions there already
            self._bind(registry)
            return _output(self._run(code, registry, inputs))
        except ToolcellError as exc:
            raise CodeInterpreterError(str(exc)) from exc

    def __call__(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        return self.execute(code, variables)

    @with_callbacks  # type: ignore[untyped-decorator, unused-ignore]
    def shutdown(self) -> None:
        """Destroy the session. May be called twice; the interpreter cannot be used again."""
        self._is_over = True
        session, self._session = self._session, None
        self._owner.close(session)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    @with_callbacks  # type: ignore[untyped-decorator, unused-ignore]
    def invoke_tool(self, tool_name: str, kwargs: dict[str, Any]) -> Any:
        """Call a function of `tools`; DSPy's callbacks see it. The registry calls this for a script."""
        result = self.tools[tool_name](**kwargs)
        return asyncio.run(_as_coroutine(result)) if inspect.isawaitable(result) else result

    # Tools.

    def _tools(self) -> ToolRegistry:
        """Return what a script may call now: the runtime's tools and those of `self.tools`."""
        key = [(name, id(function)) for name, function in self.tools.items()]
        if self._registry[0] != key:
            specs = [self._spec(name, function) for name, function in self.tools.items()]
            self._registry = key, tools_with(self._owner.registry, specs)
        return self._registry[1]

    def _spec(self, name: str, function: Callable[..., Any]) -> ToolSpec:
        if not _is_name(name) or name == SUBMIT:
            raise UsageError(f"a tool's name must be a Python identifier other than SUBMIT, and {name!r:.80} is not")
        described = function if isinstance(function, dspy.Tool) else dspy.Tool(function, name=name)

        def call(args: dict[str, Any]) -> Any:
            return self._context.copy().run(self.invoke_tool, name, args)

        # DSPy shows a model what its tools raise, such as a budget of LM calls that is used up.
        schema = _schema(described)
        return framework_tool(_registered(name), described.desc, schema, call, source=function, expose_errors=True)

    def _is_source_of_a_tool(self, code: str, registry: ToolRegistry) -> bool:
        sources = [tool.spec.source for tool in registry.state.tools.values() if code.find(tool.name) >= 0]
        return any(code == _source(source) for source in sources)

    def _bind(self, registry: ToolRegistry) -> None:
        """Define the tools and SUBMIT in the session, when they are not what they were."""
        called = {tool.name: tool.name for tool in registry.state.tools.values() if _is_name(tool.name)}
        called |= {name: _registered(name) for name in self.tools}
        definitions = {name: registry.state.tools[known].definition for name, known in called.items()}
        parameters = {
            name: (called[name], list(each.parameters.get("properties", {}))) for name, each in definitions.items()
        }
        fields = None if self.output_fields is None else [field.get("name") for field in self.output_fields]
        wanted = (parameters, fields)
        if wanted == self._bound:
            return
        if fields is not None and not all(map(_is_name, fields)):
            raise UsageError(f"each of output_fields needs a name that is a Python identifier, not {fields!r:.200}")
        inputs = {"_toolcell_source": BIND, "_toolcell_parameters": parameters, "_toolcell_fields": fields}
        self._prepare(BEGIN, registry, inputs)
        self._bound = wanted

    # Running.

    def _inputs(self, registry: ToolRegistry, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables as inputs; names that the sandbox uses itself are set beforehand."""
        taken = {SUBMIT, *registry.state.tools, *self.tools}
        if wrong := [name for name in variables if not _is_name(name) or name in taken]:
            raise UsageError(f"variables must have names that are Python identifiers and no tools, not {wrong!r:.200}")
        plain = {name: _plain(name, value) for name, value in variables.items()}
        if own := {name: plain.pop(name) for name in GUEST_NAMES & plain.keys()}:
            self._bind(registry)  # before they are gone
            self._prepare(SET_VARIABLES, registry, {"_toolcell_variables": own})
        return plain

    def _prepare(self, source: str, registry: ToolRegistry, inputs: dict[str, Any]) -> None:
        result = self._run(source, registry, inputs, lint="off")
        if not result.ok:
            raise UsageError(f"the session could not be prepared: {CodeTool.failure(result)}")

    def _run(self, source: str, registry: ToolRegistry, inputs: dict[str, Any], **options: Any) -> ExecutionResult:
        assert self._session is not None
        return self._session.execute_code(source, inputs=inputs, tools=registry, **options)


def interpreter_factory(runtime: SyncRuntime, **options: Any) -> Callable[[], ToolcellInterpreter]:
    """Return what DSPy's modules take as `interpreter_factory`: each interpreter is a session of `runtime`.

    `options` are those of `ToolcellInterpreter`. `runtime` must be open while DSPy's modules run.
    """
    factory = functools.partial(ToolcellInterpreter, runtime=runtime, **options)
    setattr(factory, "execution_instructions", ToolcellInterpreter.execution_instructions)  # noqa: B010
    return factory


def _output(result: ExecutionResult) -> Any:
    """Return a run's result as DSPy's interpreters do, or raise its failure."""
    if not result.ok:
        said = CodeTool.failure(result)
        if printed := result.logs.text.rstrip("\n"):
            said = f"{printed}\n{said}"
        if result.outcome is Outcome.ERROR and result.error is not None and result.error.type in _SYNTAX_ERRORS:
            raise SyntaxError(said)
        if result.outcome in (Outcome.CANCELLED, Outcome.UNAVAILABLE):
            raise CodeInterpreterError(said)
        raise CodeExecutionError(said)
    value, printed = result.value, result.logs.text.rstrip("\n")
    if isinstance(value, dict) and value.keys() == {SUBMITTED}:
        return FinalOutput(value[SUBMITTED])
    if value is None:
        return printed or None
    try:
        json.dumps(value)  # DSPy's modules do this
    except (TypeError, ValueError):
        value = to_json(value)
    return f"{printed}\n{value}" if printed else value


_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")


def _schema(tool: dspy.Tool) -> dict[str, Any] | None:
    if tool.has_kwargs or not isinstance(tool.args, dict):
        return None
    required = [name for name, schema in tool.args.items() if "default" not in schema]
    return {"properties": tool.args, "required": required, "additionalProperties": False}


def _plain(name: str, value: Any) -> Any:
    """Return a variable as what can be sent: pydantic models and the like become JSON values.

    Raises:
        UsageError: it has no such form.
    """
    try:
        return to_plain(value, name)
    except (UnsendableValue, ValueTooLarge):
        pass
    try:
        return to_plain(to_jsonable_python(value), name)
    except (UnsendableValue, ValueTooLarge, PydanticSerializationError, UnicodeDecodeError) as exc:
        raise UsageError(f"variable {name!r} cannot be sent to a sandbox: {exc}") from exc


def _source(source: Any) -> str | None:
    function = source.func if isinstance(source, dspy.Tool) else getattr(source, "function", source)
    try:
        return inspect.getsource(function)
    except (TypeError, OSError):
        return None


def _registered(name: str) -> str:
    """Return a tool's name in the registry, which takes none like `__dspy_call__`: DSPy's sub-agents have such."""
    own = name.strip("_").removeprefix("dspy_")
    return f"dspy.{own}" if name.startswith("__") and name.endswith("__") and own else name


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
