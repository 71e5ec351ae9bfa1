"""Sandboxes as hardened containers of Docker, Podman or gVisor."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "DockerBackend", "EngineClient",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.sandbox.docker.backend import DockerBackend
    from toolcell.sandbox.docker.client import EngineClient
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.sandbox.docker.backend": "DockerBackend",
            "toolcell.sandbox.docker.client": "EngineClient",
        },
    )
