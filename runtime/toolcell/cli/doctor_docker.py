"""The Docker part of `toolcell doctor`: engine, runtimes, images, and how to get what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from toolcell.cli.engine import GET_ENGINE, engine, host
from toolcell.errors import SandboxUnavailable

if TYPE_CHECKING:
    from toolcell.sandbox.docker import EngineClient
    from toolcell.sandbox.docker.images import reference

GET_GVISOR = (
    'install runsc, add {"runtimes": {"runsc": {"path": "/usr/bin/runsc", "runtimeArgs": ["--platform=ptrace", '
    '"--network=none"]}}} to /etc/docker/daemon.json, and have the daemon reload it (kill -HUP)'
)

NEEDED: dict[str, tuple[str, str]] = {
    "MemoryLimit": ("the engine cannot limit memory", "boot with the memory cgroup (cgroup_enable=memory)"),
    "SwapLimit": ("the engine cannot limit swap", "boot with swapaccount=1, or run without swap"),
    "PidsLimit": ("the engine cannot limit processes", "boot a kernel with the pids cgroup"),
}
"""Fields of GET /info. For each one: what it means when it is false, and the remedy."""


def examine() -> dict[str, Any]:
    """Describe the engine, if there is one. It is optional: the process backend needs none."""
    try:
        with engine() as client:
            from toolcell.sandbox.docker.images import reference

            return describe(host(), client, reference.list_images(client))
    except SandboxUnavailable as exc:
        return no_engine(host(), str(exc))


def no_engine(where: str, why: str) -> dict[str, Any]:
    """Describe a missing engine. `why` ends with the remedy, which need not be to install an engine."""
    what = why.removesuffix(f": {GET_ENGINE}")
    return {"host": where, "daemon": None, "missing": [{"what": what, "fix": GET_ENGINE if what != why else ""}]}


def describe(where: str, client: EngineClient, found: Sequence[reference.ImageRef]) -> dict[str, Any]:
    """Describe an engine and what sandboxes miss in it."""
    info = client.info
    return {
        "host": where,
        "daemon": f"{'Podman' if info.is_podman else 'Docker'} {info.version}",
        "api": info.api_version,
        "cgroups": f"v{info.cgroup_version} ({info.cgroup_driver})",
        "storage": info.storage_driver,
        "runtimes": list(info.runtimes),
        "default_runtime": info.default_runtime,
        "security": list(info.security),
        "images": [
            {"tag": each.tag, "guest": each.guest_version, "current": each.is_current, "size_bytes": each.size_bytes}
            for each in found
        ],
        "missing": [{"what": what, "fix": fix} for what, fix in missing(client, found)],
    }


def missing(client: EngineClient, found: Sequence[reference.ImageRef]) -> list[tuple[str, str]]:
    from toolcell.sandbox.docker.images import reference

    info = client.info
    wanted = [NEEDED[name] for name in info.cannot_limit]
    if not any("seccomp" in each for each in info.security):
        wanted.append(("the engine has no seccomp", "boot a kernel with CONFIG_SECCOMP_FILTER"))
    if not info.has_init:
        wanted.append(("the engine has no init for containers", "install tini (Debian: apt install tini)"))
    if not any(each.tag == reference.DEFAULT_IMAGE for each in found):
        wanted.append((f"no image {reference.DEFAULT_IMAGE}", reference.HOW_TO_BUILD))
    if stale := [each.tag for each in found if not each.is_current and not _is_derived(each.tag)]:
        wanted.append((f"another installation's guest in {', '.join(stale)}", reference.HOW_TO_BUILD))
    if "runsc" not in info.runtimes:
        wanted.append(("no gVisor", GET_GVISOR))
    return wanted


def lines(docker: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the description as headings and text."""
    if docker["daemon"] is None:
        return [("docker", f"no engine at {docker['host']}")]
    runtimes = [f"{name} (default)" if name == docker["default_runtime"] else name for name in docker["runtimes"]]
    images = [
        f"{each['tag']} ({decimal(each['size_bytes'])})" for each in docker["images"] if not _is_derived(each["tag"])
    ]
    if derived := [each["size_bytes"] for each in docker["images"] if _is_derived(each["tag"])]:
        images.append(f"{len(derived)} with packages ({decimal(sum(derived))}): toolcell images list")
    return [
        ("docker", f"{docker['daemon']}, API {docker['api']}, at {docker['host']}"),
        ("  cgroups", docker["cgroups"]),
        ("  storage", docker["storage"]),
        ("  runtimes", ", ".join(runtimes)),
        ("  images", ", ".join(images) or "none"),
    ]


def _is_derived(tag: str) -> bool:
    """Say whether a runtime made this image for its packages. It is made again when the guest has changed."""
    from toolcell.sandbox.docker.images import reference

    return tag.startswith(f"{reference.DERIVED_REPOSITORY}:")
