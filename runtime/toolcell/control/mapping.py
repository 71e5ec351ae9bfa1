"""`Runtime.map`: one script over many inputs, every item once. `MappingRuntime` is a base of `Runtime`."""

from __future__ import annotations

from collections.abc import AsyncIterable, Collection, Iterable, Mapping, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from toolcell.control.controlled import ControlledRuntime
from toolcell.errors import UsageError
from toolcell.keywords import keywords_known
from toolcell.lifetime import Lifetime
from toolcell.results import Outcome
from toolcell.tools.checks import check_count, check_kind, check_one_of, shown

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from toolcell.control.map_stream import OnError, RunMap

OPTIONS: Final = frozenset(
    {"check_types", "clock", "context", "files", "limits", "lint", "on_approval", "preflight", "seed", "tools"}
)
"""Of `execute_code`, for every run of a map."""


class MappingRuntime(ControlledRuntime):
    """The part of a runtime that runs one script over many inputs."""

    execute_code: Any
    _lifetime: Lifetime

    def _open_tasks(self) -> TaskGroup:
        """Return where something is started that a reader began to read.

        Raises:
            Misconfigured: the runtime was closed meanwhile.
        """
        self._lifetime.check()
        return self._tasks

    @keywords_known
    def map(
        self,
        source: str,
        inputs: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        concurrency: int = 8,
        ordered: bool = True,
        retries: int = 0,
        retry_on: Collection[Outcome | str] | None = None,
        on_error: OnError = "yield",
        map_id: str | None = None,
        resume: bool = False,
        progress: bool = False,
        total: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> RunMap:
        """Run a script once for each of many inputs, and return what became of them, for `async for`.

        Shape: a `MapItem` for each input, in order or (`ordered=False`) as they end. Inputs are pulled as needed; at
        most four for each of `concurrency` are in memory. `options` are those of `execute_code` for every run.

        `retries`: how often an item is tried again whose failure was the machine's (`retry_on`: other outcomes), if its
        run provably had no effect. `on_error`: "stop" begins no more items after one that failed, "raise" raises.
        `map_id` keeps a record in the journal directory: after a crash the same call with `resume=True` carries the map
        on; what had ended is answered from the record, and no call is made twice. docs/scale.md says more.

        Raises:
            UsageError: an argument is wrong, or this runtime is not open here.
        """
        from toolcell.control.map_progress import MapProgress
        from toolcell.control.map_runs import ItemRuns
        from toolcell.control.map_stream import MapPump, RunMap

        check_count("concurrency=", concurrency, 1)
        check_count("total=", total, 0, optional=True)
        check_one_of("on_error=", on_error, ("yield", "raise", "stop"))
        for name, flag in (("ordered=", ordered), ("resume=", resume), ("progress=", progress)):
            check_kind(name, flag, bool)
        given = _checked_options(options)
        registry = self._tools(given.pop("tools", None))
        runs = ItemRuns(self, self.execute_code, source, registry, given)
        runs.try_again(retries, retry_on)
        if map_id is not None:
            runs.keep(map_id)
        elif resume:
            raise UsageError("resume= carries on a map that has a record; pass its map_id= too")
        if total is None and isinstance(inputs, Sized):
            total = len(inputs)
        bar = MapProgress(map_id or "map", total) if progress else None
        pump = MapPump(
            inputs, runs.run, runs.check_count, bar, concurrency=concurrency, ordered=ordered, on_error=on_error
        )  # fmt: skip
        return RunMap(pump, partial(runs.open, resume), self._open_tasks)


def _checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(options, Mapping | None):
        raise UsageError(f"options= takes a dict of arguments of execute_code, not {shown(options)}")
    given = dict(options or {})
    if unknown := sorted(map(str, given.keys() - OPTIONS)):
        raise UsageError(f"options= has {', '.join(unknown)}; every run of a map may have {', '.join(sorted(OPTIONS))}")
    return given
