"""robots.txt: which paths of a host a program may fetch. Source: RFC 9309. Pure; `fetch` gets and keeps the files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote, unquote

MAX_ROBOTS_BYTES = 500 * 1024
"""RFC 9309, section 2.5."""
MAX_RULES = 5000
MAX_STARS = 16
"""Wildcards in one rule; with more of them it is ignored. Each costs one search of the path."""


@dataclass(frozen=True, slots=True)
class RobotsRules:
    """The rules for one user agent, as (allowed, pattern)."""

    rules: tuple[tuple[bool, str], ...] = ()

    def allows(self, path: str) -> bool:
        """True when the longest pattern that matches allows the path, or none matches."""
        if path == "/robots.txt":
            return True
        path = _normal(path)
        hits = [(len(pattern), allowed) for allowed, pattern in self.rules if _matches(pattern, path)]
        return max(hits)[1] if hits else True


EVERYTHING = RobotsRules()
NOTHING = RobotsRules(((False, "/"),))


def parse_robots(text: str, agent: str) -> RobotsRules:
    """Return the rules that a robots.txt has for `agent`, a product name such as `toolcell`."""
    own: list[tuple[bool, str]] = []
    others: list[tuple[bool, str]] = []
    is_named = False
    agents: set[str] = set()
    in_rules = False
    for key, value in _lines(text):
        if key == "user-agent":
            agents = set() if in_rules else agents
            agents.add(value.lower())
            in_rules = False
            is_named = is_named or value.lower() == agent.lower()
        elif key in ("allow", "disallow"):
            in_rules = True
            if not value or value.count("*") > MAX_STARS:
                continue
            rule = key == "allow", _normal(value)
            if agent.lower() in agents and len(own) < MAX_RULES:
                own.append(rule)
            if "*" in agents and len(others) < MAX_RULES:
                others.append(rule)
    return RobotsRules(tuple(own if is_named else others))


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, colon, value = line.partition("#")[0].partition(":")
        if colon:
            yield key.strip().lower(), value.strip()


def _normal(path: str) -> str:
    return quote(unquote(path), safe="/*$?=&:@!'()+,;~")


def _matches(pattern: str, path: str) -> bool:
    is_whole = pattern.endswith("$")
    first, *rest = pattern.removesuffix("$").split("*")
    if not path.startswith(first):
        return False
    position = len(first)
    for index, piece in enumerate(rest):
        if is_whole and index == len(rest) - 1:
            return len(path) - len(piece) >= position and path.endswith(piece)
        position = path.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return not is_whole or position == len(path)
