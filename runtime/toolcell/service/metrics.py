"""`Metrics`: what a service has done and does now, for Prometheus.

Every sample but those of the host has the label `tenant`: a tenant is shown its own and nobody else's. Names of tools,
sessions and subjects are not labels: a caller could invent any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from toolcell.control import PlanRows
from toolcell.results import ExecutionResult
from toolcell.runtime import Runtime

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of the histograms."""

GAUGES: Final = {
    "requests_running": "Requests that have a place.",
    "requests_waiting": "Requests that wait for a place.",
    "sandboxes_idle": "Sandboxes that wait for a script.",
    "sandboxes_busy": "Sandboxes that run a script or belong to a session.",
    "sandboxes_starting": "Sandboxes that are being started.",
    "sessions_open": "Sessions that are open.",
}


States = Callable[[], Iterable[tuple[str, Sequence[int]]]]
"""Returns every open tenant with what it has now, in the order of `GAUGES`."""


class Metrics:
    """Counts what ends in the runtimes that it watches, and asks `states` for what there is now."""

    def __init__(self, states: States) -> None:
        self._registry = registry = CollectorRegistry()
        tenant = ("tenant",)
        self._runs = Counter(
            "toolcell_runs", "Scripts that ended, by outcome.", ("tenant", "outcome"), registry=registry
        )
        self._limits = Counter(
            "toolcell_limits_hit", "Runs that a limit ended, by limit.", ("tenant", "limit"), registry=registry
        )
        self._calls = Counter("toolcell_calls", "Tool calls, by status.", ("tenant", "status"), registry=registry)
        self._plans = Counter("toolcell_plans", "Plans that ended.", tenant, registry=registry)
        self._seconds = Histogram(
            "toolcell_run_seconds", "How long scripts ran.", tenant, buckets=SECONDS, registry=registry
        )
        self._start = Histogram(
            "toolcell_start_seconds",
            "How long runs waited for their sandbox.",
            tenant,
            buckets=SECONDS,
            registry=registry,
        )
        self._cpu = Counter("toolcell_cpu_seconds", "Processor time of sandboxes.", tenant, registry=registry)
        registry.register(_States(states))
        registry.register(_Host())

    def watch(self, tenant: str, runtime: Runtime) -> None:
        def count(result: ExecutionResult | PlanRows) -> None:
            if isinstance(result, ExecutionResult):
                self._count_run(tenant, result)
            else:
                self._plans.labels(tenant).inc()
                self._count_calls(tenant, (row["status"] for row in result))

        runtime.on_end = count

    def text(self, tenant: str | None) -> bytes:
        """Return the metrics of one tenant, or with None those of all.

        Source: Prometheus text exposition format 0.0.4.
        """
        return generate_latest(self._registry if tenant is None else _OfTenant(self._registry, tenant))

    def _count_run(self, tenant: str, result: ExecutionResult) -> None:
        self._runs.labels(tenant, str(result.outcome)).inc()
        if result.error is not None and result.error.limit is not None:
            self._limits.labels(tenant, result.error.limit).inc()
        self._seconds.labels(tenant).observe(result.usage.wall_s)
        self._start.labels(tenant).observe(result.usage.start_s)
        self._cpu.labels(tenant).inc(max(0.0, result.usage.cpu_s))
        self._count_calls(tenant, (call.status for call in result.calls))

    def _count_calls(self, tenant: str, statuses: Iterable[str]) -> None:
        for status in statuses:
            self._calls.labels(tenant, status).inc()


class _States(Collector):
    """Gauges of what every tenant has at the moment of asking."""

    def __init__(self, states: States) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        """Return one family for each gauge."""
        families = [GaugeMetricFamily(f"toolcell_{name}", about, labels=["tenant"]) for name, about in GAUGES.items()]
        for tenant, state in self._states():
            for family, value in zip(families, state, strict=True):
                family.add_metric([tenant], value)
        yield from families


class _Host(Collector):
    """Gauges of the machine, at the moment of asking."""

    def collect(self) -> Iterator[Metric]:
        """Return one family for each gauge."""
        memory, load = psutil.virtual_memory(), psutil.getloadavg()[0]
        yield GaugeMetricFamily("toolcell_host_memory_bytes", "Memory of the machine.", memory.total)
        yield GaugeMetricFamily("toolcell_host_memory_available_bytes", "Memory that is left.", memory.available)
        yield GaugeMetricFamily("toolcell_host_load", "Processes that want to run, over the last minute.", load)


class _OfTenant(CollectorRegistry):
    """A view on a registry: the samples of one tenant."""

    def __init__(self, whole: CollectorRegistry, tenant: str) -> None:
        super().__init__()
        self._whole, self._tenant = whole, tenant

    def collect(self) -> Iterator[Metric]:
        """Return the families that have samples of the tenant, with those alone."""
        for family in self._whole.collect():
            own = [sample for sample in family.samples if sample.labels.get("tenant") == self._tenant]
            if own:
                shown = Metric(family.name, family.documentation, family.type, family.unit)
                shown.samples = own
                yield shown
