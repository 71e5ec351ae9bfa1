"""Sandboxes as hardened containers of Docker, Podman or gVisor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

if TYPE_CHECKING:
    from toolcell.sandbox.docker.backend import DockerBackend

__all__ = ["DockerBackend"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, "toolcell.sandbox.docker.backend")
