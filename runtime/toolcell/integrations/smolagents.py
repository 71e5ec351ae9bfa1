"""smolagents: a `PythonExecutor` for its CodeAgent. What the agent's code defines stays until `cleanup`.

`CodeAgent(tools=[...], model=model, executor=ToolcellPythonExecutor())`. The agent's tools and managed agents are
functions in the sandbox, and run on the host; `final_answer(...)` ends the script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from toolcell.errors import UsageError
from toolcell.integrations.base import SyncRuntimeOwner, framework_tool, missing_package, tools_with
from toolcell.results import ExecutionResult, Outcome
from toolcell.sessions import SyncSession
from toolcell.support.checks import is_async
from toolcell.sync import SyncRuntime
from toolcell.tools import CodeTool, ToolRegistry, ToolSpec

try:
    from smolagents.local_python_executor import (
        DEFAULT_MAX_LEN_OUTPUT,
        CodeOutput,
        ExecutionTimeoutError,
        InterpreterError,
        PythonExecutor,
    )
    from smolagents.utils import truncate_content
except ModuleNotFoundError as exc:
    raise missing_package(exc, "smolagents") from exc

FINAL_ANSWER = "final_answer"

_SCHEMA_KEYS = frozenset({"description", "enum", "items", "properties", "additionalProperties", "anyOf", "required"})
"""Keys of what smolagents says of an input that a JSON Schema says too."""
_TYPES = frozenset({"string", "boolean", "integer", "number", "array", "object", "null"})
"""Those of smolagents' types that JSON Schema has. It has `any`, `image` and `audio` besides."""

_FLOAT = "$float"
"""Key of a number that JSON does not have, in a final answer on its way to the host."""

_DEFINE = f"""\
def define(name, parameters):
    import ast, dis, linecache, sys
    is_final = name == {FINAL_ANSWER!r}
    def sendable(value):
        if isinstance(value, float) and value - value != 0:
            return {{{_FLOAT!r}: repr(value)}}
        if isinstance(value, dict):
            return {{key: sendable(each) for key, each in value.items()}}
        return [sendable(each) for each in value] if isinstance(value, (list, tuple)) else value
    def finally_lines(script):
        nodes = ast.walk(ast.parse("".join(linecache.getlines(script))))
        steps = [step for node in nodes for step in getattr(node, "finalbody", ())]
        return {{line for step in steps for line in range(step.lineno, step.end_lineno + 1)}}
    def end(frame, event, arg):
        if event == "line":
            code, script = frame.f_code, frame.f_code.co_filename
            if script not in on_the_way_out:
                on_the_way_out[script] = finally_lines(script)
            # The bodies of `finally` run, and a `with` is left, as after any other exception.
            leaves_with = dis.opname[code.co_code[frame.f_lasti]] in ("PUSH_EXC_INFO", "WITH_EXCEPT_START")
            if not leaves_with and frame.f_lineno not in on_the_way_out[script]:
                raise SystemExit(0)
        return end
    on_the_way_out = {{}}
    def end_at_next_line(frame):
        # A bare `except:` takes the SystemExit below for its own; the next line that the script comes to ends it.
        while frame is not None and frame.f_code.co_filename.startswith("<code"):
            frame.f_trace = end
            frame = frame.f_back
        sys.settrace(lambda frame, event, arg: None)
    def called(*args, **kwargs):
        if len(args) > len(parameters):
            raise TypeError(f"{{name}}() takes {{len(parameters)}} arguments, and {{len(args)}} were given")
        for parameter, value in zip(parameters, args):
            if parameter in kwargs:
                raise TypeError(f"{{name}}() got two values of {{parameter!r}}")
            kwargs[parameter] = value
        answer = call_tool(name, {{key: sendable(each) for key, each in kwargs.items()}} if is_final else kwargs)
        if is_final:
            end_at_next_line(sys._getframe(1))
            raise SystemExit(0)
        return answer
    called.__name__ = called.__qualname__ = name
    return called
globals().update((name, define(name, parameters)) for name, parameters in parameters_by_tool.items())
del define, parameters_by_tool
"""
"""Makes functions of the agent's tools. Runs in the session, so they are there for every script after it."""


