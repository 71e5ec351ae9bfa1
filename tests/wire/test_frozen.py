"""`frozen` makes the same classes as `dataclass(frozen=True, slots=True)`, and compiles less for them."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any

import pytest

from toolcell_bridge.wire.frozen import frozen

pytestmark = pytest.mark.quick


@frozen
class Point:
    """A name, and a place that does not count when two of them are compared."""

    name: str
    x: float = 0.0
    near: list[str] = field(default_factory=list)
    note: str = field(default="", compare=False, repr=False)


@frozen(kw_only=True)
class Labelled(Point):
    """A point with a label."""

    label: str
    size: int = field(init=False, default=3)


@frozen
class Alone:
    """One value."""

    value: int


@frozen
class Nothing:
    """No value."""


@frozen
class Spoken:
    """Its author wrote how it is shown and checked."""

    words: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", self.words.upper())

    def __repr__(self) -> str:
        return f"<{self.words}>"


@dataclass(frozen=True, slots=True)
class _Point:
    name: str
    x: float = 0.0
    near: list[str] = field(default_factory=list)
    note: str = field(default="", compare=False, repr=False)


MADE: list[Any] = [Point("a", 1.5, ["b"], "n"), Labelled("a", label="l"), Alone(1), Nothing(), Spoken("hi")]
each_kind = pytest.mark.parametrize("made", MADE, ids=lambda made: type(made).__name__)


def test_it_shows_compares_and_takes_arguments_as_a_dataclass_does() -> None:
    ours, its = Point("a", near=["b"], note="n"), _Point("a", near=["b"], note="n")
    assert repr(ours) == repr(its).replace("_Point", "Point")
    assert asdict(ours) == asdict(its)
    assert inspect.signature(Point).parameters.keys() == inspect.signature(_Point).parameters.keys()
    assert Point.__match_args__ == _Point.__match_args__
    assert Point("a", note="n") == Point("a", note="other") != Point("a", 1.0)
    assert Point("a") != Labelled("a", label="l")
    assert hash(Alone(1)) == hash(Alone(1))
    with pytest.raises(TypeError, match=r"Point.__init__\(\) missing 1 required positional argument: 'name'"):
        Point()  # type: ignore[call-arg]


@each_kind
def test_it_never_changes(made: Any) -> None:
    name = next((each.name for each in fields(made)), "name")
    with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
        setattr(made, name, 2)
    with pytest.raises(FrozenInstanceError, match=f"cannot delete field '{name}'"):
        delattr(made, name)
    assert not hasattr(made, "__dict__")


@each_kind
def test_it_is_copied_and_pickled(made: Any) -> None:
    copies = (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)))
    assert all(each == made and type(each) is type(made) for each in copies)


def test_fields_keep_their_kinds() -> None:
    labelled = replace(Labelled("a", label="l"), x=2.0)
    assert (labelled.name, labelled.x, labelled.label, labelled.size) == ("a", 2.0, "l", 3)
    assert Point("a").near is not Point("b").near
    with pytest.raises(TypeError, match="positional"):
        Labelled("a", 0.0, [], "", "l")  # type: ignore[misc]
    with pytest.raises(TypeError, match="size"):
        Labelled("a", label="l", size=4)  # type: ignore[call-arg]


def test_methods_of_the_class_itself_stay() -> None:
    assert repr(Spoken("hi")) == "<HI>"
    assert Spoken("hi") == Spoken("HI")
