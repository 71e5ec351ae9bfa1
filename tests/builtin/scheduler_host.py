"""A process that makes due actions until nothing is left to do. `python scheduler_host.py STORE LEDGER`.

It says `ready`, begins at the first line of its input, and ends after the second one, which says that the other process is
dead: from then on leases count as ended. STORE is a file or a postgresql:// address with ?schema=NAME.
"""

from __future__ import annotations

import os
import random
import sys
import time

import anyio
import anyio.to_thread

from toolcell import PoolConfig, Runtime, ToolRegistry
from toolcell.builtin import PostgresStore, Scheduler, SchedulerConfig, SqliteStore, Store
from toolcell.testing import FakeBackend

LEASE_S = 3600


def store_at(place: str) -> Store:
    address, _, schema = place.partition("#")
    return PostgresStore(address, schema=schema) if schema else SqliteStore(address)


def registry(ledger: str) -> ToolRegistry:
    tools = ToolRegistry()

    @tools.tool
    async def mark(name: str) -> str:
        """Write a name into the ledger, some time after the call began and some time before it ends."""
        await anyio.sleep(random.uniform(0, 0.01))
        descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{name}\n".encode())
        os.close(descriptor)
        await anyio.sleep(random.uniform(0, 0.01))
        return name

    return tools


async def main(place: str, ledger: str) -> None:
    store = store_at(place)
    skipped = 0.0
    backend = FakeBackend()
    async with Runtime(registry(ledger), backend=backend, pool=PoolConfig(warm=0), allow_unisolated=True) as runtime:
        config = SchedulerConfig(lease_s=LEASE_S, concurrency=4)
        scheduler = Scheduler(runtime, store, config, clock=lambda: time.time() + skipped)
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        await scheduler.run_due()
        print("idle", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        await scheduler.run_due()
        skipped = LEASE_S + 100
        await scheduler.run_due()
    await store.close()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
