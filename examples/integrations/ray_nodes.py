"""Shows sandboxes on a Ray cluster: the same program with another backend. The tools run here."""

import anyio
import ray
from ray.cluster_utils import Cluster

from toolcell import PoolConfig, RayBackend, Runtime, ToolRegistry

registry = ToolRegistry()


@registry.tool(read_only=True)
async def price(item: str) -> int:
    """Return the price of an item in cents."""
    return 100 * len(item)


SCRIPT = "{'item': item, 'cents': call_tool('price', item=item)}"


async def main() -> None:
    backend = RayBackend(sandboxes_per_node=8)
    async with Runtime(registry, backend=backend, pool=PoolConfig(warm=3)) as runtime:
        items = [item async for item in runtime.map(SCRIPT, [{"item": name} for name in ("tea", "kettle", "samovar")])]
        print([item.value for item in items])
        print(f"{len(backend.nodes)} nodes, isolation: {', '.join(sorted(items[0].result.isolation.layers))}")


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)  # on a real cluster: RayBackend("auto") is enough
anyio.run(main)
ray.shutdown()
cluster.shutdown()
