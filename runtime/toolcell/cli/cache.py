"""`toolcell cache`: list and remove what the process backend keeps on this machine."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated

import typer

from toolcell.cli import exits
from toolcell.cli.arguments import parse_size
from toolcell.cli.flags import AsJson, group
from toolcell.cli.terminal import output, print_json, safe, stdout
from toolcell.sandbox.process import cache
from toolcell.support.text import size
from toolcell.support.times import parse_time

SUMMARY = """Cached package environments and interpreters of the process backend.

The place is $XDG_CACHE_HOME/toolcell, by default ~/.cache/toolcell. Removed entries are built again when needed.
"""

EPILOG = f"Exit status: {exits.OK} success, {exits.UNAVAILABLE} the cache cannot be used."


def list_entries(as_json: AsJson = False) -> None:
    """List entries with their size and last use, the most recently used first. A shared file counts once."""
    folder = cache.user_cache()
    found = cache.entries(folder)
    total = sum(entry.size_bytes for entry in found)
    if as_json:
        listed = [
            {
                "kind": entry.kind,
                "key": entry.path.name,
                "content": entry.content,
                "size_bytes": entry.size_bytes,
                "last_used": _time(entry.used_ns),
                "in_use": entry.in_use,
            }
            for entry in found
        ]
        print_json({"cache": str(folder), "size_bytes": total, "max_bytes": cache.MAX_BYTES, "entries": listed})
        return
    for entry in found:
        use = "in use now" if entry.in_use else _time(entry.used_ns)
        stdout().print(safe(f"{entry.kind:<12}  {size(entry.size_bytes):>9}  {use:<16}  {entry.content}".rstrip()))
    stdout().print(safe(f"{size(total)} of at most {size(cache.MAX_BYTES)} in {folder}"))


def prune(
    max_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help=f"Remove the least recently used until the rest fits. [default: {size(cache.MAX_BYTES)}]",
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="TIME", help="Remove what was not used for 12h or 30d, or since a date."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used entries. Those that a running process uses stay."""
    unused_s = time.time() - parse_time(older_than) / 1e9 if older_than is not None else None
    folder = cache.user_cache()
    bound = cache.MAX_BYTES if max_bytes is None else max_bytes
    freed = cache.prune(folder, max_bytes=bound, unused_s=unused_s)
    left = sum(entry.size_bytes for entry in cache.entries(folder))
    said = safe(f"freed {size(freed)}; {size(left)} left in {folder}")
    done = {"cache": str(folder), "freed_bytes": freed, "size_bytes": left}
    output(done, as_json, lambda: stdout().print(said))


def _time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9).astimezone().isoformat(" ", "minutes")[:16]


register = group(SUMMARY, {"list": list_entries, "prune": prune}, epilog=EPILOG)
