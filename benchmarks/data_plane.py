"""Measure how fast arrays and frames cross: into a script and back, beside pickle over a socket pair and Parquet files.

    python -m benchmarks.data_plane [--backend docker] [--sizes 1 10 100] [--rounds 5]

Each figure is the median of a value that goes there and comes back, as megabytes per second of both ways together.
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl

from toolcell import Limits, SyncRuntime

MB = 10**6
LIMITS = Limits(frame_bytes=256 << 20, result_bytes=256 << 20, memory_bytes=2 << 30, wall_s=60)


def array(size: int) -> Any:
    """Return numbers of so many bytes."""
    return np.arange(size // 8, dtype="float64")


def frame(size: int) -> Any:
    """Return a frame of so many bytes, of two columns of numbers and one of text with 16 characters."""
    rows = size // 36
    return pd.DataFrame({"a": np.arange(rows), "b": np.arange(rows) / 3, "text": [f"{row:016}" for row in range(rows)]})


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


def crossed(runtime: SyncRuntime, value: Any) -> None:
    """Send a value into a script and take it back."""
    result = runtime.execute_code("set_result(x)", inputs={"x": value})
    assert result.ok, result.error
    result.value.native()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast arrays and frames cross.")
    parser.add_argument("--backend", default="process")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 10, 100])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    settings = {"packages": ["numpy", "pandas"]} if options.backend == "process" else {"backend": options.backend}
    with SyncRuntime(limits=LIMITS, **settings) as runtime, tempfile.TemporaryDirectory() as folder:
        print(f"{'':16}{options.backend:>12}{'pickle':>12}{'Parquet':>12}   MB/s")
        for kind in (array, frame):
            for size in options.sizes:
                value = kind(size * MB)
                steps: list[Callable[[], None]] = [
                    lambda value=value: crossed(runtime, value),  # type: ignore[misc]
                    lambda value=value: pickled(value),  # type: ignore[misc]
                    lambda value=value: parquet(value, Path(folder)),  # type: ignore[misc]
                ]
                speeds = [2 * size / median_s(step, options.rounds) for step in steps]
                print(f"{kind.__name__:8}{size:>5} MB{''.join(f'{speed:12.0f}' for speed in speeds)}")


if __name__ == "__main__":
    main()
