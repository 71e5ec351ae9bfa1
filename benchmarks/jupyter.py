"""Measure a kernel beside ipykernel: its start, its first cell, and each further cell `1`.

    python -m benchmarks.jupyter [--rounds 5] [--cells 50]

Each figure is the median in milliseconds, from the request to the reply, with all that the client does in between.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

from jupyter_client.manager import KernelManager

from toolcell.kernel import spec

NAMES = {"toolcell": "toolcell-benchmark", "ipykernel": "python3"}
PATIENCE_S = 120


def cell_s(client: Any) -> float:
    """Execute `1` and return how long that took."""
    began = time.perf_counter()
    client.execute_interactive("1", output_hook=lambda message: None, timeout=PATIENCE_S)
    return time.perf_counter() - began


def measure(name: str, cells: int) -> dict[str, list[float]]:
    """Start a kernel, execute cells, and end it."""
    began = time.perf_counter()
    manager = KernelManager(kernel_name=name)
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE_S)
        ready = time.perf_counter() - began
        first = cell_s(client)
        return {
            "ready": [ready],
            "ready and first cell": [ready + first],
            "cell": [cell_s(client) for _ in range(cells)],
        }
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def main() -> None:
    """Measure both, one after the other, several times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cells", type=int, default=50)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JUPYTER_DATA_DIR"] = folder
        spec.install(NAMES["toolcell"], [], for_user=True)
        found: dict[str, dict[str, list[float]]] = {each: {} for each in NAMES}
        for _ in range(given.rounds):
            for each, name in NAMES.items():
                for what, seconds in measure(name, given.cells).items():
                    found[each].setdefault(what, []).extend(seconds)
    for what in found["toolcell"]:
        print(what, *(f"{each} {1000 * statistics.median(found[each][what]):.1f} ms" for each in NAMES), sep="   ")


if __name__ == "__main__":
    main()
