"""Shows sandboxes in pods of a Kubernetes cluster with agent-sandbox: the same program with another backend.

Before it: `kubectl apply -f sandbox_images/kubernetes/sandboxes.yaml`, with your image in it. The tools run here.
"""

import anyio

from toolcell import KubernetesBackend, PoolConfig, Runtime, ToolRegistry

registry = ToolRegistry()


@registry.tool(read_only=True)
async def price(item: str) -> int:
    """Return the price of an item in cents."""
    return 100 * len(item)


SCRIPT = "call_tool('price', item=item)"


async def main() -> None:
    async with Runtime(registry, backend=KubernetesBackend(), pool=PoolConfig(warm=2)) as runtime:
        items = [item async for item in runtime.map(SCRIPT, [{"item": name} for name in ("tea", "kettle", "samovar")])]
        print([item.value for item in items])
        print(f"isolation: {', '.join(sorted(items[0].result.isolation.layers))}")


anyio.run(main)
