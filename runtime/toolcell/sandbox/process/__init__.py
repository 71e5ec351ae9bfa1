"""The Linux process backend: one zygote per runtime, one isolated child of it per sandbox."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "AutoBackend", "TreeWatch", "probe_all",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.sandbox.process.auto_backend import AutoBackend
    from toolcell.sandbox.process.probes import probe_all
    from toolcell.sandbox.process.process_watch import TreeWatch
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.sandbox.process.auto_backend": "AutoBackend",
            "toolcell.sandbox.process.probes": "probe_all",
            "toolcell.sandbox.process.process_watch": "TreeWatch",
        },
    )
