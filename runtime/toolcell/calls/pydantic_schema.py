"""JSON Schemas of types that are not made of built-in ones: pydantic describes them.

It takes a tenth of a second to import, so this module is imported when there is such a type. What pydantic adds for
itself is taken away again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema

from toolcell.calls.schema import BASE64, OF_RESULTS, Schema, clean_schema
from toolcell.errors import RegistrationError


class _Described(GenerateJsonSchema):
    """pydantic's description of types, with bytes as base64 text. Rules about their length are left to pydantic.

    As arguments ("validation") a duration may be seconds too: that is what scripts and results have. As results
    ("serialization") types are what `to_plain` makes of them: serializers count inside models of pydantic only.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._models = 0
        """Those that the described type is inside of."""

    def generate_inner(self, schema: Any) -> Schema:
        is_dumped = schema["type"] in ("model", "dataclass") and hasattr(schema["cls"], "__pydantic_serializer__")
        self._models += is_dumped
        try:
            return super().generate_inner(schema)
        finally:
            self._models -= is_dumped

    def ser_schema(self, schema: Any) -> Schema | None:
        return super().ser_schema(schema) if self._models else None

    def bytes_schema(self, schema: Any) -> Schema:
        return dict(BASE64)

    def timedelta_schema(self, schema: Any) -> Schema:
        if self.mode == "serialization":
            return {"type": "number"}
        return {"type": ["number", "string"], "format": "duration"}

    def field_is_required(self, field: Any, total: bool) -> bool:
        if self.mode == "validation" or field["type"] == "typed-dict-field":
            return super().field_is_required(field, total)
        return "serialization_exclude_if" not in field

    def model_fields_schema(self, schema: Any) -> Schema:
        return self._with_names_of_results(super().model_fields_schema(schema), schema, schema["fields"].items())

    def dataclass_args_schema(self, schema: Any) -> Schema:
        fields = [(field["name"], field) for field in schema["fields"]]
        return self._with_names_of_results(super().dataclass_args_schema(schema), schema, fields)

    def _with_names_of_results(self, described: Schema, schema: Any, fields: Iterable[tuple[str, Any]]) -> Schema:
        if self.mode == "serialization":
            return described
        names: dict[str, str | None]
        names = {field.get("serialization_alias", name): _argument_name(name, field) for name, field in fields}
        names |= {each.get("alias", each["property_name"]): None for each in schema.get("computed_fields", ())}
        others = [[*each] for each in names.items() if each[0] not in described.get("properties", ())]
        return {**described, OF_RESULTS: others} if others else described


def _argument_name(name: str, field: Mapping[str, Any]) -> str:
    """Return what a field is called in arguments: its alias, of several the first that is one name."""
    alias = field.get("validation_alias", name)
    if isinstance(alias, str):
        return alias
    paths = [path if isinstance(path, list) else [path] for path in alias]
    return next((path[0] for path in paths if len(path) == 1), name)


def described_schema(annotation: Any, mode: Literal["validation", "serialization"]) -> Schema:
    """Return the clean JSON Schema of one Python type: of an argument, or of a result ("serialization").

    Raises:
        RegistrationError: the type has none.
    """
    try:
        return clean_schema(TypeAdapter(annotation).json_schema(schema_generator=_Described, mode=mode))
    except (PydanticUserError, PydanticSchemaGenerationError, TypeError, NameError) as exc:
        raise RegistrationError(f"type {annotation!r} has no JSON Schema: {str(exc).splitlines()[0]:.200}") from exc
