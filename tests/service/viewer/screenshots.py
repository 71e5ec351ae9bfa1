"""Make the pictures of docs/service/viewer.md: a service, some runs, and a browser.

python tests/service/viewer/screenshots.py
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))

import httpx  # noqa: E402
from PIL import Image  # noqa: E402
from playwright.sync_api import Page  # noqa: E402

from service.viewer.watching import DARK, LIGHT, SMALL, Chromium, served  # noqa: E402
from toolcell import ToolRegistry  # noqa: E402
from toolcell.service.app import create_app  # noqa: E402
from toolcell.service.config import ServiceConfig, TenantConfig  # noqa: E402

PLACE = ROOT / "docs" / "service"
MAX_BYTES = 150_000

REPORT = """# open invoices of a customer
rows = call_tool('invoices', customer={customer!r})
late = [row for row in rows if row['days'] > 30]
for row in late:
    print(row['number'], row['euros'])
set_result({{'late': len(late), 'euros': sum(row['euros'] for row in late)}})
"""
BROKEN = "# average of nothing\nrows = []\nset_result(sum(rows) / len(rows))"
ENDLESS = "# wait for ever\nwhile True:\n    pass"
GREEDY = "# too much memory\nx = bytearray(1 << 30)"
MISSING = "# a customer who is not there\nset_result(call_tool('invoices', customer='nobody'))"
REFUND = "# refund the latest invoice\nrows = call_tool('invoices', customer='ada')\nset_result(call_tool('refund', invoice=rows[-1]['number'], euros=rows[-1]['euros']))"
REMIND = "# remind late customers\nfor name in ('ada', 'bob', 'cleo'):\n    call_tool('remind', customer=name)"


def shop() -> ToolRegistry:
    """The tools of a small shop."""
    registry = ToolRegistry()

    @registry.tool
    async def invoices(customer: str) -> list[dict[str, Any]]:
        """List the open invoices of a customer, oldest first."""
        if customer == "nobody":
            raise LookupError(customer)
        return [{"number": f"{customer}-{n}", "days": 20 * n, "euros": 35 * n + 5} for n in range(1, 5)]

    @registry.tool(requires_approval=True, read_only=False)
    async def refund(invoice: str, euros: int) -> str:
        """Pay an invoice back to the customer; a person has to approve it."""
        return f"{euros} euros for {invoice}"

    @registry.tool(read_only=False)
    async def remind(customer: str) -> str:
        """Send a customer a letter about what is late."""
        return customer

    return registry


def fill(base: str) -> None:
    """Run some scripts."""
    scripts = [REPORT.format(customer=name) for name in ("ada", "bob", "cleo", "dora", "emil", "fay")]
    for code in [*scripts, BROKEN, *scripts[:4], ENDLESS, MISSING, *scripts, GREEDY, *scripts[:5]]:
        limits = {"wall_s": 0.5, "memory_bytes": 128 << 20}
        httpx.post(f"{base}/v1/execute", json={"code": code, "limits": limits}, timeout=60).raise_for_status()
    for code, options in ((REFUND, {"on_approval": "suspend"}), (REMIND, {"dry_run": True})):
        httpx.post(f"{base}/v1/execute", json={"code": code, **options}, timeout=60).raise_for_status()


def pictures(page: Page, base: str) -> None:
    """Take the large pictures."""
    shoot(page, f"{base}/", "overview")
    shoot(page, f"{base}/runs", "runs")
    page.goto(f"{base}/runs?q=open+invoices")
    page.click(".runs .title a >> nth=0")
    page.click("#call-1 summary")
    shoot(page, "", "run")
    shoot(page, f"{base}/waiting", "approvals")


def shoot(page: Page, address: str, name: str) -> None:
    """Take one picture of what fits the window."""
    if address:
        page.goto(address)
    page.wait_for_load_state("networkidle")
    path = PLACE / f"viewer-{name}.png"
    with Image.open(io.BytesIO(page.screenshot())) as taken:
        taken.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < MAX_BYTES, f"{path} has {path.stat().st_size} bytes"
    print(path.relative_to(ROOT), path.stat().st_size)


def terminal(page: Page, base: str) -> None:
    """Take the picture of a session."""
    page.goto(f"{base}/sessions")
    page.fill("[name=name]", "invoices")
    page.click("text=Open a session")
    for number, code in enumerate(
        ("rows = call_tool('invoices', customer='ada')\nlen(rows)", "[row['euros'] for row in rows]", "rows[9]")
    ):
        page.fill("textarea", code)
        page.keyboard.press("Control+Enter")
        page.locator("#terminal .entry").nth(number).locator("text=/^(ok|error) in/").wait_for()
    shoot(page, "", "session")


def main() -> None:
    """Make all pictures."""
    with tempfile.TemporaryDirectory() as folder:
        config = ServiceConfig(state=Path(folder) / "state", defaults=TenantConfig(record=Path(folder) / "runs"))
        with served(lambda port: create_app(config, registry=shop())) as base, Chromium() as chromium:
            fill(base)
            chromium.do(lambda page: pictures(page, base), **LIGHT)
            chromium.do(lambda page: terminal(page, base), **{**DARK, "viewport": {"width": 1280, "height": 620}})
            chromium.do(lambda page: shoot(page, f"{base}/runs", "small"), **{**SMALL, "color_scheme": "dark"})


if __name__ == "__main__":
    main()
