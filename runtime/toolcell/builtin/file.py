"""`Files`: read, write, list, delete and describe the files of a workspace."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, ParamSpec, TypeVar

from toolcell.builtin.encodings import decode, encode
from toolcell.builtin.package import ToolPackage, offered
from toolcell.builtin.workspace import Entry, Workspace
from toolcell.errors import ToolError
from toolcell.support import daemon_threads
from toolcell.support.text import for_terminal
from toolcell.tools import Text, ToolContext, ToolResult

READ_CHARS: Final = 8000
"""Characters of a file that a model reads."""
VALUE_CHARS: Final = 1_000_000
"""Characters of a file that code gets in one call."""
TRUNCATED: Final = "\n... (truncated)"
USER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,63}")

P = ParamSpec("P")
R = TypeVar("R")

_TYPES: Final = {"file": "file", "directory": "dir"}


class Roots:
    """Which workspace a call gets: one for all, or with `per_user` one for each user of the run."""

    def __init__(self, workspace: str | os.PathLike[str] | Workspace, *, per_user: bool = False) -> None:
        self._whole = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._per_user = per_user

    async def of(self, ctx: ToolContext) -> Workspace:
        """Return the workspace of a call.

        Raises:
            ToolError: the workspace is by user, and the run is for nobody.
        """
        if not self._per_user:
            return self._whole
        if not ctx.user_id:
            raise ToolError("each user has a workspace of their own, and this run is for no user", code="unavailable")
        return await in_thread(self._whole.subdirectory, directory_of(ctx.user_id))


def directory_of(user_id: str) -> str:
    """Return the directory name of a user. Two users never share one; no id becomes another path."""
    if USER_NAME.fullmatch(user_id) and user_id == user_id.lower():
        return f"user-{user_id}"
    return f"id-{hashlib.sha256(user_id.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}"


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that works on files without keeping the event loop."""
    return await daemon_threads.run_sync(functools.partial(function, *args, **kwargs))


