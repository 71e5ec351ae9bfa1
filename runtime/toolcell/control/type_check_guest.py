"""Check the types of scripts. This file's text is the script that the checker's sandbox executes.

Of ours it imports only what guests have: reading a hostile text can take all memory and the whole stack.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn

from toolcell_bridge.guest.source import plain_source
from toolcell_bridge.guest.tool_imports import TOOLS_NAME, bound_name, find_imported_tools

TY = "/packages/bin/ty"
LIBRARIES = "/packages/lib"
REPORTED = frozenset(
    {
        "call-non-callable",
        "invalid-argument-type",
        "invalid-await",
        "invalid-key",
        "invalid-typed-dict-key",
        "missing-argument",
        "missing-attribute",
        "missing-typed-dict-key",
        "no-matching-overload",
        "non-subscriptable",
        "not-callable",
        "not-iterable",
        "not-subscriptable",
        "parameter-already-assigned",
        "too-many-positional-arguments",
        "unknown-argument",
        "unresolved-attribute",
        "unresolved-reference",
        "unsupported-operator",
    }
)
"""Rules of ty that find what would fail in a run. Packages and syntax are the run's own matter."""

Edit = tuple[int, int, str]
"""Bytes from, to, and the text that takes their place."""


BUILTINS = "__builtins__.pyi"
TOOLS = "toolcell_stubs.pyi"
OFFERED = "from typing import Any\nfrom toolcell_stubs import {}\n"

MAX_HEADER_BYTES = 4096
"""Most bytes of one message of ty."""


def serve(
    next_check: Callable[[Any], Any], stubs: str, names: list[str], paths: Mapping[str, str], version: str
) -> None:
    """Check one script after the other with one ty, which keeps what it knows about Python and the tools.

    `stubs`: what every script finds, and `names` which of it. `paths`: what each tool is called below `tools`.
    `next_check` takes an answer and waits for the next script. Shape: `{"source": ..., "given": lines of names that
    this script finds too, "earlier": scripts before it in its session}`, and `{"findings": [[line, rule, message]]}`.
    """
    server, answer = TyServer(stubs, names, version), None
    while (given := next_check(answer)) is not None:
        answer = {"findings": check(server, given["source"], given["given"], given["earlier"], paths)}


def check(server: TyServer, source: str, given: str, earlier: list[str], paths: Mapping[str, str]) -> list[list[Any]]:
    """Check one script. One that is not Python has no findings: its run says what is wrong."""
    try:
        text = direct_calls(plain_source(source), paths)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    bound, reported = [bound_names(each) for each in earlier], REPORTED
    if None in bound:  # a script before this one may have left any name
        reported -= {"unresolved-reference"}
    known = {line.partition(":")[0] for line in given.splitlines()}
    left = {name for names in bound for name in names or ()} - known
    given += "".join(f"{name}: Any\n" for name in sorted(left))
    return [finding(each) for each in server.findings(text, given) if each.get("code") in reported][:50]


def finding(row: Mapping[str, Any]) -> list[Any]:
    """Return line, rule and message of one of ty's findings."""
    return [row["range"]["start"]["line"] + 1, row["code"], row["message"].partition("\n\n")[0][:300]]


