"""Sandboxes as hardened containers, of Docker, Podman or gVisor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolcell.sandbox.docker.backend import DockerBackend

__all__ = ["DockerBackend"]


def __getattr__(name: str) -> Any:
    if name == "DockerBackend":
        from toolcell.sandbox.docker.backend import DockerBackend

        return DockerBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
