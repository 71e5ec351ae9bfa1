"""Measure how fast arrays and frames cross: into a script and back, beside pickle over a socket pair and Parquet files.

    python -m benchmarks.data_plane [--places process docker ...] [--sizes 1 10 100] [--rounds 5] [--plot FILE]

Each figure is the median of a value that goes there and comes back, as megabytes per second of both ways together. The
places are a run of the process backend, a script of a session there, and a run in a container (`docker`).
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl

from toolcell import ExecutionResult, Limits, SyncRuntime
from toolcell.sandbox.docker import DockerBackend

MB = 10**6
LIMITS = Limits(frame_bytes=256 << 20, result_bytes=256 << 20, memory_bytes=2 << 30, wall_s=60)


PACKAGES = ["numpy", "pandas", "pyarrow"]
PLACES = ("process", "session", "docker")
OTHERS = ("pickle", "Parquet")


def array(size: int) -> Any:
    """Return numbers of so many bytes."""
    return np.arange(size // 8, dtype="float64")


def frame(size: int) -> Any:
    """Return a frame of so many bytes, of two columns of numbers and one of text with 16 characters."""
    rows = size // 36
    return pd.DataFrame({"a": np.arange(rows), "b": np.arange(rows) / 3, "text": [f"{row:016}" for row in range(rows)]})


def objects(size: int) -> Any:
    """Return the same frame with a Python string for each text, as pandas keeps them where pyarrow is not installed."""
    return frame(size).astype({"text": object})


def median_s(step: Callable[[], object], rounds: int) -> float:
    """Return the median time of a step, which is made once before."""
    step()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def pickled(value: Any) -> None:
    """Send a value to a forked process and back, pickled, over a socket pair."""
    here, there = socket.socketpair()
    child = os.fork()
    if not child:
        here.close()
        with there.makefile("rwb", buffering=1 << 20) as pipe:
            pickle.dump(pickle.load(pipe), pipe, protocol=5)
        os._exit(0)
    there.close()
    with here.makefile("rwb", buffering=1 << 20) as pipe:
        pickle.dump(value, pipe, protocol=5)
        pipe.flush()
        pickle.load(pipe)
    here.close()
    os.waitpid(child, 0)


def parquet(value: Any, folder: Path) -> None:
    """Write and read a value twice, as two processes would that share a folder."""
    for name in ("there", "back"):
        path = folder / name
        made = pl.DataFrame({"a": value}) if isinstance(value, np.ndarray) else pl.from_pandas(value)
        made.write_parquet(path)
        value = pl.read_parquet(path)
        value = value["a"].to_numpy() if value.width == 1 else value.to_pandas()


def crossed(execute: Callable[..., ExecutionResult], value: Any) -> None:
    """Send a value into a script and take it back."""
    result = execute("set_result(x)", inputs={"x": value})
    assert result.ok, result.error
    result.value.native()


@contextmanager
def opened(place: str) -> Iterator[Callable[..., ExecutionResult]]:
    """Yield what runs a script in a place."""
    settings: dict[str, Any] = {}
    if place == "docker":
        settings["backend"] = DockerBackend(packages=PACKAGES, preload=PACKAGES)
    else:
        settings["packages"] = PACKAGES
    with SyncRuntime(limits=LIMITS, **settings) as runtime:
        if place != "session":
            yield runtime.execute_code
            return
        with runtime.session() as session:
            yield session.execute_code


def draw(path: Path, speeds: Mapping[str, Mapping[str, Mapping[int, float]]]) -> None:
    """Draw speeds by the kind of value, who carried it, and its size."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(speeds), figsize=(11, 4), layout="constrained", sharey=True)
    for part, (kind, lines) in zip(axes, speeds.items(), strict=True):
        for name, points in lines.items():
            part.plot(list(points), list(points.values()), ".--" if name in OTHERS else "o-", label=name)
        part.set(title=KINDS[kind][1], xlabel="MB", xscale="log", yscale="log", xticks=list(points))
        part.set_xticklabels(list(points))
        part.grid(alpha=0.3)
    axes[0].set_ylabel("MB/s, both ways together")
    axes[-1].legend()
    figure.savefig(path, metadata={"Date": None})


KINDS: dict[str, tuple[Callable[[int], Any], str]] = {
    "array": (array, "array of float64"),
    "frame": (frame, "frame, text of Arrow"),
    "objects": (objects, "frame, text as objects"),
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Measure how fast arrays and frames cross.")
    parser.add_argument("--places", nargs="*", choices=PLACES, default=["process"])
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 10, 100], metavar="MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw it, as SVG")
    options = parser.parse_args()
    names = (*options.places, *OTHERS)
    speeds: dict[str, dict[str, dict[int, float]]] = {kind: {name: {} for name in names} for kind in KINDS}
    print(f"{'MB/s':16}{''.join(f'{name:>12}' for name in names)}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = {place: stack.enter_context(opened(place)) for place in options.places}
        for kind, (make, _) in KINDS.items():
            for size in options.sizes:
                value = make(size * MB)
                steps: list[Callable[[], None]] = [partial(crossed, execute, value) for execute in places.values()]
                steps += [partial(pickled, value), partial(parquet, value, folder)]
                for name, step in zip(names, steps, strict=True):
                    speeds[kind][name][size] = 2 * size / median_s(step, options.rounds)
                print(
                    f"{kind:8}{size:>5} MB{''.join(f'{speeds[kind][name][size]:12.0f}' for name in names)}", flush=True
                )
    if options.plot is not None:
        draw(options.plot, speeds)


if __name__ == "__main__":
    main()
