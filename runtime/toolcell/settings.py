"""What all settings have in common: they never change, are checked when they are made, and can be read from TOML.

pydantic checks them. It takes a tenth of a second to import, so it is asked only about values that are not plainly
right: neither the default nor of the declared type and within its bounds.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, dataclass_transform, get_args, get_type_hints

from toolcell.errors import UsageError
from toolcell.support.checks import suggestion
from toolcell.support.text import one_line

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError, ValidationInfo

MAX_SHOWN_CHARS = 80
"""Characters of a wrong value that an error message shows."""
MAX_PROBLEMS = 20
"""Wrong values that an error names."""
MAX_UNKNOWN = 5
"""Unknown names that an error gives a suggestion for: each takes half a millisecond."""

_PLAIN = {"bool": bool, "int": int, "float": float, "str": str, "None": type(None)}
_WITHIN = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}
_SET = "frozenset["
_REQUIRED: Any = object()


class Setting:
    """One field of settings."""

    def __init__(self, default: Any, default_factory: Callable[[Mapping[str, Any]], Any] | None, rules: Any) -> None:
        self.annotation = ""
        """Its type, as it stands in the source."""
        self.default = default
        self.default_factory = default_factory
        self.rules: Mapping[str, Any] = rules
        """What holds for its value: `gt`, `le` and the other arguments of pydantic's `Field`."""
        self.words: frozenset[Any] = frozenset()
        """The values of a `Literal` among its types, or of one that its sets hold."""

    def plain(self, value: Any) -> Any:
        """Return the value when it is plainly right. A whole number becomes a float where a float is meant.

        Raises:
            ValueError: pydantic has to look at it.
        """
        if type(value) is type(self.default) and value == self.default:
            return value
        is_set = self.annotation.startswith(_SET)
        if type(value) is (frozenset if is_set else str) and self.words.issuperset(value if is_set else [value]):
            return value
        types = [_PLAIN.get(name) for name in self.annotation.split(" | ")]
        if type(value) is int and float in types and abs(value) < 2**53:
            value = float(value)
        if type(value) not in types or not _WITHIN.keys() >= self.rules.keys():
            raise ValueError
        if value is not None and not all(_WITHIN[rule](value, bound) for rule, bound in self.rules.items()):
            raise ValueError
        return value

    def default_after(self, values: Mapping[str, Any]) -> Any:
        """Return the default, given the values of the fields before it.

        Raises:
            ValueError: there is none.
        """
        if self.default_factory is not None:
            return self.default_factory(values)
        if self.default is _REQUIRED:
            raise ValueError
        return self.default


def setting(
    *, default: Any = _REQUIRED, default_factory: Callable[[Mapping[str, Any]], Any] | None = None, **rules: Any
) -> Any:
    """Declare a setting. `default_factory` gets the values of the fields before it, `rules` are those of `Field`."""
    return Setting(default, default_factory, rules)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(setting,))
