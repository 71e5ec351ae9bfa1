"""Check the types of one script. This file's text is the script that the checker's sandbox executes.

It imports the standard library only: reading a hostile text can take all memory and the whole stack.
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

TY = "/packages/bin/ty"
LIBRARIES = "/packages/lib"
REPORTED = frozenset({
    "call-non-callable", "invalid-argument-type", "invalid-await", "invalid-key", "invalid-typed-dict-key",
    "missing-argument", "missing-attribute", "missing-typed-dict-key", "no-matching-overload", "non-subscriptable",
    "not-callable", "not-iterable", "not-subscriptable", "parameter-already-assigned", "too-many-positional-arguments",
    "unknown-argument", "unresolved-attribute", "unresolved-reference", "unsupported-operator",
})  # fmt: skip
"""Rules of ty that find what would fail in a run. Packages and syntax are the run's own matter."""

Edit = tuple[int, int, str]
"""Bytes from, to, and the text that takes their place."""


def check(source: str, stubs: str, paths: Mapping[str, str], version: str) -> dict[str, Any]:
    """Check a script against stubs. `paths`: what each tool is called below `tools`.

    Shape: {"findings": [[line, rule, message]], "error": why it could not be checked}.
    """
    try:
        text = direct_calls(source, paths)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {"findings": [], "error": ""}  # the run itself says what is wrong
    with open("__builtins__.pyi", "w", encoding="utf-8") as file:
        file.write(stubs)
    with open("script.py", "w", encoding="utf-8") as file:
        file.write(text)
    done = subprocess.run(
        [TY, "check", "--output-format", "gitlab", "--python-version", version, "script.py"],
        capture_output=True, check=False, env={"LD_LIBRARY_PATH": LIBRARIES, "TY_MAX_PARALLELISM": "1"},
    )  # fmt: skip
    if done.returncode not in (0, 1):
        return {
            "findings": [],
            "error": f"ty ended with {done.returncode}: {done.stderr.decode(errors='replace')[-300:]}",
        }
    rows = (row for row in json.loads(done.stdout) if row["check_name"] in REPORTED)
    return {"findings": [list(finding(row)) for row in rows][:50], "error": ""}


def finding(row: Mapping[str, Any]) -> tuple[int, str, str]:
    """Return line, rule and message of one of ty's findings."""
    rule = row["check_name"]
    message = row["description"].removeprefix(f"{rule}: ")
    return row["location"]["positions"]["begin"]["line"], rule, message[:300]


def direct_calls(source: str, paths: Mapping[str, str]) -> str:
    """Write `call_tool("name", {"a": 1})` as `tools.name(a=1)`, whose arguments can be checked. Lines stay as they are.

    Raises:
        SyntaxError: the script is none.
    """
    tree = ast.parse(source)
    lines = Lines(source)
    edits = [edit for node in ast.walk(tree) if isinstance(node, ast.Call) for edit in _edits(node, lines, paths)]
    text = lines.edited(edits)
    try:
        ast.parse(text)
    except SyntaxError:
        return source
    return text


class Lines:
    """A script as bytes, and where its lines begin."""

    def __init__(self, source: str) -> None:
        self.data = source.encode()
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def start(self, node: Any) -> int:
        """Return where a part of the script begins."""
        return int(self._starts[node.lineno - 1] + node.col_offset)

    def end(self, node: Any) -> int:
        """Return where it ends."""
        return int(self._starts[node.end_lineno - 1] + node.end_col_offset)

    def edited(self, edits: list[Edit]) -> str:
        """Return the script with these edits. Line ends that an edit takes away are put back."""
        pieces, at = list[bytes](), 0
        for start, end, text in sorted(edits):
            pieces += [self.data[at:start], text.encode(), b"\n" * self.data.count(b"\n", start, end)]
            at = end
        return b"".join([*pieces, self.data[at:]]).decode()


def _edits(node: ast.Call, lines: Lines, paths: Mapping[str, str]) -> Iterator[Edit]:
    match node:
        case ast.Call(ast.Name(id="call_tool" | "call_tool_async" as function), [ast.Constant(value=str(name)), *rest]):
            if name not in paths or any(each.arg == "raw" for each in node.keywords):
                return
            first, is_async = node.args[0], function == "call_tool_async"
            head = f"{'_awaited(' if is_async else ''}tools.{paths[name]}("
            if is_async:
                yield lines.end(node), lines.end(node), ")"
        case ast.Call(ast.Attribute() as attribute, [_] as rest) if _is_tool(attribute):
            first, head = attribute, "("
        case _:
            return
    start = lines.start(first if head == "(" else node) if head != "(" else lines.end(first)
    match rest:
        case []:
            nearest = min((lines.start(each) for each in node.keywords), default=lines.end(node) - 1)
            yield start, nearest, head
        case [ast.Dict(keys=keys) as values] if keys and all(_is_keyword(key) for key in keys):
            yield start, lines.start(values) + 1, head
            for key, value in zip(keys, values.values, strict=True):
                assert isinstance(key, ast.Constant)
                yield lines.start(key), lines.end(key), str(key.value)
                colon = lines.data.index(b":", lines.end(key))
                if colon < lines.start(value):
                    yield colon, colon + 1, "="
            yield lines.end(values) - 1, lines.end(values), ""
        case [ast.Constant() | ast.List() | ast.JoinedStr()]:
            yield start, lines.start(rest[0]), head
        case [ast.Starred()]:
            yield start, lines.start(rest[0]), head
        case [value]:  # a dict of arguments, or the first of them
            yield start, lines.start(value), f"{head}*_values("
            yield lines.end(value), lines.end(value), ")"
        case _:
            yield start, lines.start(rest[0]), head


def _is_tool(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "tools"


def _is_keyword(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.isidentifier()
