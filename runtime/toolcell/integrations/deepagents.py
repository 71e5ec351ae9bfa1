"""toolcell as the interpreter of deep agents, and of LangChain's agents (`pip install 'toolcell[deepagents]'`).

`CodeInterpreterMiddleware` gives an agent a tool that runs Python. Scripts may call the agent's own tools, and names
and files of a thread stay in a session. What the tool does is in `langchain`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, get_args

from toolcell.calls.run_state import new_id
from toolcell.config import Limits, OnApproval
from toolcell.errors import UsageError
from toolcell.integrations.base import ConversationSessions, missing_package
from toolcell.runtime import Runtime
from toolcell.sessions import Session
from toolcell.support.checks import brief, check_kind, check_one_of
from toolcell.sync import SyncRuntime
from toolcell.tools import CodeTool, Origin, ToolRegistry

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest
    from langchain.agents.middleware.types import PrivateStateAttr
    from langchain.tools import ToolRuntime
    from langchain_core.messages import SystemMessage
    from langchain_core.tools import BaseTool
    from langgraph.config import get_config
except ModuleNotFoundError as exc:
    raise missing_package(exc, "deepagents") from exc

from toolcell.integrations.base import home_of
from toolcell.integrations.langchain import GraphScripts, registry_with

Mode = Literal["thread", "turn", "call"]
STUBS_CHARS = 200_000
"""Most characters of the tools in the system message: past it they are shown in less detail."""


class CodeInterpreterState(AgentState[Any]):
    """What the middleware keeps in an agent's state."""

    toolcell_session: NotRequired[Annotated[str | None, PrivateStateAttr]]  # type: ignore[valid-type]


