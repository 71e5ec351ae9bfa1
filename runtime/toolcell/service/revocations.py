"""`Revocations`: what is open for long ends when the credential that it was asked with does not hold any more.

One rule for runs, answers that are streams, pages that are followed and clients that are connected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Final

from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem
from toolcell.support.log import logger_of

logger = logger_of("toolcell.service.revocations")

CHECK_S: Final = 1.0
"""Between two looks at a credential."""

AskWho = Callable[[], Awaitable[Principal]]
"""Returns whose a credential is now, or raises a `Problem`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    principal: Principal
    ask_who: AskWho
    end: Callable[[Problem], None]


class Revocations:
    """Looks at the credentials of everything that is open."""

    def __init__(self) -> None:
        self._open: set[_Open] = set()
        self._checking: asyncio.Task[None] | None = None
        """Runs while something is open."""

    @contextmanager
    def ending(self, principal: Principal, ask_who: AskWho, end: Callable[[Problem], None]) -> Iterator[None]:
        """Call `end` when within this block the credential is not, or not with the same rights, the principal's."""
        one = _Open(principal, ask_who, end)
        self._open.add(one)
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), context=Context())  # of no single request
        try:
            yield
        finally:
            self._open.discard(one)

    def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()

    async def _check(self) -> None:
        """Look at all of them again and again, while there are any."""
        while self._open:
            await asyncio.sleep(CHECK_S)
            for one in [*self._open]:
                problem = await _problem_of(one)
                if problem is not None and one in self._open:
                    self._open.discard(one)
                    who, why = one.principal, problem.detail or problem.title
                    logger.warning("what %s of %s had open ends: %s", who.subject, who.tenant, why)
                    one.end(problem)
                await asyncio.sleep(0)  # of very many, others do not wait for all


async def check_same(principal: Principal, ask_who: AskWho) -> None:
    """Check that a credential is still its principal's: it may have been revoked, or expired.

    Raises:
        Problem: it is not (401, 403), or too many wrong ones came from the address (429).
    """
    now = await ask_who()
    is_same = (now.tenant, now.subject) == (principal.tenant, principal.subject)
    if not is_same or any(now.may(scope) != principal.may(scope) for scope in Scope):
        raise Problem(403, "forbidden", "Not allowed", "the credential has other rights now; connect again")


async def _problem_of(one: _Open) -> Problem | None:
    """Return why a credential does not hold any more. Where that cannot be found out now, it does."""
    try:
        await check_same(one.principal, one.ask_who)
    except Problem as problem:
        return problem if problem.status in (401, 403) else None
    except Exception as exc:  # the others are looked at all the same
        logger.error(
            "whether %s of %s may go on cannot be found out: %s", one.principal.subject, one.principal.tenant, exc
        )
    return None