class TyServer:
    """One ty, as a server of the Language Server Protocol. Scripts reach it in memory, one at a time."""

    def __init__(self, stubs: str, names: list[str], version: str) -> None:
        self._offered = OFFERED.format(", ".join(f"{name} as {name}" for name in names))
        for path, text in ((TOOLS, stubs), (BUILTINS, self._offered)):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        environment = {"LD_LIBRARY_PATH": LIBRARIES, "TY_MAX_PARALLELISM": "1"}
        with open("ty.log", "wb") as log:
            self._ty = subprocess.Popen(
                [TY, "server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        self._folder = f"file://{os.getcwd()}"
        self._number = self._version = 0
        self._given = ""
        self._ask(
            "initialize",
            {
                "processId": None,
                "rootUri": self._folder,
                "workspaceFolders": [{"uri": self._folder, "name": "scripts"}],
                "capabilities": {"textDocument": {"diagnostic": {}}},
                "initializationOptions": {
                    "diagnosticMode": "openFilesOnly",
                    "configuration": {"environment": {"python-version": version}},
                },
            },
        )
        self._send({"method": "initialized", "params": {}})
        self._open(BUILTINS, self._offered)

    def findings(self, text: str, given: str) -> list[dict[str, Any]]:
        """Return what ty finds in a script, as its diagnostics. Nothing of the script stays."""
        if given != self._given:
            self._given = given
            document = {"uri": f"{self._folder}/{BUILTINS}"}
            change = {
                "textDocument": {**document, "version": self._next_version()},
                "contentChanges": [{"text": self._offered + given}],
            }
            self._send({"method": "textDocument/didChange", "params": change})
        document = self._open("script.py", text)
        try:
            found = self._ask("textDocument/diagnostic", document)
        finally:
            self._send({"method": "textDocument/didClose", "params": document})
        return list(found["items"])

    def _open(self, name: str, text: str) -> dict[str, Any]:
        document = {"uri": f"{self._folder}/{name}"}
        opened = {"textDocument": {**document, "languageId": "python", "version": self._next_version(), "text": text}}
        self._send({"method": "textDocument/didOpen", "params": opened})
        return {"textDocument": document}

    def _next_version(self) -> int:
        """Return a version that no document had: ty answers about another text of the same version from memory."""
        self._version += 1
        return self._version

    def _ask(self, method: str, params: Any) -> Any:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            message = self._receive()
            if "method" in message:
                if "id" in message:  # ty asks for something that this client does not have
                    self._send({"id": message["id"], "result": None})
            elif message.get("id") == self._number:
                if "result" not in message:
                    raise RuntimeError(f"ty answered with {message.get('error')!s:.300}")
                return message["result"]

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._ty.stdin is not None
        try:
            self._ty.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
            self._ty.stdin.flush()
        except OSError:
            self._raise_ended()

    def _receive(self) -> dict[str, Any]:
        assert self._ty.stdout is not None
        length = 0
        while header := self._ty.stdout.readline(MAX_HEADER_BYTES).strip():
            name, _, value = header.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        data = self._ty.stdout.read(length)
        if not length or len(data) < length:
            self._raise_ended()
        message: dict[str, Any] = json.loads(data)
        return message

    def _raise_ended(self) -> NoReturn:
        with open("ty.log", "rb") as log:
            said = log.read()[-300:].decode(errors="replace")
        raise RuntimeError(f"ty ended with {self._ty.wait()}: {said}")


@functools.lru_cache(maxsize=256)
def bound_names(source: str) -> frozenset[str] | None:
    """Return the names that a script leaves in a session, as far as they are written in it; None when it may be any."""
    names = set[str]()
    try:
        tree = ast.parse(plain_source(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id="exec" | "globals" | "locals" | "vars"):
                return None
            case ast.alias(name="*"):
                return None
            case _ if (name := bound_name(node)) is not None:
                names.add(name)
    return frozenset(names)


def direct_calls(source: str, paths: Mapping[str, str]) -> str:
    """Write `call_tool("name", {"a": 1})` as `tools.name(a=1)`, whose arguments can be checked. Lines stay as they are.

    Raises:
        SyntaxError: the script is none.
    """
    tree = ast.parse(source)
    lines, names = Lines(source), {"tools", *find_imported_tools(tree)}
    edits = list[Edit]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            edits += _edits(node, lines, paths, names)
        elif isinstance(node, ast.Import | ast.ImportFrom) and (assigned := _rewrite_import(node, paths)):
            edits.append((lines.start(node), lines.end(node), assigned))
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


def _rewrite_import(node: ast.Import | ast.ImportFrom, paths: Mapping[str, str]) -> str:
    """Return `name = tools.name` for an import of tools; nothing for any other import."""
    if isinstance(node, ast.Import):
        if not any(each.name == TOOLS_NAME for each in node.names):
            return ""
        others = [each for each in node.names if each.name != TOOLS_NAME]
        named = [f"{each.asname} = tools" for each in node.names if each.name == TOOLS_NAME and each.asname]
        return "; ".join(([ast.unparse(ast.Import(others))] if others else []) + named) or "pass"
    if node.module != TOOLS_NAME or node.level:
        return ""
    known = dict.fromkeys(path.partition(".")[0] for path in paths.values())
    if node.names[0].name == "*":
        return "; ".join(f"{name} = tools.{name}" for name in known)
    named = [f"{each.asname or each.name} = tools.{each.name}" for each in node.names if each.name in known]
    others = [each for each in node.names if each.name not in known]  # a file of the run may have them
    return "; ".join(named + ([ast.unparse(ast.ImportFrom(TOOLS_NAME, others, 0))] if others else []))


def _edits(node: ast.Call, lines: Lines, paths: Mapping[str, str], names: Collection[str]) -> Iterator[Edit]:
    match node:
        case ast.Call(ast.Name(id="call_tool" | "call_tool_async" as function), [ast.Constant(value=str(name)), *rest]):
            if name not in paths or any(each.arg == "raw" for each in node.keywords):
                return
            first, is_async = node.args[0], function == "call_tool_async"
            head = f"{'_awaited(' if is_async else ''}tools.{paths[name]}("
            if is_async:
                yield lines.end(node), lines.end(node), ")"
        case ast.Call(ast.Attribute() | ast.Name() as called, [_] as rest) if _is_tool(called, names):
            first, head = called, "("
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


def _is_tool(node: ast.expr, names: Collection[str]) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in names


def _is_keyword(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.isidentifier()