class Files(ToolPackage):
    """Tools for the files of a workspace, which they cannot leave."""

    package = "file"
    needs = ("workspace",)

    def __init__(self, workspace: str | os.PathLike[str] | Workspace, *, per_user: bool = False) -> None:
        """`workspace`: a directory, made if it is missing. `per_user`: each user of a run has a directory in it.

        Raises:
            UsageError: the directory cannot be made.
        """
        self._roots = Roots(workspace, per_user=per_user)

    @offered(
        read_only=True,
        idempotent=True,
        returns={
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "encoding": {"type": "string"},
                "offset": {"type": "integer"},
                "chars": {"type": "integer"},
                "size": {"type": "integer"},
                "truncated": {"type": "boolean"},
            },
        },
    )
    async def file_read(
        self, path: str, ctx: ToolContext, offset: int = 0, limit: int = VALUE_CHARS, encoding: str = "auto"
    ) -> ToolResult:
        """Read a file of the workspace. Long text is cut; read on with `offset`.

        Args:
            path: Relative to the workspace, as in notes/todo.txt.
            offset: Characters to skip.
            limit: Characters to return.
            encoding: auto recognises it. Or a name such as shift_jis; base64 returns any
                file's bytes.
        """
        if offset < 0 or limit < 1:
            raise ToolError(f"read error: offset must be at least 0 and limit at least 1, not {offset} and {limit}")
        return await in_thread(_read, await self._roots.of(ctx), path, offset, min(limit, VALUE_CHARS), encoding)

    @offered(
        idempotent=True,
        returns={"type": "object", "properties": {"path": {"type": "string"}, "size": {"type": "integer"}}},
    )
    async def file_write(self, path: str, content: str, ctx: ToolContext, encoding: str = "auto") -> ToolResult:
        """Write a file of the workspace, and the directories above it. A file that exists is replaced.

        Args:
            path: Relative to the workspace, as in notes/todo.txt.
            content: The whole new content; may be empty.
            encoding: auto is UTF-8, with the byte order mark of the file that is replaced; a name such as utf-16; with
                base64, content stands for bytes.
        """
        workspace = await self._roots.of(ctx)
        try:
            replaced = await in_thread(_beginning, workspace, path) if encoding == "auto" else b""
            data = encode(content, encoding, replaced)
        except ToolError as exc:
            raise ToolError(f"write error: {exc.message}") from exc
        await in_thread(workspace.write, path, data)
        return ToolResult.ok(f"Written {len(data)} bytes to {_basename(path)}", value={"path": path, "size": len(data)})

    @offered(
        read_only=True,
        idempotent=True,
        returns={
            "type": "object",
            "properties": {
                "entries": {"type": "array", "items": {"type": "object"}},
                "truncated": {"type": "boolean"},
            },
        },
    )
    async def file_list(self, ctx: ToolContext, path: str = "", pattern: str | None = None) -> ToolResult:
        """List a directory of the workspace: a line with the type and the name for each entry.

        Args:
            path: Relative to the workspace; empty is the workspace itself.
            pattern: Lists what matches below the directory too, as in *.txt or src/**/*.py.
        """
        listed = await in_thread((await self._roots.of(ctx)).list, path, pattern)
        text = "\n".join(map(_entry_line, listed.entries)) + (TRUNCATED if listed.truncated else "")
        return text_result(text, {"entries": [_entry(each) for each in listed.entries], "truncated": listed.truncated})

    @offered(returns={"type": "object", "properties": {"path": {"type": "string"}}})
    async def file_delete(self, path: str, ctx: ToolContext) -> ToolResult:
        """Delete a file or an empty directory of the workspace.

        Args:
            path: Relative to the workspace, as in notes/todo.txt.
        """
        await in_thread((await self._roots.of(ctx)).delete, path)
        return ToolResult.ok(f"Deleted {_basename(path)}", value={"path": path})

    @offered(
        read_only=True,
        idempotent=True,
        returns={
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "size": {"type": "integer"},
                "type": {"enum": ["file", "directory"]},
                "modified": {"type": "string"},
            },
        },
    )
    async def file_stat(self, path: str, ctx: ToolContext) -> ToolResult:
        """Describe a file or directory of the workspace: name, size in bytes, type, time of the last change.

        Args:
            path: Relative to the workspace, as in notes/todo.txt.
        """
        facts = await in_thread((await self._roots.of(ctx)).facts, path)
        modified = datetime.fromtimestamp(int(facts.modified_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        value: dict[str, Any] = {"name": facts.name, "size": facts.size, "type": facts.kind, "modified": modified}
        return ToolResult.ok(json.dumps(value, ensure_ascii=False), value=value)


def _read(workspace: Workspace, path: str, offset: int, limit: int, encoding: str) -> ToolResult:
    data = workspace.read(path)
    try:
        whole, found = decode(data, encoding)
    except ToolError as exc:
        raise ToolError(f"read error: {for_terminal(path)}: {exc.message}") from exc
    text = whole[offset : offset + limit]
    truncated = offset + len(text) < len(whole)
    value = {
        "path": path,
        "text": text,
        "encoding": found,
        "offset": offset,
        "chars": len(whole),
        "size": len(data),
        "truncated": truncated,
    }
    shown = text[:READ_CHARS] + (TRUNCATED if truncated or len(text) > READ_CHARS else "")
    return text_result(shown, value)


def _beginning(workspace: Workspace, path: str) -> bytes:
    """Return the first bytes of a file, where a byte order mark would be; none of one that cannot be read."""
    try:
        with workspace.open(path) as source:
            return source.read(4)
    except ToolError:
        return b""


def text_result(text: str, value: Any) -> ToolResult:
    """Return text for a model and a value for code. An empty text stays empty: a model does not read the value."""
    return ToolResult(parts=(Text(text),), value=value, has_value=True)


def _basename(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _entry_line(entry: Entry) -> str:
    # A name with a line break would look like two entries.
    return f"{_TYPES.get(entry.kind, entry.kind)}\t{_path_text(entry.path)}"


def _entry(entry: Entry) -> dict[str, Any]:
    return {"name": _path_text(entry.path), "type": entry.kind, "size": entry.size}


def _path_text(path: str) -> str:
    return for_terminal(path).replace("\n", "\\n").replace("\t", "\\t")