class ToolcellPythonExecutor(PythonExecutor):
    """Runs a CodeAgent's code in one session of a sandbox. The agent's `cleanup`, or its `with` block, ends it.

    With a `runtime` of the program's, that is used: a `SyncRuntime`. Its registry's tools are there as well, and its
    hooks and rules hold for the agent's. Otherwise `options` are the arguments of one of the executor's own. Each
    script has `Limits.wall_s` seconds, the time of its tools and managed agents included.
    """

    def __init__(
        self,
        runtime: SyncRuntime | None = None,
        *,
        max_print_outputs_length: int | None = None,
        additional_functions: Mapping[str, Callable[..., Any]] | None = None,
        **options: Any,
    ) -> None:
        self._owner = SyncRuntimeOwner(runtime, options)
        self._functions = dict(additional_functions or {})
        self._max_output = DEFAULT_MAX_LEN_OUTPUT if max_print_outputs_length is None else max_print_outputs_length
        self._session: SyncSession | None = None
        self._tools: ToolRegistry | None = None
        self._answers: list[Any] = []
        self.state: dict[str, Any] = {}
        """`_print_outputs` is what the last script printed. The agent reads it when a script fails."""

    def send_variables(self, variables: dict[str, Any]) -> None:
        """Define variables in the session.

        Raises:
            UsageError: one is not plain data, so it cannot be sent to a sandbox.
        """
        if variables:
            _checked(self._opened().execute_code("", inputs=variables))

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Define the agent's tools and managed agents as functions, in place of those that were sent before.

        Raises:
            RegistrationError: a name is taken by a tool of the runtime's registry, or cannot be that of a tool.
        """
        specs = [self._spec(name, tool) for name, tool in tools.items()]
        specs += [
            ToolSpec.of_function(
                function, name=name, description=function.__doc__ or f"{name}, a function of the program."
            )
            for name, function in self._functions.items()
        ]
        self._tools = tools_with(self._owner.registry, specs)
        parameters = {each.definition.name: [*each.definition.parameters.get("properties", ())] for each in specs}
        _checked(self._opened().execute_code(_DEFINE, inputs={"parameters_by_tool": parameters}, tools=self._tools))

    def __call__(self, code_action: str) -> CodeOutput:
        """Run a script and return its last value, or its final answer, with what it printed.

        Raises:
            InterpreterError: the script failed, and why; `state` has what it printed.
            ExecutionTimeoutError: it had no more time.
        """
        self._answers.clear()
        result = self._opened().execute_code(code_action, tools=self._tools)
        logs = truncate_content(result.logs.text, max_length=self._max_output)
        self.state["_print_outputs"] = logs
        if self._answers:
            return CodeOutput(output=self._answers[-1], logs=logs, is_final_answer=True)
        return CodeOutput(output=_checked(result).value, logs=logs, is_final_answer=False)

    def cleanup(self) -> None:
        """End the session, and the runtime if it is the executor's own. Safe to call twice."""
        session, self._session = self._session, None
        self._owner.close(session)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cleanup()

    def _opened(self) -> SyncSession:
        if self._session is None:
            self._session = self._owner.open().session().__enter__()
        return self._session

    def _spec(self, name: str, tool: Any) -> ToolSpec:
        if is_async(getattr(tool, "forward", tool)):
            raise UsageError(f"tool {name!r} is async, and smolagents calls no such tools")

        def call(args: dict[str, Any]) -> Any:
            return tool(**args)

        def answer(args: dict[str, Any]) -> None:
            self._answers.append(tool(**{key: _received(each) for key, each in args.items()}))

        # smolagents shows its model what a tool raised.
        return framework_tool(
            name,
            tool.description,
            _schema(tool.inputs),
            answer if name == FINAL_ANSWER else call,
            source=tool,
            expose_errors=True,
            orchestrates=hasattr(tool, "run") and hasattr(tool, "memory"),  # an agent, which may take its time
        )


def _received(value: Any) -> Any:
    """Return a part of a final answer with the numbers that JSON does not have."""
    if isinstance(value, dict):
        if list(value) == [_FLOAT] and value[_FLOAT] in ("nan", "inf", "-inf"):
            return float(value[_FLOAT])
        return {key: _received(each) for key, each in value.items()}
    return [_received(each) for each in value] if isinstance(value, list) else value


def _schema(inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON Schema of what smolagents says of a tool's inputs."""
    properties = {name: _property(said) for name, said in inputs.items()}
    required = [name for name, said in inputs.items() if not said.get("nullable")]
    return {"properties": properties, "required": required, "additionalProperties": False}


def _property(said: Mapping[str, Any]) -> dict[str, Any]:
    schema = {key: value for key, value in said.items() if key in _SCHEMA_KEYS}
    given = said.get("type", "any")
    types = [given] if isinstance(given, str) else list(given)
    if not _TYPES.issuperset(types):
        return {"description": said.get("description", "")}
    if said.get("nullable") and "null" not in types:
        types.append("null")
        if "enum" in schema:
            schema["enum"] = [*schema["enum"], None]
    return {"type": types[0] if len(types) == 1 else types, **schema}


def _checked(result: ExecutionResult) -> ExecutionResult:
    """Return a result of a script that reached its end.

    Raises:
        InterpreterError, ExecutionTimeoutError: it did not.
    """
    if result.ok:
        return result
    kind = ExecutionTimeoutError if result.outcome is Outcome.TIMEOUT else InterpreterError
    raise kind(CodeTool.failure(result))
