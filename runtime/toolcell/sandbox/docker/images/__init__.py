"""The images that containers are made of: naming, building and checking them."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "build", "check", "reference",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.sandbox.docker.images import build, check, reference
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {},
    )
