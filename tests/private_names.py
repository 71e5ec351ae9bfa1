"""Private names of others that this project uses: a release may change them without a word.

There is no public way to what they give: the response behind a stream of `docker`, the connection of a request in the
MCP SDK, a tool of a framework that raises instead of answering.
"""

from __future__ import annotations

import re
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PRIVATE_NAMES: dict[str, dict[str, str]] = {
    "toolcell.egress.resolver_guest": {"_handle_get_simple_fail": "pip pip/_internal/index/collector.py"},
    "toolcell.integrations.google_adk": {"_require_confirmation": "google-adk google/adk/tools/function_tool.py"},
    "toolcell.integrations.langchain": {"_run": "langchain-core langchain_core/tools/base.py"},
    "toolcell.integrations.openai_agents": {
        "_failure_error_function": "openai-agents agents/tool.py",
        "_use_default_failure_error_function": "openai-agents agents/tool.py",
    },
    "toolcell.kernel.kernel": {
        "_get_shell_context_var": "ipykernel ipykernel/kernelbase.py",
        "_main_asyncio_lock": "ipykernel ipykernel/kernelbase.py",
        "_shell_parent_ident": "ipykernel ipykernel/kernelbase.py",
    },
    "toolcell.mcp.login": {"_initialize": "mcp mcp/client/auth/oauth2.py"},
    "toolcell.mcp.server": {"_connection": "mcp mcp/server/session.py"},
    "toolcell.sandbox.docker.attach": {"_response": "docker docker/api/client.py"},
    "toolcell.sandbox.docker.container": {"_response": "docker docker/types/daemon.py"},
    "toolcell.sandbox.process.root_filesystem": {"_base_executable": "python venv/__init__.py"},
    "toolcell.support.daemon_threads": {"_daemonic": "python threading.py"},
    "toolcell.support.event_loop": {"_parent_cancel_requested": "python asyncio/taskgroups.py"},
    "toolcell.support.waiting_threads": {"anyio._core._eventloop": "anyio anyio/_core/_eventloop.py"},
}
"""By module of ours: each name, and the release and file in which it stands."""

OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "ipykernel ipykernel/kernelbase.py": ("_abort_queues", "_send_interrupt_children"),
    "mcp mcp/client/auth/oauth2.py": ("_perform_authorization", "_refresh_token", "_select_authorization_server"),
}
"""Private methods that classes of ours replace."""


def missing_private_names() -> list[str]:
    """Return the names that the installed releases do not have. A framework that is not installed has all."""
    used = [(place, name) for names in PRIVATE_NAMES.values() for name, place in names.items()]
    used += [(place, name) for place, names in OVERRIDDEN.items() for name in names]
    return [found for place, name in used if (found := _problem(place, name.rpartition(".")[2]))]


def _problem(place: str, name: str) -> str:
    package, file = place.split()
    try:
        root = sysconfig.get_path("stdlib") if package == "python" else str(distribution(package).locate_file(""))
    except PackageNotFoundError:
        return ""
    path = Path(root, file)
    if path.is_file() and (name == path.stem or re.search(rf"\b{re.escape(name)}\b", path.read_text("utf-8"))):
        return ""
    return f"{name} in {file} of {package} {'' if package == 'python' else distribution(package).version}"
