"""Sandboxes in the pods of a Kubernetes cluster with agent-sandbox; tools, audit and limits stay with the caller."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = ["PodSettings", "manifests"]

if TYPE_CHECKING:
    from toolcell.sandbox.kubernetes.cluster import manifests
    from toolcell.sandbox.kubernetes.pods import PodSettings
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.sandbox.kubernetes.cluster": "manifests",
            "toolcell.sandbox.kubernetes.pods": "PodSettings",
        },
    )
