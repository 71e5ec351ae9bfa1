"""Who asks the service, and what they may do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """What a principal may do."""

    EXECUTE = "execute"
    """Run scripts and plans, and use sessions."""
    READ = "read"
    """See runs, suspended runs, sessions and tools."""
    APPROVE = "approve"
    """Decide about suspended runs, and commit and revert what was collected."""
    ADMIN = "admin"
    """Everything of these, in their tenant."""
    OPERATOR = "operator"
    """See the numbers of every tenant. It is for whoever runs the service: no other scope includes it."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who was let in. All that they see and do is within their tenant."""

    tenant: str
    subject: str
    """Who it is within the tenant: a token's name, or the subject of a JWT."""
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or (Scope.ADMIN in self.scopes and scope is not Scope.OPERATOR)
