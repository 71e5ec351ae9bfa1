"""A caller in a process of its own: `kubernetes_caller.py KUBECONFIG contract|wait JSON`: arguments of the backend."""

from __future__ import annotations

import json
import sys
from functools import partial

import anyio

from toolcell import KubernetesBackend, PoolConfig, Runtime
from toolcell.testing import check_backend

KUBECONFIG, WHAT = sys.argv[1:3]
OPTIONS = json.loads(sys.argv[3])


async def main() -> None:
    if WHAT == "contract":
        make = partial(KubernetesBackend, kubeconfig=KUBECONFIG, **OPTIONS)
        report = await check_backend(make)
        print(report, flush=True)
        return
    backend = KubernetesBackend(kubeconfig=KUBECONFIG, **OPTIONS)
    async with Runtime(backend=backend, pool=PoolConfig(warm=1)) as runtime:
        await runtime.execute_code("print('on')\nimport time\ntime.sleep(300)", on_log=say)


def say(stream: str, text: str) -> None:
    print(text, end="", flush=True)


if __name__ == "__main__":
    anyio.run(main)
