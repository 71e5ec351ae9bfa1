"""Rules about who may call which tool: block-lists and allow-lists of globs, per origin; and flows of data.

The pipeline asks the rules and answers refused calls. A change counts from the next
call on, in every registry and snapshot that shares the policy.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Iterable

from toolcell.calls.options import EVERY_ORIGIN, Origin, origins_of
from toolcell.errors import UsageError
from toolcell.flows import Flow
from toolcell.support.checks import check_kind
from toolcell_bridge.wire.frozen import frozen


@frozen
class Rule:
    """A glob over tool names, and the origins it is about."""

    pattern: str
    origins: frozenset[Origin] = EVERY_ORIGIN

    def matches(self, name: str, origin: Origin) -> bool:
        """Return true when this rule is about such a call."""
        return origin in self.origins and fnmatch.fnmatchcase(name, self.pattern)

    def is_about(self, origin: Origin) -> bool:
        """True when the rule limits calls from `origin` at all."""
        return origin in self.origins


def _rules(patterns: Iterable[str], origins: Iterable[Origin] | None) -> tuple[Rule, ...]:
    chosen = EVERY_ORIGIN if origins is None else origins_of(origins, "origins=")
    for pattern in patterns:
        check_kind("a rule's name", pattern, str, cure='write the names one by one: ("a", "b")')
    return tuple(Rule(pattern, chosen) for pattern in patterns)


class CallPolicy:
    """Rules about which tools may be called from where. Without rules, all may."""

    def __init__(self, *, advertise_blocked: bool = False) -> None:
        self.advertise_blocked = advertise_blocked
        """Show refused tools to the model all the same."""
        self._lock = threading.Lock()
        self._blocked: tuple[Rule, ...] = ()
        self._allowed: tuple[Rule, ...] = ()
        self.flows: tuple[Flow, ...] = ()
        """Where runs must not send what they have read."""
        self.version = 0
        """Grows with every change of the rules, so that decisions can be remembered until then."""

    def blacklist(self, *patterns: str, origins: Iterable[Origin] | None = None) -> None:
        """Refuse names that match, from `origins` or from anywhere; also of tools that are to come."""
        with self._lock:
            self._blocked = (*self._blocked, *_rules(patterns, origins))
            self.version += 1

    def unblacklist(self, *patterns: str) -> None:
        """Remove the rules with exactly these patterns.

        Raises:
            UsageError: there is none.
        """
        with self._lock:
            known = dict.fromkeys(rule.pattern for rule in self._blocked)
            for pattern in patterns:
                if pattern not in known:
                    there_are = ", ".join(map(repr, known)) or "none"
                    raise UsageError(f"there is no rule {pattern!r} to take back; there are: {there_are}")
            self._blocked = tuple(rule for rule in self._blocked if rule.pattern not in patterns)
            self.version += 1

    def allow_only(self, *patterns: str, origins: Iterable[Origin] | None = None) -> None:
        """Refuse every name that matches none of these; more calls allow more names. `allow_all` undoes it."""
        with self._lock:
            self._allowed = (*self._allowed, *_rules(patterns, origins))
            self.version += 1

    def allow_all(self) -> None:
        """Undo every `allow_only`. Blacklisted tools stay refused."""
        with self._lock:
            self._allowed = ()
            self.version += 1

    def add_flow(self, *flows: Flow) -> None:
        """Decide about calls that send what their run has read, wherever they come from. Nothing takes it back."""
        for flow in flows:
            check_kind("a flow", flow, Flow, cure='write Flow("private", "public", "deny")')
        with self._lock:
            self.flows = tuple(dict.fromkeys((*self.flows, *flows)))

    def permits(self, name: str, origin: Origin) -> bool:
        """Return whether the rules let such a call pass."""
        if self.blocks(name, origin):
            return False
        limiting = [rule for rule in self._allowed if rule.is_about(origin)]
        return not limiting or any(rule.matches(name, origin) for rule in limiting)

    def blocks(self, name: str, origin: Origin) -> bool:
        """True when a black-list names it; an allow-list that does not mention a name is no such rule."""
        return any(rule.matches(name, origin) for rule in self._blocked)
