"""Settings: what is taken without pydantic is what pydantic would take, and they can be fields of its models."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from rows import each_row
from toolcell import Limits, Policy, PoolConfig, UsageError
from toolcell.sessions.settings import SessionSettings
from toolcell.settings import SettingsModel

pytestmark = pytest.mark.quick

VALUES: tuple[Any, ...] = (
    0, 1, -1, 5, 2**20, 2**53, 10**400, 0.0, -0.0, 1.0, 1.5, 1e-9, 86_400, 86_401, math.nan, math.inf, -math.inf,
    True, False, None, "", "1", "64MiB", "full", "off", b"1", (), [], {}, {"A": "b"}, ["seccomp"], frozenset({"pid"}),
    "auto", "strict", frozenset(), frozenset({"x"}), frozenset({"auto"}), {"pid"}, frozenset({1}),
)  # fmt: skip


@pytest.mark.parametrize("kind", [Limits, PoolConfig, Policy, SessionSettings])
def test_a_value_is_taken_or_refused_as_pydantic_does(kind: type[SettingsModel], monkeypatch: Any) -> None:
    def outcome(name: str, value: Any) -> str:
        try:
            return repr(kind(**{name: value}))
        except UsageError as exc:
            return str(exc)

    pairs = [(name, value) for name in kind.model_fields for value in VALUES]
    found = [outcome(*pair) for pair in pairs]

    monkeypatch.setattr("toolcell.settings.Setting.plain", lambda setting, value: int("pydantic looks at everything"))
    assert found == [outcome(*pair) for pair in pairs]


def test_a_policy_of_known_words_is_made_without_pydantic(monkeypatch: Any) -> None:
    monkeypatch.setattr(Policy, "_checked", lambda settings: pytest.fail("pydantic was asked"))

    policy = Policy(profile="auto", lint="strict", check_types="warn", require=frozenset({"seccomp"}), seed=None)

    assert policy.model_copy(update={"profile": "full"}).require == {"seccomp"}


class Job(BaseModel):
    limits: Limits = Limits()
    policy: Policy | None = None


def test_settings_are_fields_of_models() -> None:
    job = Job.model_validate({"limits": {"wall_s": 5}, "policy": Policy(seed=1)})

    assert job == Job(limits=Limits(wall_s=5.0), policy=Policy(seed=1))
    assert Job.model_validate_json(job.model_dump_json()) == job
    assert Job.model_json_schema()["$defs"]["Limits"]["properties"]["wall_s"] == {
        "default": 30.0, "exclusiveMinimum": 0, "maximum": 86_400, "title": "Wall S", "type": "number",
    }  # fmt: skip
    with pytest.raises(ValidationError, match="Limits: wall_s = -1: must be greater than 0"):
        Job.model_validate({"limits": {"wall_s": -1}})
    with pytest.raises(ValidationError, match="should be a valid dictionary or instance of Limits"):
        TypeAdapter(Limits).validate_python(3)


def test_settings_are_values() -> None:
    limits = Limits(wall_s=5, memory_bytes="64MiB")  # type: ignore[arg-type]  # of which a text is a way to say it

    for other in (copy.copy(limits), copy.deepcopy(limits), pickle.loads(pickle.dumps(limits))):
        assert (other, hash(other), other.model_fields_set) == (limits, hash(limits), {"wall_s", "memory_bytes"})
    assert eval(repr(limits)) == limits != Limits()


@each_row("value", [2**63, 10**400, "9" * 400, f"{'9' * 400}.5g"])
def test_a_limit_that_no_machine_has_is_refused_in_one_short_line(value: Any) -> None:
    with pytest.raises(UsageError, match=r"Limits: memory_bytes = .*(must be at most|is not a size)") as caught:
        Limits(memory_bytes=value)
    assert len(str(caught.value)) < 400
