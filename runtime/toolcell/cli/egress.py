"""The flags `--allow` and `--allow-secret`: where a script may send requests, and with which secrets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from toolcell.errors import UsageError

if TYPE_CHECKING:
    from toolcell.egress import Egress


def egress_of(allow: Sequence[str], secrets: Sequence[str]) -> Egress:
    """Return what the flags say. Secrets are variables of this process's environment.

    Raises:
        UsageError: a flag is wrong, or a variable is not set.
    """
    from toolcell.egress import Allow, Egress, placeholders

    rules = [Allow.parse(text) for text in allow]
    values = {}
    for text in secrets:
        host, equals, header = text.partition("=")
        name, colon, template = header.partition(":")
        names = placeholders(template)
        found = [index for index, rule in enumerate(rules) if host.strip() in (rule.host, rule.name)]
        if not (equals and colon and names):
            form = "HOST=HEADER: TEXT WITH {NAME}"
            raise UsageError(f"--allow-secret is written {form!r}, and {{NAME}} is a variable here; not {text!r:.100}")
        if not found:
            raise UsageError(f"--allow-secret {text!r:.100}: no --allow is about {host.strip()!r}")
        for each in names:
            if not os.environ.get(each):
                raise UsageError(f"--allow-secret {text!r:.100}: the environment variable {each} is not set")
            values[each] = os.environ[each]
        for index in found:
            own = {**rules[index].headers, name.strip(): template.strip()}
            rules[index] = replace(rules[index], secrets=own)
    return Egress(*rules, secrets=values)
