"""Shows the same through the service: ann's script waits, bob edits and approves its call, and the record tells it all.

Needs `pip install '.[service]'`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from starlette.testclient import TestClient

from toolcell import ToolRegistry
from toolcell.audit import RecordConfig
from toolcell.service import ServiceConfig, TenantConfig, create_app

registry = ToolRegistry()


@registry.tool(requires_approval=True)
def transfer(to: str, euros: int) -> str:
    """Send money to somebody."""
    return f"{euros} euros sent to {to}"


def new_token(store: Path, name: str) -> str:
    scopes = [word for scope in ("execute", "read", "approve") for word in ("--scope", scope)]
    command = [sys.executable, "-m", "toolcell", "tokens", "create", "acme", "--tokens", str(store), "--name", name]
    return subprocess.run([*command, *scopes], capture_output=True, text=True, check=True).stdout.strip()


with tempfile.TemporaryDirectory() as folder:
    home = Path(folder)
    ann, bob = ({"authorization": f"Bearer {new_token(home / 'tokens.db', name)}"} for name in ("ann", "bob"))
    tenant = TenantConfig(
        record=home / "records", record_config=RecordConfig(keep_s=90 * 86_400, value_bytes=1_000_000)
    )
    config = ServiceConfig(state=home / "state", tokens=home / "tokens.db", defaults=tenant)
    with TestClient(create_app(config, registry=registry), base_url="http://localhost") as client:
        script = {"code": "call_tool('transfer', to='acme', euros=5000)", "on_approval": "suspend"}
        waits = client.post("/v1/execute", json=script, headers=ann).json()["suspension"]
        decision = {"decision": "edit", "args": {"to": "acme", "euros": 1}, "reason": "the contract says one euro"}
        decided = {"decisions": {waits["calls"][0]["id"]: decision}}
        client.post(f"/v1/suspended/{waits['run_id']}/decide", json=decided, headers=bob)

        for run in client.get("/v1/runs?decided_by=bob", headers=ann).json()["runs"]:
            record = client.get(f"/v1/runs/{run['id']}", headers=ann).json()
            print(record["start"]["who"]["user"], "asked,", record["start"]["who"]["decided_by"], "decided")
            for call in record["calls"]:
                print("sent", call["args"], "decided", call["decided"], "made", call["made"], "->", call["value"])
            for each in record["runs"]:
                print(each["outcome"], each["relation"] or "", each["parent"] or "")
