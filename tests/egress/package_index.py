"""An index of packages on loopback, what is in it, and a runtime whose scripts may install from it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from builtin.webkit import Site, page, serve
from toolcell import Limits, Runtime
from toolcell.egress import Egress, PackageIndex
from wheels import make_wheel


@asynccontextmanager
async def index(*wheels: Path) -> AsyncIterator[Site]:
    """Serve wheels as an index of packages does."""
    pages: dict[str, bytes] = {}
    for wheel in wheels:
        name = wheel.name.partition("-")[0].replace("_", "-")
        own = pages.get(f"/simple/{name}/", b"").partition(b"\r\n\r\n")[2].decode()
        pages[f"/simple/{name}/"] = page(own + link_to(wheel))
        pages[f"/files/{wheel.name}"] = page(wheel.read_bytes(), "application/octet-stream")
    async with serve(pages) as site:
        yield site


def link_to(wheel: Path, attributes: str = "") -> str:
    """Return what an index has of a wheel."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f'<a href="/files/{wheel.name}#sha256={digest}" {attributes}>{wheel.name}</a>'


def two_packages(folder: Path) -> list[Path]:
    """Make two packages: humanize needs tiny-pkg, and is there in two versions."""
    files = {
        "humanize/__init__.py": "import tiny_pkg\nVERSION = 4\ndef twice(): return tiny_pkg.VALUE * 2\n",
        "humanize/data.txt": "words",
        "humanize.pth": "import sys; sys.modules['evil'] = sys\n",
        "json.py": "raise ImportError('shadowed')\n",
    }
    return [
        make_wheel(folder, "tiny_pkg", "1.5", {"tiny_pkg/__init__.py": "import json\nVALUE = 7\n"}),
        make_wheel(folder, "humanize", "3.0", {"humanize/__init__.py": "VERSION = 3\n"}),
        make_wheel(folder, "humanize", "4.1", files, "Requires-Dist: tiny-pkg>=1\n"),
    ]


@asynccontextmanager
async def opened(
    wheels: Sequence[Path], *names: str, approval: bool = False, **options: Any
) -> AsyncIterator[tuple[Site, Runtime]]:
    """Open a runtime whose scripts may install these names."""
    async with index(*wheels) as site:
        egress = Egress(packages=PackageIndex(names, url=site.url("/simple/", "127.0.0.1"), approval=approval))
        async with Runtime(egress=egress, limits=Limits(wall_s=120), **options) as runtime:
            yield site, runtime
