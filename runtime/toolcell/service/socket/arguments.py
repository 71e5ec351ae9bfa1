"""The arguments of requests on the wire: as a client makes them, and as the service takes them, of the right type and
within what the tenant may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from toolcell.calls.call import AlreadyMade, CallableTools, ResumeDecision
from toolcell.calls.options import EVERY_ORIGIN
from toolcell.config import Limits, check_decisions
from toolcell.errors import UsageError
from toolcell.results import ExecutionResult, Suspension
from toolcell.run import InputFiles, RunOptions, Script
from toolcell.service.tenant_limits import allowed_limits
from toolcell.settings import settings_of
from toolcell.support.checks import brief
from toolcell.tools import Approve, Deny, Edit, RegisteredTool, RunContext, ToolRegistry
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


# A client's. What is wrong is said here, as a `Runtime` says it.

KEPT_OFFERS: Final = 4
"""Toolsets of a caller that the service keeps. The one that was not used for longest is forgotten."""


def offered_tools(tools: CallableTools) -> list[dict[str, Any]]:
    """Return the tools that scripts and plans may call, for the service.

    Raises:
        UsageError: they are not a registry.
    """
    if not isinstance(tools, ToolRegistry):
        raise UsageError(f"a Client takes the tools of a ToolRegistry, not of {type(tools).__name__}")
    return [_offered(tool, tools) for tool in tools.state.tools.values()]


def offer_key(tools: ToolRegistry) -> tuple[Any, ...]:
    """Return what changes when there is something else to offer."""
    state = tools.state
    rules = tuple((id(policy), policy.version) for policy in state.policies)
    return (*((name, id(tool)) for name, tool in state.tools.items()), *rules)


def _offered(tool: RegisteredTool, tools: ToolRegistry) -> dict[str, Any]:
    state, definition = tools.state, tools.state.definition(tool)
    return {
        "name": tool.name,
        "description": definition.description,
        "parameters": definition.checked_parameters,
        "options": _options(tool, tools),
        "callable_from": sorted(map(str, tool.options.callable_from)),
        "hidden_from": sorted(str(origin) for origin in EVERY_ORIGIN if not state.permits(tool, origin)),
        "has_preview": tool.options.preview is not None,
        "has_revert": tool.options.revert is not None,
    }


def _options(tool: RegisteredTool, tools: ToolRegistry) -> dict[str, Any]:
    options, settings = tool.options, tools.settings
    plain = {name: getattr(options, name) for name in TOOL_OPTIONS}
    plain["returns"] = None if options.returns is None else dict(options.returns)
    plain["reads"], plain["sends"] = sorted(options.reads), sorted(options.sends)
    plain["coercion"] = options.coercion or settings.coercion
    plain["extras"] = options.extras or settings.extras
    plain["timeout_s"] = float(settings.timeout_s if options.timeout_s is None else options.timeout_s)
    # What is rewritten before it is checked can only be checked where that happens.
    plain["validate"] = options.validate and tool.spec.prepare is None
    return plain


LARGEST: Final = Limits(frame_bytes=256 * 1024 * 1024)
"""Limits by which a script is looked at before it is sent: the service knows the true ones."""


def wire_script(source: str, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a script and its inputs.

    Raises:
        UsageError: the source or an input cannot be sent; names it.
    """
    message = Script(source=source, inputs=inputs, limits=LARGEST).message(0)
    return {"source": message.source, "inputs": message.inputs or None}


def wire_run(source: str, options: RunOptions) -> dict[str, Any]:
    """Return a script with everything that the service gets of its options. What is None is not sent.

    Raises:
        UsageError: something of it cannot be sent; names it.
    """
    own = {
        "files": wire_files(options.files),
        "limits": wire_limits(options.limits),
        "repairs": wire_repairs(options.repairs),
        "dry_run": wire_dry_run(options.dry_run) or None,
    }
    return wire_script(source, options.inputs) | options.plain() | own


def wire_files(files: InputFiles) -> list[list[Any]] | None:
    """Return input files.

    Raises:
        UsageError: one cannot be read, or has no name that can be used.
    """
    return [[file.name, bytes(file.data)] for file in RunOptions(files=files).guest_files()] or None


def wire_limits(limits: Limits | None) -> dict[str, Any] | None:
    """Return the limits that somebody has set; of the others, the service has its own."""
    if limits is None:
        return None
    known = settings_of(Limits, limits, "limits")
    return {name: getattr(known, name) for name in known.model_fields_set}


def wire_context(context: RunContext | None) -> dict[str, Any] | None:
    """Return what of a context is for the service. All else stays here, its secrets and its hooks above all."""
    if context is None:
        return None
    return {name: value for name in WHO if (value := getattr(context, name))} or None


def wire_token(token: str | Suspension) -> str:
    found = token.to_json() if isinstance(token, Suspension) else token
    if not isinstance(found, str):
        raise UsageError(f"a run is resumed with its Suspension, its token or its id, not {brief(token)}")
    return found


def wire_repairs(repairs: ExecutionResult | str | None) -> str | None:
    """Return the id of the run that is repaired."""
    if isinstance(repairs, ExecutionResult):
        return repairs.journal_id or repairs.run_id
    if not (repairs is None or isinstance(repairs, str)):
        raise UsageError(f"repairs= takes the result of a run, or its id, not {brief(repairs)}")
    return repairs


def wire_dry_run(dry_run: object) -> bool:
    if not isinstance(dry_run, bool):
        raise UsageError(
            f"dry_run= of a Client takes True or False, not {brief(dry_run)}: the draft is kept at the service"
        )
    return dry_run


def given_only(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is None: the service has the default."""
    return {name: value for name, value in arguments.items() if value is not None}
