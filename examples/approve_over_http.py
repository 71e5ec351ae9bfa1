"""Shows approval over HTTP: one process takes the script and ends, another one approves and carries it on, hours later.

Serve it: `RECORD=runs.db uvicorn approve_over_http:app`. Needs `pip install fastapi httpx uvicorn`.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from pydantic import BaseModel

from toolcell import ExecutionResult, ResumeError, Runtime, ToolRegistry
from toolcell.tools import Approve, Deny

registry = ToolRegistry()


@registry.tool(requires_approval=True)
async def transfer(to: str, euros: int) -> str:
    """Send money to somebody."""
    return f"{euros} euros sent to {to} by process {os.getpid()}"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with Runtime(registry, record=os.environ["RECORD"]) as app.state.runtime:
        yield


app = FastAPI(lifespan=lifespan)


class Script(BaseModel):
    code: str


def shown(result: ExecutionResult) -> dict[str, Any]:
    return {"outcome": result.outcome, "value": result.value, "error": result.error and result.error.message}


@app.post("/runs")
async def run(script: Script) -> dict[str, Any]:
    return shown(await app.state.runtime.execute_code(script.code, on_approval="suspend"))


@app.get("/approvals")
async def waiting() -> list[dict[str, Any]]:
    return [
        {"run": run.run_id, "call": call.id, "tool": call.tool, "args": call.args}
        for run in app.state.runtime.suspended_runs()
        for call in run.calls
    ]


@app.post("/approvals/{run}")
async def decide(run: str, approved: dict[str, bool]) -> dict[str, Any]:
    found = [each for each in app.state.runtime.suspended_runs() if each.run_id == run]
    if not found:
        raise HTTPException(404, f"no run {run} waits")
    try:
        decisions = {call: Approve() if yes else Deny("not approved") for call, yes in approved.items()}
        return shown(await app.state.runtime.resume(found[0], decisions))
    except ResumeError as exc:  # somebody else was faster
        raise HTTPException(409, str(exc)) from exc


def submit() -> None:
    with TestClient(app) as client:
        print(client.post("/runs", json={"code": "call_tool('transfer', to='ada', euros=40)"}).json())


def approve() -> None:
    with TestClient(app) as client:
        (call,) = client.get("/approvals").json()
        print("waits:", call)
        answer = client.post(f"/approvals/{call['run']}", json={call["call"]: True})
        print(answer.json(), "in process", os.getpid())
        assert answer.json()["value"] == f"40 euros sent to ada by process {os.getpid()}"
        assert client.post(f"/approvals/{call['run']}", json={}).status_code == 404


if __name__ == "__main__":
    if len(sys.argv) > 1:
        submit()
    else:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["RECORD"] = f"{folder}/runs.db"
            subprocess.run([sys.executable, __file__, "submit"], check=True)
            approve()
