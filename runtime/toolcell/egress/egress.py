"""`Egress`: the requests that scripts of a runtime may send."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Self

from toolcell.calls.run_state import Secrets
from toolcell.config import Limits
from toolcell.egress.allowed_requests import AllowedRequests
from toolcell.egress.packages import PackageIndex
from toolcell.egress.request_tools import RequestTools
from toolcell.egress.resolver import Resolver
from toolcell.egress.rules import PLACEHOLDER, Allow, label_set
from toolcell.errors import UsageError
from toolcell.support.checks import check_kind


class Egress:
    """Where scripts may send HTTP requests. Without a rule that allows it, no request is sent.

        Egress(Allow("api.github.com", secrets={"Authorization": "Bearer {TOKEN}"}), secrets=Secrets({"TOKEN": token}))

    Scripts never have a secret: they may write `{TOKEN}`, and the host puts the value in its place.
    """

    def __init__(
        self,
        *rules: Allow,
        secrets: Mapping[str, str] | None = None,
        resolver: Resolver | None = None,
        packages: Sequence[str] | PackageIndex = (),
    ) -> None:
        """`resolver`: looks up hosts in place of the system. `packages`: what scripts may install.

        Raises:
            UsageError: a rule is none, or names a secret that there is not.
        """
        for rule in rules:
            check_kind("Egress: each rule", rule, Allow, cure='write Allow("api.example.com")')
        self._secrets = secrets if isinstance(secrets, Secrets) else Secrets(secrets)
        for name, value in self._secrets.items():
            if not PLACEHOLDER.fullmatch(f"{{{name}}}") or not (value.isascii() and value.isprintable()):
                raise UsageError(f"Egress: the secret {name!r:.80} needs a name like API_TOKEN, and a line of ASCII")
        self.index = packages if isinstance(packages, PackageIndex) else PackageIndex(packages)
        for rule in (*rules, *self.index.rules):
            if missing := sorted((rule.header_secrets | rule.body_secrets) - self._secrets.keys()):
                raise UsageError(f"Allow({rule.host!r}): Egress(secrets=) has no {missing[0]!r:.80}")
        self.rules = rules
        self.allowed = AllowedRequests(rules, self._secrets, resolver)
        """Decides about each request."""

    @classmethod
    def of_texts(
        cls,
        allow: Sequence[str],
        secrets: Sequence[str] = (),
        packages: Sequence[str] = (),
        package_index: str | None = None,
    ) -> Self:
        """Return the rules of a command line or a file. Secrets are variables of this process's environment.

        `allow`: what `Allow.parse` reads. `secrets`: such as `api.example.com=Authorization: Bearer {TOKEN}`.
        `packages`: what scripts may install. `package_index`: where from, as `PackageIndex.parse` reads it.

        Raises:
            UsageError: a text is wrong, or a variable is not set.
        """
        rules, values = [Allow.parse(text) for text in allow], dict[str, str]()
        for text in secrets:
            host, equals, header = text.partition("=")
            name, colon, template = header.partition(":")
            names: list[str] = PLACEHOLDER.findall(template)
            if not (equals and colon and names):
                form = "HOST=HEADER: TEXT WITH {NAME}"
                raise UsageError(f"a secret is written {form!r}, and NAME is a variable; not {text!r:.100}")
            given = zip(rules, allow, strict=True)
            if not (found := [rule for rule, own in given if host.strip() in (own.strip(), rule.host, rule.name)]):
                raise UsageError(f"secret {text!r:.100}: no rule is about {host.strip()!r}")
            for each in names:
                if not os.environ.get(each):
                    raise UsageError(f"secret {text!r:.100}: the environment variable {each} is not set")
                values[each] = os.environ[each]
            for rule in found:
                own = {**rule.added_headers, name.strip(): template.strip()}
                rules[rules.index(rule)] = dataclasses.replace(rule, secrets=own)
        if package_index is None:
            return cls(*rules, secrets=values, packages=packages)
        index, own_secrets = PackageIndex.parse(packages, package_index)
        return cls(*rules, secrets=values | own_secrets, packages=index)

    def tools_for(self, limits: Limits) -> RequestTools:
        """Return the tools of one runtime. `limits`: of runs that have none of their own."""
        return RequestTools(self.allowed, self.index, self.for_index(), limits)

    @property
    def labels(self) -> tuple[frozenset[str], frozenset[str]]:
        """Data-flow labels of all rules: where requests go, and what answers hold."""
        sends = frozenset(rule.sends for rule in self.rules)
        return sends, frozenset[str]().union(*(label_set(rule.reads) for rule in self.rules))

    def for_index(self) -> Egress:
        """Return where packages are looked for: nothing else may be reached from there."""
        return Egress(*self.index.rules, secrets=self._secrets, resolver=self.allowed.resolver)

    def __repr__(self) -> str:
        return f"Egress({', '.join(repr(rule.host) for rule in self.rules)})"