class SettingsModel:
    """Settings that never change. A wrong name or value is a `UsageError` of one line."""

    __slots__ = ("__dict__", "__weakref__", "model_fields_set")

    model_fields: ClassVar[dict[str, Setting]] = {}

    model_fields_set: frozenset[str]
    """Names of the fields that were given. The others have their defaults."""

    other_names: ClassVar[Mapping[str, str]] = {}
    """Names that people give to a field elsewhere, with the field."""

    def __init_subclass__(cls) -> None:
        cls.model_fields = {**cls.model_fields}
        for name, annotation in cls.__annotations__.items():
            if not annotation.startswith("ClassVar"):
                declared = vars(cls).get(name, _REQUIRED)
                field = declared if isinstance(declared, Setting) else setting(default=declared)
                field.annotation = annotation
                known, names = vars(sys.modules[cls.__module__]), annotation.removeprefix(_SET).removesuffix("]")
                field.words = frozenset(word for name in names.split(" | ") for word in get_args(known.get(name)))
                cls.model_fields[name] = field

    def __init__(self, *values: Any, **settings: Any) -> None:
        kind = type(self)
        if values:
            first = next(iter(kind.model_fields))
            raise UsageError(f"{kind.__name__} takes its settings by name, such as {kind.__name__}({first}=...)")
        try:
            given = {name: kind.model_fields[name].plain(kind.read(name, value)) for name, value in settings.items()}
            all_values = kind._with_defaults(given)
        except (KeyError, ValueError):
            all_values = kind._checked(settings)
        vars(self).update(all_values)
        object.__setattr__(self, "model_fields_set", frozenset(settings))
        try:
            self.check()
        except ValueError as exc:
            raise UsageError(f"{kind.__name__}: {exc}") from exc

    @classmethod
    def _with_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all fields.

        Raises:
            ValueError: a field without a default was not given.
        """
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            values[name] = given[name] if name in given else field.default_after(values)
        return values

    @classmethod
    def _checked(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all fields as pydantic takes them."""
        from pydantic import ValidationError

        cls._refuse_many_unknown(settings)
        try:
            return vars(_model_of(cls)(**settings))  # type: ignore[arg-type]  # a class can be hashed
        except ValidationError as exc:
            raise UsageError(f"{cls.__name__}: {_problems(exc, cls)}") from exc

    @classmethod
    def _refuse_many_unknown(cls, settings: Mapping[str, Any]) -> None:
        """Name a few of very many unknown settings: pydantic would make an error of each, and compare it with all."""
        unknown = [name for name in settings if name not in cls.model_fields]
        if len(unknown) > MAX_UNKNOWN:
            named = "; ".join(f"{name[:MAX_SHOWN_CHARS]}: {_unknown(name, cls)}" for name in unknown[:MAX_UNKNOWN])
            raise UsageError(f"{cls.__name__}: {named}; and {len(unknown) - MAX_UNKNOWN} more")

    @classmethod
    def read(cls, name: str, value: Any) -> Any:
        """Return the value that was given for the field `name` in the form in which it is checked.

        Raises:
            ValueError: it is wrong.
        """
        if isinstance(value, bool) and cls.model_fields[name].annotation != "bool":
            raise ValueError("must not be a bool")
        return value

    def check(self) -> None:
        """Check that the values fit together.

        Raises:
            ValueError: they do not.
        """

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        raise UsageError(f"{kind} does not change; write .model_copy(update={{{name!r}: {repr_of(value)}}}) for a copy")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from vars(self).items()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self)})"

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self._given())

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.model_fields if name in self.model_fields_set}

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return a copy, with `update` in it.

        Raises:
            UsageError: a name or value in `update` is wrong.
        """
        return type(self)(**{**self._given(), **(update or {})})  # what has its default may depend on it

    def model_dump(self, *, mode: Literal["python", "json"] = "python", exclude_unset: bool = False) -> dict[str, Any]:
        """Return the values by their names. `mode`: with sets, paths and so on as they are, or as JSON has them."""
        values = self._given() if exclude_unset else dict(self)
        options: dict[str, Any] = {"mode": mode, "exclude_unset": exclude_unset}
        plain = {
            name: value.model_dump(**options) if isinstance(value, SettingsModel) else value
            for name, value in values.items()
        }
        if mode == "json":
            from pydantic_core import to_jsonable_python

            return {name: to_jsonable_python(value) for name, value in plain.items()}
        return plain

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Load from a TOML file whose keys are this model's fields.

        Raises:
            UsageError: the file cannot be read, is not TOML, or a key or value is wrong.
        """
        import tomllib  # only for those who have such a file

        try:
            return cls(**tomllib.loads(Path(path).read_text(encoding="utf-8-sig")))
        except (UsageError, OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
            said = exc.strerror if isinstance(exc, OSError) else str(exc).removeprefix(f"{cls.__name__}: ")
            raise UsageError(f"cannot load {cls.__name__} from {path}: {said}") from exc

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Let models of pydantic have such settings as a field."""
        from pydantic_core import core_schema

        def take(value: Any, refuse: Callable[[Any], Any]) -> Any:
            if isinstance(value, cls):
                return value
            if not isinstance(value, dict):
                return refuse(value)
            cls._refuse_many_unknown(value)  # before they are copied
            return cls(**value)

        model = handler(_model_of(cls))  # type: ignore[arg-type]
        dump = core_schema.plain_serializer_function_ser_schema(cls.model_dump)
        return core_schema.no_info_wrap_validator_function(take, model, serialization=dump)


def _restored(kind: type[SettingsModel], given: dict[str, Any]) -> SettingsModel:
    return kind(**given)


@cache
def _model_of(kind: type[Any]) -> type[BaseModel]:
    """Return pydantic's model of the settings."""
    from pydantic import ConfigDict, Field, create_model, field_validator

    def read(value: Any, info: ValidationInfo) -> Any:
        return kind.read(str(info.field_name), value)

    types, fields = get_type_hints(kind, include_extras=True), dict[str, Any]()
    for name, each in kind.model_fields.items():
        default: dict[str, Any] = {} if each.default is _REQUIRED else {"default": each.default}
        if each.default_factory is not None:
            default = {"default_factory": each.default_factory}
        fields[name] = types[name], Field(**default, **each.rules)
    return create_model(
        kind.__name__,
        __config__=ConfigDict(extra="forbid"),
        __doc__=kind.__doc__,
        __module__=kind.__module__,
        __validators__={"read": field_validator("*", mode="before")(read)},
        **fields,
    )


def _problems(exc: ValidationError, kind: type[SettingsModel]) -> str:
    """Name each wrong value with its key and what it should be, on one line."""
    found = [each for each in exc.errors() if each["type"] != "default_factory_not_called"]
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))} = {repr_of(each['input'])}: "
        + (_unknown(str(each["loc"][-1]), kind) if each["type"] == "extra_forbidden" else _expected(each["msg"]))
        for each in found[:MAX_PROBLEMS]
    )


def _expected(message: str) -> str:
    """Return pydantic's message as the end of one of ours."""
    text = message.removeprefix("Value error, ")
    if text.startswith(("Input should be a valid frozenset", "Input should be a valid tuple")):
        return "must be a list"
    return text.replace("Input should be", "must be", 1)


def _unknown(key: str, kind: type[SettingsModel]) -> str:
    fields = list(kind.model_fields)
    known = kind.other_names.get(key) or next((name for name in fields if name.startswith(f"{key}_")), None)
    hint = f"did you mean {known}?" if known else suggestion(key, fields, f"the keys are {', '.join(fields)}")
    return f"there is no such key; {hint}"


def repr_of(value: object) -> str:
    """Return a value as an error message shows it."""
    return one_line(repr(value), MAX_SHOWN_CHARS)


Settings = TypeVar("Settings", bound=SettingsModel)


def settings_of(kind: type[Settings], given: Settings | None, name: str) -> Settings:
    """Return the settings that were given as the argument `name`, or the defaults.

    Raises:
        UsageError: `given` is something else, such as a dict.
    """
    if given is None:
        return kind()
    if not isinstance(given, kind):
        wanted, got = kind.__name__, type(given).__name__
        raise UsageError(f"{name}= takes {wanted}, not {got} {repr_of(given)}; write {name}={wanted}(...)")
    return given
