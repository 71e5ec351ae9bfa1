"""`frozen`: classes of data that never change, as by `dataclass(frozen=True, slots=True)`, and cheaper to import.

`dataclass` compiles six methods for each class, more than half a millisecond together, and a host imports over a
hundred of these classes before its first run. Here only `__init__` is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")


@overload
def frozen(kind: type[T], /) -> type[T]: ...


@overload
def frozen(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(kind: type[T] | None = None, /, *, kw_only: bool = False) -> type[T] | Callable[[type[T]], type[T]]:
    """Return the class as a dataclass with slots whose instances are equal by their values and never change.

    `fields`, `replace` and `asdict` of `dataclasses` take it. `kw_only`: its fields are given by name.
    """
    if kind is None:
        return lambda kind: _frozen(kind, kw_only)
    return _frozen(kind, kw_only)


def _frozen(kind: type[T], kw_only: bool) -> type[T]:
    made = dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(kind)
    given = fields(made)  # type: ignore[arg-type]  # it is a dataclass
    methods = {"__init__": _init(made, given), "__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
    methods |= _methods_of_values(given)
    for name, method in methods.items():
        if vars(kind).get(name) is None:
            setattr(made, name, method)
    return made


def _init(kind: type, given: tuple[Field[Any], ...]) -> Callable[..., None]:
    """Compile `__init__`. A generic one would take several times as long for each instance."""
    known: dict[str, Any] = {"set_": object.__setattr__, "ABSENT": MISSING}
    parameters: list[str] = []
    by_name: list[str] = []
    lines: list[str] = []
    for each in given:
        name, default = each.name, f"default_{each.name}"
        made_by_default, parameter = "", name
        if each.default is not MISSING:
            known[default] = each.default
            made_by_default, parameter = default, f"{name}={default}"
        elif each.default_factory is not MISSING:
            known[default] = each.default_factory
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


def _methods_of_values(given: tuple[Field[Any], ...]) -> dict[str, Callable[..., Any]]:
    """Return the methods that look at all values, which they get with one call."""
    names = [each.name for each in given]
    compared = _getter([each.name for each in given if each.compare])
    shown = [each.name for each in given if each.repr]
    hashed = _getter([each.name for each in given if (each.compare if each.hash is None else each.hash)])

    @recursive_repr()
    def __repr__(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __eq__(self: Any, other: object) -> Any:
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(hashed(self))

    def __getstate__(self: Any) -> list[Any]:
        return [getattr(self, name) for name in names]

    def __setstate__(self: Any, state: list[Any]) -> None:
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)

    return {each.__name__: each for each in (__repr__, __eq__, __hash__, __getstate__, __setstate__)}


def _getter(names: list[str]) -> Callable[[Any], Any]:
    return attrgetter(*names) if names else lambda instance: ()


def _refuse_to_set(self: Any, name: str, value: Any) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
