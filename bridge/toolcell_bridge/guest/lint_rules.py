"""What the standard profile refuses, as tables: modules, members of modules, attributes, names.

Data only. A reader sees here in one look what a script may not mention; who looks for it is elsewhere.
"""

from __future__ import annotations

import re

MESSAGES: dict[str, str] = {
    "process": "{what} is blocked: use call_tool() instead of starting processes",
    "network": "{what} is blocked: use call_tool() instead, the sandbox has no network",
    "native": "{what} is blocked: use call_tool() instead of native libraries",
    "introspection": "{what} is blocked: it reaches the interpreter's own objects, which no script needs",
    "dynamic-code": "{what} is blocked: write the code itself instead of building it as text",
}
"""Rule to reason. Every message says that it is blocked and, where there is one, the way to go instead."""

MODULES: dict[str, str] = {
    "subprocess": "process",
    "_posixsubprocess": "process",
    "posix": "process",
    "nt": "process",
    "pty": "process",
    "asyncio.subprocess": "process",
    "ctypes": "native",
    "_ctypes": "native",
    "cffi": "native",
    "_cffi_backend": "native",
    "socket": "network",
    "_socket": "network",
    "socketserver": "network",
}
"""Module to rule; a submodule goes with its parent."""

_START = re.compile(r"system|popen|fork|forkpty|posix_spawnp?|startfile|exec[lv]p?e?|spawn[lv]p?e?")

MEMBERS: dict[str, tuple[re.Pattern[str], str]] = {
    "os": (_START, "process"),
    "asyncio": (re.compile(r"create_subprocess_(exec|shell)"), "process"),
    "gc": (re.compile(r"get_(objects|referrers|referents)"), "introspection"),
    "sys": (re.compile(r"_getframe|_current_frames|_current_exceptions|settrace|setprofile"), "introspection"),
    "inspect": (re.compile(r"currentframe|stack|trace|get(inner|outer)frames"), "introspection"),
    "builtins": (re.compile(r"exec|eval|compile|__import__"), "dynamic-code"),
    "importlib": (re.compile(r"__import__"), "dynamic-code"),
}
"""Module to the members nobody may touch, and the rule; the rest of the module is free."""

ATTRIBUTES: frozenset[str] = frozenset([
    "__subclasses__", "__bases__", "__base__", "__mro__", "mro", "__globals__", "__builtins__", "__code__",
    "__closure__", "__func__", "__self__", "__import__", "__loader__", "__spec__", "__reduce__",
    "__reduce_ex__", "__subclasshook__", "__objclass__", "__defaults__", "__kwdefaults__",
])  # fmt: skip
"""Attributes that lead from any value to the interpreter's whole object graph. Frame, code and generator attributes
come from RestrictedPython's own table. `__class__`, `__dict__`, `__name__` and the like are everyday Python."""

NAMES: dict[str, str] = {
    "__builtins__": "introspection",
    "__loader__": "introspection",
    "__spec__": "introspection",
    "__import__": "dynamic-code",
}
"""Names nobody may read or bind."""

CODE_BUILTINS: frozenset[str] = frozenset({"exec", "eval", "compile"})
"""Refused as builtins; a script that binds such a name itself means its own."""

BY_NAME_LOOKUPS: frozenset[str] = frozenset(
    {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "getattr_static", "__getattribute__"}
)
"""Calls whose constant text arguments are attribute names."""


def refused_module(name: str) -> str | None:
    """Return the rule that refuses importing `name`, None when it may be imported."""
    parts = name.split(".")
    return next((rule for end in range(1, len(parts) + 1) if (rule := MODULES.get(".".join(parts[:end])))), None)


def refused_member(module: str, name: str) -> str | None:
    """Return the rule that refuses `module.name`, None when it may be used."""
    if rule := refused_module(f"{module}.{name}"):
        return rule
    pattern, rule = MEMBERS.get(module, (None, ""))
    return rule if pattern and pattern.fullmatch(name) else None
