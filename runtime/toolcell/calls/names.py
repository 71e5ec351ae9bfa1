"""Names of tools: which there may be, how a provider and Python write them, and which cannot stand side by side.

A name is one part or several, with dots between them: in `github.create_issue`, `github` is a namespace. Providers
take no dots, so a model is shown `github__create_issue`, and a call by that name is a call of the tool.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping

from toolcell.errors import RegistrationError
from toolcell_bridge.guest.tool_names import IN_PLACE_OF_DOT, python_path

NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
"""Parts of the signs that every provider accepts."""

MAX_NAME_CHARS = 64
"""Most characters of a name as providers are given it."""

RESERVED = "toolcell"
"""The namespace of what the host answers itself."""


def provider_name(name: str) -> str:
    """Return a tool's name as providers take it."""
    return name.replace(".", IN_PLACE_OF_DOT)


def check_name(name: object) -> None:
    """Refuse what no provider would accept, and the namespace that is the host's own.

    Raises:
        RegistrationError: names the tool and what is wrong with it.
    """
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name) or len(provider_name(name)) > MAX_NAME_CHARS:
        shown = f"^{NAME_PATTERN.pattern}$ and have at most {MAX_NAME_CHARS} characters, a dot counting twice"
        raise RegistrationError(f"tool {str(name)[:200]!r}: a name must match {shown}")
    if name.partition(".")[0].casefold() == RESERVED and "." in name:
        raise RegistrationError(f"tool {name!r}: the namespace {RESERVED!r} is taken")
    if any(len(part) > 4 and part.startswith("__") and part.endswith("__") for part in name.split(".")):
        raise RegistrationError(f"tool {name!r}: a name such as __class__ means something else in Python; rename it")


@functools.lru_cache(maxsize=8192)
def collision_key(name: str) -> str:
    """Return what two names must not have in common: how they look to a provider or in Python, whatever their case."""
    return provider_name(python_path(name)).casefold()


class TakenNames:
    """The names of a registry's tools, by what two of them must not have in common. Adding one looks at no other."""

    def __init__(self, tools: Iterable[str]) -> None:
        """`tools`: names that stand side by side already. They are not checked."""
        self._known = dict[str, str]()
        self._namespaces = dict[str, str]()
        for name in tools:
            self._note(name)

    def _note(self, name: str) -> None:
        self._known.setdefault(collision_key(name), name)
        if "." in name:
            self._namespaces.setdefault(collision_key(name.rpartition(".")[0]), name)

    def add(self, new: Iterable[str], identity: Callable[[str], object]) -> None:
        """Add names, each checked against all others. `identity(name)` is equal for names of one tool.

        Raises:
            RegistrationError: two names differ in case or signs only, or a name is also a namespace. Some are added.
        """
        for name in new:
            self._note(name)
            key = collision_key(name)
            other = self._known[key]
            if identity(other) != identity(name):
                alike = f"{other!r} differs from it in case or signs only"
                raise RegistrationError(f"tool {name!r}: {alike}; rename one of them")
            for each in {key, collision_key(name.rpartition(".")[0])}:
                if each in self._known and each in self._namespaces:
                    alike = f"the namespace of {self._namespaces[each]!r}"
                    raise RegistrationError(f"tool {self._known[each]!r} has the name of {alike}; rename one of them")


def check_collisions(new: Iterable[str], tools: Mapping[str, object]) -> None:
    """Refuse names that a model or a script could take for one another. Two names of one tool may be alike.

    `tools`: what there will be, the new names among it, each with something that is equal for names of one tool.

    Raises:
        RegistrationError: two names differ in case or signs only, or a name is also a namespace.
    """
    TakenNames(tools).add(new, tools.__getitem__)
