"""`AllowedRequests`: which requests the rules of an `Egress` allow, and how they are sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import anyio

from toolcell.calls.run_state import Secrets
from toolcell.egress.connector import GuardedBackend
from toolcell.egress.echoes import Echoes
from toolcell.egress.failures import LIMIT, refused
from toolcell.egress.overrides import check_override, destinations
from toolcell.egress.request import HttpRequest, filled_body, secret_names, sent_headers
from toolcell.egress.resolver import Resolver, SystemResolver, checked_addresses
from toolcell.egress.rules import Allow, RuleBook
from toolcell.egress.urls import Target
from toolcell.errors import ToolError
from toolcell.support.token_bucket import TokenBucket


class AllowedRequests:
    """Decides about requests, and fills in their secrets."""

    def __init__(self, rules: Sequence[Allow], secrets: Secrets, resolver: Resolver | None) -> None:
        """`resolver`: looks up hosts; None for the system's."""
        self.rules, self._secrets, self.resolver = rules, secrets, resolver
        self._book = RuleBook(rules)
        self.check_address = self._book.check_address
        self.echoes = Echoes(secrets)
        """Finds its secrets."""
        self._paces = [TokenBucket(1 / rule.rate, max(1.0, rule.rate)) if rule.rate else None for rule in rules]
        self._lock = threading.Lock()

    def judge(self, request: HttpRequest) -> Allow:
        """Return the rule that allows a request.

        Raises:
            ToolError: none does.
        """
        rule = self._book.judge(request.method, request.target)
        check_override(request)
        for place in destinations(request):
            if self._book.judge(request.method, place) is not rule:
                raise refused(f"{request}: the header Destination leads to where another rule holds, {place}")
        return rule

    def judge_unasked(self, request: HttpRequest) -> Allow:
        """Do the same for a request that nobody can be asked about.

        Raises:
            ToolError: no rule allows it, or somebody would have to approve it.
        """
        rule = self.judge(request)
        if rule.needs_approval(request.method):
            raise refused(f"{request}: somebody has to approve it, and only requests of scripts are asked about")
        return rule

    def filled(
        self, request: HttpRequest, rule: Allow, long_bytes: int | None = None
    ) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """Return body and headers of a request as they are sent. `long_bytes`: size of a body that is elsewhere."""
        body = filled_body(request, rule, self._secrets)
        return body, sent_headers(request, rule, self._secrets, len(body) if long_bytes is None else long_bytes)

    def sent_to(self, request: HttpRequest) -> dict[str, list[str]]:
        """Return, for the record, where a request goes, and names of the secrets in it.

        Raises:
            ToolError: it is refused.
        """
        rule = self.judge(request)
        return {"hosts": [request.target.host], "secret_names": secret_names(request, rule, self._secrets)}

    async def wait_for_turn(self, rule: Allow, most_s: float) -> None:
        """Wait for the next turn of a rule with a rate.

        Raises:
            ToolError: it is `most_s` away or more; it is not taken.

        Cancellation: the turn is given back. A script could otherwise take all turns of the others.
        """
        bucket = next(pace for each, pace in zip(self.rules, self._paces, strict=True) if each is rule)
        if bucket is None:
            return
        with self._lock:
            now = time.monotonic()
            if (wait_s := bucket.wait_s(now)) >= most_s:
                text = f"{rule.host} may get {rule.rate:g} requests a second, and the next turn is {wait_s:.1f} s away"
                raise ToolError(text, code=LIMIT, retryable=True)
            bucket.take(now)
        try:
            await anyio.sleep(wait_s)
        except BaseException:
            with self._lock:
                bucket.give_back(time.monotonic())
            raise

    async def addresses_of(self, target: Target) -> list[str]:
        """Return the checked addresses of a host.

        Raises:
            ToolError: an address is refused, or the host is not known.
        """
        return await checked_addresses(self.check_address, self.resolver or SystemResolver(), target.host, target.port)

    def network(self, connections: anyio.CapacityLimiter) -> GuardedBackend:
        """Return what connects to the addresses that the rules allow. `connections`: how many there may be."""
        return GuardedBackend(self.check_address, self.resolver, connections)
