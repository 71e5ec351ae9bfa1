"""`frozen`: classes of data that never change, as by `dataclass(frozen=True, slots=True)`, and cheaper to import.

`dataclass` compiles six methods for each class, more than half a millisecond together, and a host imports over a
hundred of these classes before its first run. Here only `__init__` is compiled, and `dataclasses`, which takes a fifth
of a zygote's imports, is imported when somebody uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, dataclass_transform, overload

if TYPE_CHECKING:
    from dataclasses import field

T = TypeVar("T")
_Getter = Callable[[Any], tuple[Any, ...]]

ABSENT = object()
"""In the place of a default that there is not."""


class _Given:
    """What is known of a field, of its annotation and its default or `dataclasses.field(...)`."""

    __slots__ = ("compare", "default", "factory", "hash", "init", "kw_only", "name", "repr", "type")

    def __init__(self, name: str, type: Any, default: Any, kw_only: bool) -> None:
        self.name, self.type, self.default, self.factory = name, type, default, ABSENT
        self.init = self.repr = self.compare = self.hash = True
        self.kw_only = kw_only
        dataclasses: Any = sys.modules.get("dataclasses")
        if dataclasses is not None and isinstance(default, dataclasses.Field):
            missing = dataclasses.MISSING
            self.default = ABSENT if default.default is missing else default.default
            self.factory = ABSENT if default.default_factory is missing else default.default_factory
            self.init, self.repr, self.compare = default.init, default.repr, default.compare
            self.hash = default.compare if default.hash is None else default.hash


class _Fields:
    """`__dataclass_fields__` of a class, which the functions of `dataclasses` look for. Made when they do."""

    def __init__(self, annotations: dict[str, Any], defaults: dict[str, Any], kw_only: bool) -> None:
        self._namespace = {**defaults, "__annotations__": annotations}
        self._kw_only = kw_only

    def __get__(self, instance: object, owner: Any) -> dict[str, Any]:
        import dataclasses

        home = next(each for each in owner.__mro__ if vars(each).get(FIELDS) is self)
        twin = type(home.__name__, (), {**self._namespace, "__module__": home.__module__})
        made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=self._kw_only)(twin)
        found: dict[str, Any] = getattr(home.__base__, FIELDS, {}) | made.__dataclass_fields__
        setattr(home, FIELDS, found)
        return found


FIELDS = "__dataclass_fields__"

if TYPE_CHECKING:

    @overload
    def frozen(kind: type[T], /) -> type[T]: ...

    @overload
    def frozen(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...

    @dataclass_transform(frozen_default=True, field_specifiers=(field,))
    def frozen(kind: type[T] | None = None, /, *, kw_only: bool = False) -> type[T] | Callable[[type[T]], type[T]]: ...

else:

    def frozen(kind=None, /, *, kw_only=False):
        """Return the class as a dataclass with slots whose instances are equal by their values and never change.

        `fields`, `replace` and `asdict` of `dataclasses` take it. `kw_only`: its fields are given by name.
        """
        if kind is None:
            return lambda kind: _frozen(kind, kw_only)
        return _frozen(kind, kw_only)


def replaced(instance: T, **changes: Any) -> T:
    """Do what `dataclasses.replace` does, with an instance of a frozen class whose fields are all of its `__init__`."""
    kind: Any = type(instance)
    made: T = kind(**(dict(zip(kind.__names__, kind.__values__(instance), strict=True)) | changes))
    return made


def _frozen(kind: type[T], kw_only: bool) -> type[T]:
    namespace, annotations = dict(vars(kind)), kind.__annotations__
    own = {name: each for name, each in annotations.items() if "ClassVar" not in str(each)}
    defaults = {name: namespace.pop(name) for name in own if name in namespace}
    inherited = {each.name: each for each in getattr(kind, "__frozen__", ())}
    given = [
        *({name: each for name, each in inherited.items() if name not in own}).values(),
        *(_Given(name, each, defaults.get(name, ABSENT), kw_only) for name, each in own.items()),
    ]
    for name in ("__dict__", "__weakref__"):
        namespace.pop(name, None)
    methods = {"__init__": _init(kind, given), "__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
    names = [each.name for each in given]
    values = _getter(names)
    methods |= _methods_of_values(given, names, values)
    for name, method in methods.items():
        if namespace.get(name) is None:
            namespace[name] = method
    namespace |= {
        "__slots__": tuple(name for name in own if name not in inherited),
        "__qualname__": kind.__qualname__,
        "__match_args__": tuple(each.name for each in given if each.init and not each.kw_only),
        "__frozen__": given,
        "__names__": names,
        "__values__": values,
        FIELDS: _Fields(own, defaults, kw_only),
    }
    meta: Any = type(kind)
    made: type[T] = meta(kind.__name__, kind.__bases__, namespace)
    return made


def _init(kind: type, given: list[_Given]) -> Callable[..., None]:
    """Compile `__init__`. A generic one would take several times as long for each instance."""
    known: dict[str, Any] = {"set_": object.__setattr__, "ABSENT": ABSENT}
    parameters: list[str] = []
    by_name: list[str] = []
    lines: list[str] = []
    for each in given:
        name, default = each.name, f"default_{each.name}"
        made_by_default, parameter = "", name
        if each.default is not ABSENT:
            known[default] = each.default
            made_by_default, parameter = default, f"{name}={default}"
        elif each.factory is not ABSENT:
            known[default] = each.factory
            made_by_default, parameter = f"{default}()", f"{name}=ABSENT"
        if each.init:
            (by_name if each.kw_only else parameters).append(parameter)
            value = f"{made_by_default} if {name} is ABSENT else {name}" if parameter.endswith("=ABSENT") else name
        else:
            value = made_by_default
        if value:
            lines.append(f" set_(self, {name!r}, {value})")
    if hasattr(kind, "__post_init__"):
        lines.append(" self.__post_init__()")
    head = ", ".join(["self", *parameters, *(["*", *by_name] if by_name else [])])
    exec("\n".join([f"def __init__({head}):", *(lines or [" pass"])]), known)
    init: Callable[..., None] = known["__init__"]
    init.__qualname__ = f"{kind.__qualname__}.__init__"
    init.__annotations__ = {each.name: each.type for each in given if each.init} | {"return": None}
    return init


def _methods_of_values(given: list[_Given], names: list[str], values: _Getter) -> dict[str, Callable[..., Any]]:
    """Return the methods that look at all values, which they get with one call."""
    compared = _getter([each.name for each in given if each.compare])
    shown = [each.name for each in given if each.repr]
    hashed = _getter([each.name for each in given if each.hash])

    @recursive_repr()
    def __repr__(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __eq__(self: Any, other: object) -> Any:
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(hashed(self))

    def __getstate__(self: Any) -> list[Any]:
        return list(values(self))

    def __setstate__(self: Any, state: list[Any]) -> None:
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)

    return {each.__name__: each for each in (__repr__, __eq__, __hash__, __getstate__, __setstate__)}


def _getter(names: list[str]) -> _Getter:
    if len(names) != 1:
        return attrgetter(*names) if names else lambda instance: ()
    value = attrgetter(names[0])
    return lambda instance: (value(instance),)


def _refuse_to_set(self: Any, name: str, value: Any) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")
