"""`--builtin`: built-in packages for a command, made with what flags and environment say. `toolcell tools builtin`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolcell.cli.places import check_output_file, kept_if_taken
from toolcell.cli.terminal import table
from toolcell.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from toolcell.builtin import Store
    from toolcell.builtin.package import ToolPackage
    from toolcell.runtime import Runtime
    from toolcell.tools import ToolRegistry

DEFAULT_STORE, DEFAULT_WORKSPACE = "toolcell.db", "workspace"
IN_MEMORY = ":memory:"
POSTGRES_SCHEMES = ("postgres://", "postgresql://")

StorePlace = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="PLACE",
        help="An SQLite file, a postgresql:// URL, or :memory:. Default: $TOOLCELL_STORE, or ./toolcell.db.",
    ),
]

_stores: dict[str, Store] = {}
_runtimes: list[Runtime] = []


@dataclass(frozen=True, slots=True)
class BuiltinFlags:
    """Flags that give a command built-in tools."""

    builtin: Annotated[
        list[str] | None,
        typer.Option("--builtin", "-b", metavar="PACKAGE,...", help="Built-in tools: see `toolcell tools builtin`."),
    ] = None
    store: StorePlace = None
    workspace: Annotated[
        str | None,
        typer.Option(
            "--workspace", metavar="DIR", help="For file and shell. Default: $TOOLCELL_WORKSPACE, or ./workspace."
        ),
    ] = None
    timezone: Annotated[
        str, typer.Option("--timezone", metavar="ZONE", help="For new schedules, such as Europe/Berlin or +07:00.")
    ] = "UTC"

    def with_tools(self, registry: ToolRegistry | None, backend: str = "process") -> ToolRegistry | None:
        """Return a registry with the packages beside the tools of `registry`. They work within `opened_dependencies`.

        Raises:
            UsageError: a package does not exist, or what it needs is missing.
            RegistrationError: a name is taken.
        """
        names = [name for text in self.builtin or () for name in text.split(",") if name.strip()]
        if self.builtin and not names:
            raise UsageError(f"--builtin {self.builtin[0]!r} names no package; `toolcell tools builtin` lists them")
        if not names:
            return registry
        from toolcell.tools import ToolRegistry

        with kept_if_taken(Path(self.folder)):
            made = ToolRegistry(self._make(names, backend))
            return made if registry is None else registry.merged(made)

    def _make(self, names: Iterable[str], backend: str) -> list[ToolPackage]:
        from toolcell.builtin.catalogue import package_class

        wanted = list(dict.fromkeys(name.strip() for name in names))
        classes = {name: package_class(name) for name in wanted}  # an unknown name is found before anything is opened
        needs = {
            name: NEEDS[name](self, backend) for name in wanted
        }  # what is missing is found before anything is made
        return [classes[name](*positional, **by_name) for name, (positional, by_name) in needs.items()]

    # What packages need, made when the first one asks for it

    @property
    def opened_store(self) -> Store:
        """Where packages keep what they know."""
        return open_store(self.store, is_written=True)

    @property
    def embeddings(self) -> Any:
        """Embeddings of words alone: no model is downloaded and no service is asked."""
        from toolcell.builtin import HashEmbeddings

        return HashEmbeddings()

    @property
    def folder(self) -> str:
        """The directory of files and programs."""
        place = os.environ.get("TOOLCELL_WORKSPACE") or DEFAULT_WORKSPACE if self.workspace is None else self.workspace
        if not place.strip():
            raise UsageError(f"--workspace {place!r}: the path is empty; name a directory")
        return place

    @property
    def search_engine(self) -> Any:
        """Brave, or an instance of SearXNG."""
        if key := os.environ.get("BRAVE_API_KEY"):
            return key
        if url := os.environ.get("SEARXNG_URL"):
            from toolcell.builtin.web.engines import SearxngSearch

            return SearxngSearch(url)
        raise UsageError("--builtin search needs a search engine: set BRAVE_API_KEY, or SEARXNG_URL")


def shell_runtime(backend: str) -> Runtime:
    """Return the sandboxes of commands. Those of scripts may execute no program."""
    from toolcell.config import Policy, PoolConfig
    from toolcell.runtime import Runtime

    runtime = Runtime(backend=backend, policy=Policy(shell=True), pool=PoolConfig(warm=0))
    _runtimes.append(runtime)
    return runtime


Arguments = tuple[tuple[Any, ...], dict[str, Any]]

NEEDS: Mapping[str, Callable[[BuiltinFlags, str], Arguments]] = {
    "knowledge": lambda flags, _: ((flags.opened_store, flags.embeddings), {}),
    "remember": lambda flags, _: ((flags.opened_store, flags.embeddings), {}),
    "search": lambda flags, _: ((flags.embeddings, flags.search_engine), {}),
    "schedule": lambda flags, _: ((flags.opened_store,), {"timezone": flags.timezone}),
    "shell": lambda flags, backend: ((flags.folder, shell_runtime(backend)), {}),
    "file": lambda flags, _: ((flags.folder,), {}),
    "http": lambda flags, _: ((), {}),
    "data": lambda flags, _: ((flags.folder,), {}),
    "skill": lambda flags, _: ((flags.opened_store, flags.embeddings), {}),
}
"""What the constructor of each package gets."""


def open_store(place: str | None, *, must_exist: bool = False, is_written: bool = False) -> Store:
    """Return the store at a place, one for all who ask; `opened_dependencies` closes it.

    Raises:
        UsageError: the place is empty, `must_exist` and there is no such file, or `is_written` and it cannot be.
    """
    where = os.environ.get("TOOLCELL_STORE") or DEFAULT_STORE if place is None else place
    if not where.strip():
        raise UsageError(f"--store {where!r}: the path is empty; name a file, such as {DEFAULT_STORE}")
    if must_exist and where != IN_MEMORY and not where.startswith(POSTGRES_SCHEMES) and not os.path.exists(where):
        raise UsageError(f"there is no store at {where}; name another one with --store, or set TOOLCELL_STORE")
    if is_written and where != IN_MEMORY and not where.startswith(POSTGRES_SCHEMES):
        check_output_file("--store", Path(where), begins_with=b"SQLite format 3\0")
    if where not in _stores:
        _stores[where] = _store_at(where)
    return _stores[where]


def _store_at(where: str) -> Store:
    if where.startswith(POSTGRES_SCHEMES):
        from toolcell.builtin import PostgresStore

        return PostgresStore(where)
    from toolcell.builtin import SqliteStore

    return SqliteStore(where)


@asynccontextmanager
async def opened_dependencies() -> AsyncIterator[None]:
    """Open the sandboxes of shell commands. At the end, close them and what `open_store` returned."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close_stores)
        while _runtimes:
            await stack.enter_async_context(_runtimes.pop())
        yield


async def _close_stores() -> None:
    while _stores:
        await _stores.popitem()[1].close()


# toolcell tools builtin


def packages_table() -> Table:
    from toolcell.builtin.catalogue import all_packages

    shown = table("package", "tools", "needs", "install")
    for info in all_packages():
        extra = f"toolcell[{info.extra}]" if info.extra else ""
        missing = f"{extra} (missing: {', '.join(info.missing)})" if info.missing else extra
        shown.add_row(info.name, ", ".join(info.tools), ", ".join(info.needs), missing)
    return shown
