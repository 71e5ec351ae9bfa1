"""Sandboxes on the nodes of a Ray cluster; tools, audit and limits stay with the caller."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "RayBackend",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.sandbox.ray.backend import RayBackend
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.sandbox.ray.backend": "RayBackend",
        },
    )
