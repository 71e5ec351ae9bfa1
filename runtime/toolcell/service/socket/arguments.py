"""The arguments of a caller's request: of the right type, and within what its tenant may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from toolcell.calls.call import AlreadyMade, ResumeDecision
from toolcell.config import Limits, check_decisions
from toolcell.errors import UsageError
from toolcell.service.tenant_limits import allowed_limits
from toolcell.support.checks import brief
from toolcell.tools import Approve, Deny, Edit
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge

Kind = TypeVar("Kind")

MAX_WHO_CHARS: Final = 256

WHO: Final = ("thread_id", "channel", "chat_id")
"""What of a `RunContext` the service is told, for its records. Its user is whoever the token says."""


TOOL_OPTIONS: Final[Mapping[str, tuple[type, ...]]] = {
    "label": (str,), "read_only": (bool,), "idempotent": (bool,), "requires_approval": (bool,),
    "timeout_s": (float,), "returns": (dict, type(None)), "orchestrates": (bool,), "is_agent": (bool,),
    "coercion": (str,), "extras": (str,), "reads": (list,), "sends": (list,), "validate": (bool,),
}  # fmt: skip
"""Options of `ToolOptions` that the service is told, with the types of their values. The others are met where the tool
runs."""


class Arguments:
    """What a request was given. Names that are never asked for are refused at the end."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._left = dict(given)

    def take(self, name: str, *kinds: type[Kind], default: Any = None) -> Any:
        """Return an argument of one of these types; `default` when it is not given.

        Raises:
            UsageError: it is of another type.
        """
        value = self._left.pop(name, default)
        if value is default or type(value) in kinds:
            return value
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise UsageError(f"{name} must be {wanted}, not {type(value).__name__}")

    def files(self) -> list[tuple[str, bytes]]:
        found = list[tuple[str, bytes]]()
        for each in self.take("files", list, default=[]):
            if not (isinstance(each, list) and [type(part) for part in each] == [str, bytes]):
                raise UsageError("files must be a list of a name and bytes each")
            found.append((each[0], each[1]))
        return found

    def limits(self, most: Limits) -> Limits | None:
        """Return the limits of a run: those of the tenant, with what the caller asks for. It may ask for less."""
        given = self.take("limits", dict)
        if given is None:
            return None
        return allowed_limits(Limits(**{str(name): value for name, value in given.items()}), most)

    def who(self) -> dict[str, str]:
        given = self.take("context", dict, default={})
        for name, value in given.items():
            if name not in WHO or not isinstance(value, str) or len(value) > MAX_WHO_CHARS:
                raise UsageError(f"context has {', '.join(WHO)}, texts of at most {MAX_WHO_CHARS} characters")
        return {str(name): str(value) for name, value in given.items()}

    def decisions(self) -> dict[str, ResumeDecision] | None:
        given = self.take("decisions", dict)
        check_decisions(given)
        return None if given is None else {name: _decision(name, each) for name, each in given.items()}

    def end(self) -> None:
        """Check that nothing else was given.

        Raises:
            UsageError: names it.
        """
        if self._left:
            raise UsageError(f"unknown arguments: {', '.join(map(str, self._left))[:200]}")


_DECISIONS: Final[dict[str, Any]] = {
    "approve": Approve,
    "deny": Deny,
    "edit": Edit,
    "made": AlreadyMade,
}
"""Kind of each decision on the wire. Its other members are fields; who decided is known otherwise."""


def plain_decision(decision: object) -> dict[str, Any]:
    """Return a decision for the wire.

    Raises:
        UsageError: it is none.
    """
    for kind, made in _DECISIONS.items():
        if isinstance(decision, made):
            given = {each.name: getattr(decision, each.name) for each in fields(made) if each.name != "by"}
            return {"kind": kind} | given | ({"args": dict(given["args"])} if "args" in given else {})
    raise UsageError(f"a decision is Approve(), Deny(...), Edit(...) or AlreadyMade(...), not {decision!r:.80}")


def plain_decisions(decisions: Mapping[str, ResumeDecision] | None) -> dict[str, Any] | None:
    """Return decisions for the wire.

    Raises:
        UsageError: one is none, or they are not a mapping.
    """
    if decisions is None:
        return None
    if not isinstance(decisions, Mapping):
        raise UsageError(f"decisions must be a dict from ids of calls to decisions, not {brief(decisions)}")
    try:
        plain: Any = to_plain({str(name): plain_decision(each) for name, each in decisions.items()}, "decisions")
    except (UnsendableValue, ValueTooLarge) as exc:
        raise UsageError(str(exc)) from exc
    found: dict[str, Any] = plain
    return found


def _decision(name: str, given: Any) -> ResumeDecision:
    try:
        made: ResumeDecision = _DECISIONS[given["kind"]](
            **{key: value for key, value in given.items() if key not in ("kind", "by")}
        )
    except (AttributeError, KeyError, TypeError) as exc:
        raise UsageError(f"the decision about {name:.80} is approve, deny, edit or made") from exc
    return made
