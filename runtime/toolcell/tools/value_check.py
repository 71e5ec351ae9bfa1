"""`ValueCheck`: what is wrong with a value that a schema describes, such as a tool's answer, in bounded time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolcell.tools.problems import find_problems
from toolcell.tools.schema_work import MAX_CHECK_WORK, SchemaWork, count_values
from toolcell.tools.subschemas import Subschemas, compile_schema
from toolcell.tools.values import ValueProblem


class ValueCheck:
    """Checks values against one schema. The library's `is_valid` takes linear time, and its errors do not."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Compile the schema.

        Raises:
            RegistrationError: it cannot be used.
        """
        self._schemas = Subschemas(schema)
        self._is_valid = compile_schema(schema).is_valid
        self._work = SchemaWork(schema)

    def work_of(self, value: Any) -> int:
        """Return the steps that a check may take; of a value that is not checked, some that are too many."""
        return self._work.of(count_values(value, MAX_CHECK_WORK // self._work.each))

    def problem(self, value: Any) -> ValueProblem | None:
        """Return what is wrong first; None when the value fits."""
        work = self.work_of(value)
        if work > MAX_CHECK_WORK:
            return ValueProblem((), f"is too large for its schema to be checked ({work} steps, limit {MAX_CHECK_WORK})")
        try:
            return None if self._is_valid(value) else find_problems(self._schemas, value, work)[0]
        except (ValueError, RecursionError, OverflowError) as exc:
            return ValueProblem((), f"cannot be checked: {type(exc).__name__}")
