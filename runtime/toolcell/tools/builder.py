"""A tool built step by step, without writing a schema: `Tool(name, description).param(...).call(function)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from toolcell.errors import RegistrationError
from toolcell.tools.adapters import positional_spec
from toolcell.tools.definition import ToolDefinition, check_definition
from toolcell.tools.options import DEFAULT_TOOL_OPTIONS
from toolcell.tools.spec import ToolSpec

PARAMETER_TYPES = ("string", "integer", "number", "boolean", "array", "object")


class Tool:
    """Collects parameters; `call` is last and makes it complete."""

    def __init__(self, name: str, description: str) -> None:
        self.name = name
        self._description = description
        self._properties: dict[str, Any] = {}
        self._required: list[str] = []
        self._function: Callable[[dict[str, Any]], Any] | None = None

    def param(self, name: str, type: str, description: str) -> Self:
        """Add a parameter that every call must give.

        Raises:
            RegistrationError: `type` is no JSON Schema type, the name is taken, or the tool is already complete.
        """
        self._add(name, type, description)
        self._required.append(name)
        return self

    def param_opt(self, name: str, type: str, description: str) -> Self:
        """Add a parameter that a call may leave out.

        Raises:
            RegistrationError: as for `param`.
        """
        self._add(name, type, description)
        return self

    def _add(self, name: str, type: str, description: str) -> None:
        if self._function is not None:
            raise RegistrationError(f"tool {self.name!r}: call() comes last; {name!r} is after it")
        if type not in PARAMETER_TYPES:
            known = ", ".join(PARAMETER_TYPES)
            raise RegistrationError(f"tool {self.name!r}: {name!r} has type {type!r}, which is none of {known}")
        if name in self._properties:
            raise RegistrationError(f"tool {self.name!r}: two parameters are called {name!r}")
        self._properties[name] = {"type": type, "description": description}

    def call(self, function: Callable[[dict[str, Any]], Any]) -> Self:
        """Attach the function, which takes the arguments as one dict.

        Raises:
            RegistrationError: the definition is wrong.
        """
        self._function = function
        check_definition(self.definition)
        return self

    @property
    def definition(self) -> ToolDefinition:
        """What the model will see."""
        schema = {"type": "object", "properties": self._properties, "required": self._required}
        return ToolDefinition(self.name, self._description, schema)

    def to_spec(self) -> ToolSpec:
        """Return the spec that a registry stores.

        Raises:
            RegistrationError: there is no function yet.
        """
        if self._function is None:
            raise RegistrationError(f"tool {self.name!r} has no function; end with .call(function)")
        return positional_spec(self.definition, self._function, DEFAULT_TOOL_OPTIONS, source=self)
