"""Backends that start sandboxes, the pool that keeps them warm, and what is read out of them.

Knows limits and layers; knows nothing of tools, registries or what a script is for.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "Backend", "ByteStream", "Exit", "Sample", "Sandbox", "SocketStream",
    "prepare_packages", "read_available", "use_package_index",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.sandbox.backend import Backend, ByteStream, Exit, Sample, Sandbox
    from toolcell.sandbox.environment import prepare_packages
    from toolcell.sandbox.process.package_sources import use_package_index
    from toolcell.sandbox.stream import SocketStream, read_available
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.sandbox.backend": "Backend Backend ByteStream Exit Sample Sandbox Sandbox",
            "toolcell.sandbox.environment": "prepare_packages",
            "toolcell.sandbox.process.package_sources": "use_package_index",
            "toolcell.sandbox.stream": "SocketStream read_available",
        },
    )
