"""`EnablingRegistry`: the part of a registry that offers a model plans, code and a search for tools."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from toolcell.errors import RegistrationError
from toolcell.tools.code import CodeRuntime, code_spec, flows_of, plan_spec
from toolcell.tools.detail import SHOWN_CHARS
from toolcell.tools.policy import CallPolicy
from toolcell.tools.script_tools import ScriptRegistry
from toolcell.tools.search_tool import search_spec
from toolcell.tools.spec import ToolSpec, compile_tool


class EnablingRegistry(ScriptRegistry):
    """Offers the tools that toolcell itself has. Each replaces the one that was offered before."""

    @property
    @abstractmethod
    def policy(self) -> CallPolicy:
        """Rules about who may call what."""

    def enable_plan_execution(self, **options: Any) -> None:
        """Offer `execute_plan` to the model.

        Raises:
            RegistrationError: another tool has this name.
        """
        self.enable(plan_spec(options))

    def enable_code_execution(self, runtime: CodeRuntime, *, shown_chars: int = SHOWN_CHARS, **options: Any) -> None:
        """Offer `execute_code` to the model, run by `runtime`.

        `shown_chars`: its description tells of the tools in the most detailed way that has at most so many characters:
        stubs, a line each, names, or only how to search for them.

        Raises:
            RegistrationError: another tool has this name.
        """
        self.enable(code_spec(runtime, options, shown_chars))
        self.policy.add_flow(*flows_of(runtime))

    def enable_tool_search(self, **options: Any) -> None:
        """Offer `search_tools` to the model. `definitions(shown_chars=...)` then leaves out what a search finds.

        Raises:
            RegistrationError: another tool has this name.
        """
        self.enable(search_spec(options))

    def enable(self, spec: ToolSpec) -> None:
        """Offer one of these tools in place of the one before.

        Raises:
            RegistrationError: a tool of that name is none of these.
        """
        name = spec.definition.name
        known = self._state.tools.get(name)
        if known is not None and known.spec.describe is None:  # these alone are described by what else is offered
            raise RegistrationError(f"tool {name!r}: toolcell's own tool of that name would hide it; rename it")
        self._put([compile_tool(spec)], replace=True)
