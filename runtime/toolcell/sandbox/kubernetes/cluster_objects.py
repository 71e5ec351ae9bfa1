"""What a cluster needs before `KubernetesBackend` can use it: template, warm pool, and the rights of the caller."""

from __future__ import annotations

from typing import Any

from toolcell.errors import MissingPackage
from toolcell.sandbox.kubernetes.cluster import CLAIMS, GROUP, POOLS, VERSION
from toolcell.sandbox.kubernetes.pods import CALLER_LABEL, PodSettings, pod_template

RBAC = "rbac.authorization.k8s.io"


def manifests(
    settings: PodSettings,
    *,
    pool: str = "toolcell",
    namespace: str = "default",
    replicas: int = 2,
    service_account: str = "default",
) -> list[dict[str, Any]]:
    """Return the objects. `service_account`: of the caller, in the same namespace."""
    metadata = {"name": pool, "namespace": namespace}
    return [
        {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "SandboxTemplate",
            "metadata": metadata,
            "spec": {
                "podTemplate": pod_template(settings),
                "networkPolicyManagement": "Managed",
                "networkPolicy": _network(settings),
                "envVarsInjectionPolicy": "Disallowed",
            },
        },
        {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "SandboxWarmPool",
            "metadata": metadata,
            "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": pool}},
        },
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "Role",
            "metadata": {"name": f"{pool}-caller", "namespace": namespace},
            "rules": [
                _rule(GROUP, CLAIMS, "create", "get", "list", "watch", "patch", "delete"),
                _rule(GROUP, POOLS, "get"),
                _rule("agents.x-k8s.io", "sandboxes", "get"),
                _rule("", "pods", "get"),
                _rule("", "pods/exec", "create", "get"),
            ],
        },
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": f"{pool}-caller", "namespace": namespace},
            "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": f"{pool}-caller"},
            "subjects": [{"kind": "ServiceAccount", "name": service_account, "namespace": namespace}],
        },
    ]


def _network(settings: PodSettings) -> dict[str, Any]:
    """Nothing goes out. Only callers come in, and only where the pods listen."""
    if not settings.port:
        return {"ingress": [], "egress": []}
    caller = {"podSelector": {"matchLabels": {CALLER_LABEL: "true"}}}
    return {"ingress": [{"from": [caller], "ports": [{"protocol": "TCP", "port": settings.port}]}], "egress": []}


def _rule(group: str, resource: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}


def to_yaml(objects: list[dict[str, Any]]) -> str:
    """Return objects as kubectl reads them.

    Raises:
        MissingPackage: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as exc:
        raise MissingPackage("manifests need PyYAML: pip install 'toolcell[kubernetes]'") from exc
    text: str = yaml.safe_dump_all(objects, sort_keys=False)
    return text
