"""Shows a web app: one runtime for the app's life, one sandbox per request. Serve it: `uvicorn fastapi_app:app`.

Needs `pip install fastapi httpx uvicorn`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Response
from fastapi.testclient import TestClient
from pydantic import BaseModel

from toolcell import Limits, Runtime, ToolRegistry

registry = ToolRegistry()


@registry.tool
async def price_of(article: str) -> float:
    """Return the price of an article in euros."""
    return {"pen": 2.5, "book": 12.0}[article]


runtime = Runtime(registry, limits=Limits(wall_s=10))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    await runtime.open()
    yield
    await runtime.close()


app = FastAPI(lifespan=lifespan)


class Script(BaseModel):
    code: str
    inputs: dict[str, Any] = {}


@app.post("/run")
async def run(script: Script) -> Response:
    result = await runtime.execute_code(script.code, inputs=script.inputs)
    return Response(result.to_json(), media_type="application/json")


if __name__ == "__main__":
    with TestClient(app) as client:
        code = "sum(call_tool('price_of', article=a) * n for a, n in order.items())"
        answer = client.post("/run", json={"code": code, "inputs": {"order": {"pen": 2, "book": 1}}}).json()
        print(answer["outcome"], answer["value"], [call["name"] for call in answer["calls"]])
        assert answer["value"] == 17.0
        assert client.post("/run", json={"code": "open('/etc/shadow')"}).json()["outcome"] == "error"
