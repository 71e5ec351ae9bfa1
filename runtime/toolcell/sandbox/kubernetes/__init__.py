"""Sandboxes in the pods of a Kubernetes cluster with agent-sandbox; tools, audit and limits stay with the caller."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "IMAGE", "KubernetesBackend", "PodSettings", "check_name", "manifests", "to_yaml",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.sandbox.kubernetes.backend import KubernetesBackend
    from toolcell.sandbox.kubernetes.cluster import manifests, to_yaml
    from toolcell.sandbox.kubernetes.pods import IMAGE, PodSettings, check_name
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.sandbox.kubernetes.backend": "KubernetesBackend",
            "toolcell.sandbox.kubernetes.cluster": "manifests to_yaml",
            "toolcell.sandbox.kubernetes.pods": "IMAGE PodSettings check_name",
        },
    )
