"""`frozen` makes the same classes as `dataclass(frozen=True, slots=True)`, and compiles less for them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from toolcell_bridge.wire.frozen import frozen, replaced

pytestmark = pytest.mark.quick


def made_by(decorate: Any, named: Any) -> tuple[Any, Any]:
    """A class with every kind of field, and one that inherits from it and takes its own fields by name."""
    point: dict[str, Any] = {
        "__annotations__": {"name": str, "x": float, "near": list, "token": str, "note": str, "size": int},
        "x": 0.0,
        "near": field(default_factory=tuple),
        "token": field(default="", repr=False),
        "note": field(default="", compare=False),
        "size": field(init=False, default=3),
    }
    base = decorate(type("Point", (), {"__module__": __name__, **point}))
    return base, named(type("Labelled", (base,), {"__module__": __name__, "__annotations__": {"label": str}}))


Point, Labelled = OURS = made_by(frozen, frozen(kw_only=True))
THEIRS = made_by(dataclass(frozen=True, slots=True), dataclass(frozen=True, slots=True, kw_only=True))


def told(done: Callable[[], object]) -> object:
    try:
        return done()
    except (TypeError, AttributeError) as exc:  # FrozenInstanceError, too
        return type(exc), str(exc)


def facts(point: Any, labelled: Any) -> list[object]:
    """What can be seen of two classes and their instances."""
    full, other = point("a", 1.5, ("b",), token="secret", note="n"), point("a", 1.5, ("b",), token="secret", note="m")
    named = labelled("a", label="l")
    shown = [repr(each) for each in (full, point("a"), named, dataclasses.replace(named, x=2.0))]
    equal = [full == other, hash(full) == hash(other), full == point("a", 1.5, ("b",)), point("a") == named, full == 1]
    kinds = [
        [(each.name, each.init, each.repr, each.compare, each.kw_only) for each in dataclasses.fields(kind)]
        for kind in (point, labelled)
    ]
    wrong = [
        told(done)
        for done in (
            point, lambda: labelled("a"), lambda: labelled("a", 0.0, (), "", "", "l"), lambda: point("a", size=4),
            lambda: setattr(full, "name", "b"), lambda: delattr(full, "name"), lambda: vars(full),
        )
    ]  # fmt: skip
    arguments = [[(each.name, each.kind) for each in inspect.signature(kind).parameters.values()]
                 for kind in (point, labelled)]  # fmt: skip
    return [
        shown,
        equal,
        kinds,
        wrong,
        arguments,
        dataclasses.asdict(full),
        point.__match_args__,
        labelled.__match_args__,
    ]


def test_it_makes_what_dataclass_makes() -> None:
    assert facts(*OURS) == facts(*THEIRS)
    made = Point("a", 1.5, token="secret"), Labelled("a", label="l")
    assert "secret" not in repr(made)
    for each in made:
        for copied in (copy.copy(each), copy.deepcopy(each), pickle.loads(pickle.dumps(each))):
            assert (type(copied), dataclasses.asdict(copied)) == (type(each), dataclasses.asdict(each))


@pytest.mark.parametrize("names", [("x",), ("x", "y")])
def test_replaced_makes_what_dataclasses_make(names: tuple[str, ...]) -> None:
    kind: Any = frozen(type("Some", (), {"__module__": __name__, "__annotations__": dict.fromkeys(names, int)}))
    one = kind(*range(len(names)))
    assert replaced(one, x=7) == dataclasses.replace(one, x=7) != one
