"""The service in a program of yours: `create_app` is an ASGI application, asked here by a client in this process.

Needs `pip install '.[service]'`.
"""

import json
import tempfile
from pathlib import Path

from starlette.testclient import TestClient

from toolcell import Limits, ToolRegistry
from toolcell.service import ServiceConfig, TenantConfig, create_app

registry = ToolRegistry()


@registry.tool(read_only=True)
def price(item: str) -> float:
    """Return the price of an item in euros."""
    return {"tea": 3.2, "cake": 4.5}[item]


with tempfile.TemporaryDirectory() as folder:
    config = ServiceConfig(state=Path(folder) / "state", defaults=TenantConfig(limits=Limits(wall_s=5)))
    app = create_app(config, registry=registry)  # with uvicorn: uvicorn.run(app)
    with TestClient(app, base_url="http://localhost", client=("127.0.0.1", 50_000)) as client:
        script = {"code": "sum(call_tool('price', item=each) for each in items)", "inputs": {"items": ["tea", "cake"]}}
        result = client.post("/v1/execute", json=script).json()
        print(result["outcome"], result["value"], [call["name"] for call in result["calls"]])

        too_much = client.post("/v1/execute", json={"code": "1", "limits": {"wall_s": 60}})
        print(too_much.status_code, too_much.json()["detail"])

        client.post("/v1/sessions", json={"name": "notes"})
        client.post("/v1/sessions/notes/execute", json={"code": "x = 40"})
        print(json.dumps(client.post("/v1/sessions/notes/execute", json={"code": "x + 2"}).json()["value"]))
