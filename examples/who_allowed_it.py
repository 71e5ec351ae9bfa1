"""Shows what the audit log tells when one person's script waits and another person changes and approves its call.

What did the script do, who allowed it, and where did the secret go?
"""

import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import anyio

from toolcell import RunContext, Runtime, ToolRegistry
from toolcell.audit import AuditLog, Filter, Index, RecordConfig
from toolcell.egress import Allow, Egress
from toolcell.tools import Edit

registry = ToolRegistry()


@registry.tool(requires_approval=True)
async def transfer(to: str, euros: int) -> str:
    """Send money to somebody."""
    return f"{euros} euros sent to {to}"


class Rates(BaseHTTPRequestHandler):
    """A server of exchange rates, somewhere."""

    def do_GET(self) -> None:
        body = b"1.08" if self.headers["Authorization"] == "Bearer r4tes-of-today" else b"who are you?"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


SCRIPT = """
import urllib.request
rate = float(urllib.request.urlopen(url).read())
call_tool("transfer", to="acme", euros=int(4630 * rate))
"""


async def main(path: Path, port: int) -> None:
    rule = Allow("http://127.0.0.1", ports=[port], secrets={"Authorization": "Bearer {RATES_TOKEN}"})
    egress = Egress(rule, secrets={"RATES_TOKEN": "r4tes-of-today"})
    log = AuditLog(path, config=RecordConfig(keep_s=90 * 86_400, value_bytes=1_000_000), heads=path.parent / "heads")
    async with Runtime(registry, record=log, egress=egress) as runtime:
        given, ann, bob = {"url": f"http://127.0.0.1:{port}/"}, RunContext(user_id="ann"), RunContext(user_id="bob")
        waits = await runtime.execute_code(SCRIPT, inputs=given, on_approval="suspend", context=ann)
        assert waits.suspension is not None
        (call,) = waits.suspension.calls
        decision = Edit({"to": "acme", "euros": 1}, "the contract says one euro")
        await runtime.resume(waits.suspension, {call.id: decision}, context=bob)

    with Index(path) as index:  # on the command line: toolcell audit show runs.db last
        for run in map(index.load, index.runs()):
            print(run.outcome, *(f"{label} {text}" for label, text in run.who_lines() if label != "for run"), sep=", ")
            for label, text in run.decision_lines():
                print(f"  {label} {text.partition(', at 2')[0]}")
            for each in run.calls:
                facts = (f"{label} {text}" for label, text in each.lines() if each.tool == "transfer")
                print(f"  {each.tool}", *facts, sep="\n    ")
        print("decided by bob:", [run.user for run in index.runs(Filter(decided_by="bob"))])
        print("the token went to:", [each["host"] for each in index.hosts(Filter(secret="RATES_TOKEN"))])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, HTTPServer(("127.0.0.1", 0), Rates) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        anyio.run(main, Path(folder) / "runs.db", server.server_port)
        server.shutdown()