class CodeInterpreterMiddleware(AgentMiddleware[CodeInterpreterState, Any, Any]):
    """Gives an agent a tool that runs Python, whose scripts may call the agent's own tools.

    With `create_agent` and with `create_deep_agent`: `middleware=[CodeInterpreterMiddleware(runtime, ptc=["search"])]`.
    """

    state_schema = CodeInterpreterState

    def __init__(
        self,
        runtime: Runtime | SyncRuntime,
        *,
        ptc: Sequence[str | BaseTool] = (),
        mode: Mode = "thread",
        tool_name: str = CodeTool.NAME,
        interrupt_on: Mapping[str, bool | Mapping[str, Any]] | None = None,
        limits: Limits | None = None,
        on_approval: OnApproval = "suspend",
    ) -> None:
        """`ptc`: what scripts may call besides the runtime's own tools: names of the agent's tools, or tools. `mode`:
        how long names and files stay: for the thread, for one turn of the agent, or for one call. `interrupt_on`: calls
        of these tools out of scripts need approval; as in `HumanInTheLoopMiddleware`, with `allowed_decisions` and
        `description`. The other arguments are those of `code_execution_tool`.

        Raises:
            UsageError: an argument is wrong.
        """
        super().__init__()
        check_kind("runtime", runtime, Runtime, SyncRuntime, cure="write CodeInterpreterMiddleware(Runtime(...))")
        check_one_of("mode", mode, get_args(Mode))
        if isinstance(ptc, str | BaseTool) or not all(isinstance(each, str | BaseTool) for each in ptc):
            raise UsageError(f"ptc= takes a list of names and tools, not {brief(ptc)}")
        self._home, self._mode, self._ptc, self._name = home_of(runtime), mode, tuple(ptc), tool_name
        reviews = _reviews(interrupt_on or {})
        self._asked = frozenset(reviews)
        self._merged: tuple[list[Any], ToolRegistry] = [], self._home.registry
        self._sessions = ConversationSessions()
        self._given = runtime
        scripts = GraphScripts(
            runtime,
            self._place,
            tools=lambda graph: self._registry(graph.tools if graph is not None else ()),
            limits=limits,
            on_approval=on_approval,
            reviews=reviews,
        )
        self.tools = [scripts.as_tool(tool_name, None)]

    def _callable(self, offered: Iterable[Any]) -> list[BaseTool]:
        """Return the tools of LangChain that scripts may call, out of those that the agent has."""
        named = {each.name: each for each in offered if isinstance(each, BaseTool) and each.name in self._ptc}
        own = {each.name: each for each in self._ptc if isinstance(each, BaseTool)}
        return [each for name, each in {**named, **own}.items() if name != self._name]

    def _registry(self, offered: Iterable[Any]) -> ToolRegistry:
        tools = self._callable(offered)
        known, registry = self._merged
        if [id(each) for each in known] != [id(each) for each in tools]:
            registry = registry_with(self._home.registry, tools, self._asked)
            self._merged = tools, registry
        return registry

    # Tell the model.

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        """Add what scripts may call to the system message."""
        return handler(self._with_stubs(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]
    ) -> Any:
        """Add what scripts may call to the system message."""
        return await handler(self._with_stubs(request))

    def _with_stubs(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        tools = self._callable(request.tools)
        if not tools:
            return request
        described = self._registry(tools).subset([each.name for each in tools])
        if not (names := described.names(Origin.CODE)):
            return request
        _, stubs = described.shown_within(STUBS_CHARS)
        stays = _STAYS[self._mode]
        if stubs:
            said = f"Scripts of `{self._name}` may also call these tools.{stays}\n\n```python\n{stubs}\n```"
        else:
            search = "print(search_tools('what it is to do')) in a script finds the right ones"
            said = f"Scripts of `{self._name}` may also call {len(names)} tools: too many to list. {search}.{stays}"
        return request.override(system_message=_extended(request.system_message, said))

    # Sessions.

    async def _place(self, graph: ToolRuntime | None) -> Runtime | Session:
        name = graph.state.get("toolcell_session") if graph is not None else None
        if self._mode == "call" or not name:
            return self._home
        restore: Literal["if_kept"] | None = "if_kept" if self._home.journals.is_durable else None
        return await self._sessions.get(name, lambda: self._home.session(name, restore=restore))

    def before_agent(self, state: CodeInterpreterState, runtime: Any) -> dict[str, Any] | None:
        """Name the session of the thread, or of the turn."""
        if self._mode == "call" or (self._mode == "thread" and state.get("toolcell_session")):
            return None
        return {"toolcell_session": new_id()}

    def after_agent(self, state: CodeInterpreterState, runtime: Any) -> dict[str, Any] | None:
        """Close the session of the turn."""
        if (name := self._ended(state)) is None:
            return None
        if name in self._sessions and isinstance(self._given, SyncRuntime):
            self._given.call(partial(self._sessions.close, name))
        return {"toolcell_session": None}

    async def aafter_agent(self, state: CodeInterpreterState, runtime: Any) -> dict[str, Any] | None:
        """Close the session of the turn."""
        if (name := self._ended(state)) is None:
            return None
        await self._sessions.close(name)
        return {"toolcell_session": None}

    def _ended(self, state: CodeInterpreterState) -> str | None:
        """Return the session that the next turn has no use for: nobody keeps the state of this thread."""
        name = state.get("toolcell_session")
        is_over = name and (self._mode == "turn" or "thread_id" not in get_config().get("configurable", {}))
        return name if is_over else None


_STAYS: Mapping[Mode, str] = {
    "thread": " Names and files of earlier scripts are still there.",
    "turn": " Names and files of earlier scripts are still there, until you answer without a tool call.",
    "call": "",
}


def _reviews(interrupt_on: Mapping[str, bool | Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is asked about calls of each tool.

    Raises:
        UsageError: it is neither a bool nor a mapping with the two keys that can be heeded here.
    """
    reviews: dict[str, Any] = {}
    for name, review in interrupt_on.items():
        if isinstance(review, Mapping) and not review.keys() - {"allowed_decisions", "description"}:
            reviews[name] = dict(review)
        elif review is True:
            reviews[name] = {}
        elif review is not False:
            raise UsageError(
                f"interrupt_on[{name!r}] is True, False or a mapping with allowed_decisions and description, "
                f"not {brief(review)}"
            )
    return reviews


def _extended(system: SystemMessage | None, text: str) -> SystemMessage:
    if system is None:
        return SystemMessage(text)
    if isinstance(system.content, str):
        content: Any = f"{system.content}\n\n{text}"
    else:
        content = [*system.content, {"type": "text", "text": text}]
    return system.model_copy(update={"content": content})
