"""What a pod must be: `pod_template` says it to Kubernetes; `memory_of` and `layers_of` read from a pod."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from toolcell.config import MIB, Limits
from toolcell.errors import UsageError
from toolcell.sandbox.kubernetes.relay import ADDRESS_FILE, DIRECTORY
from toolcell.support.checks import brief

CONTAINER: Final = "sandbox"
COMMAND: Final = ("python3", "-P", "-B", "-m", "toolcell.sandbox.kubernetes.pod_server")
RELAY: Final = ("python3", "-P", "-s", "-B", "-m", "toolcell.sandbox.kubernetes.relay")
READY: Final = ("python3", "-I", "-S", "-B", "-c", f"import os; os.stat({DIRECTORY + '/' + ADDRESS_FILE!r})")

USER: Final = 10001
SERVER_BYTES: Final = 256 * MIB
"""Memory of the server in a pod, its zygote, and what the interpreter's copy takes."""

CPU_REQUEST: Final = "100m"
START_S: Final = 120

SUFFIXES: Final = {
    "": 1, "m": Decimal("0.001"), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip


NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
IMAGE: Final = re.compile(r"[a-z0-9][a-zA-Z0-9._:/@-]{0,510}")


def check_name(what: str, text: object) -> None:
    """Check a name of an object of Kubernetes. `what`: whose it is, in the message.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(text, str) or not NAME.fullmatch(text):
        raise UsageError(f"{what} takes a name of Kubernetes (up to 253 of a-z, 0-9, - and .), not {brief(text)}")


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What the pods of a pool are made of."""

    image: str
    """As `toolcell images build --service` makes it, in a registry that the cluster reaches."""
    limits: Limits = field(default_factory=Limits)
    """The most that a run may be given."""
    sandboxes: int = 1
    """In one pod at the same time."""
    cpus: float = 1.0
    runtime_class: str | None = None


def bytes_of(quantity: object) -> int:
    """Return a quantity of Kubernetes as a number of bytes.

    Raises:
        UsageError: it is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:[eE]([0-9]{1,2}))?(m|k|[MGTP]i?|Ki)?", str(quantity))
    if found is None:
        raise UsageError(f"{str(quantity)[:40]!r} is not a quantity of Kubernetes, such as 512Mi")
    number, power, suffix = found.groups()
    return int(Decimal(number) * 10 ** int(power or 0) * SUFFIXES[suffix or ""])


def memory_for(limits: Limits, sandboxes: int) -> int:
    """Return the bytes that a pod needs for so many sandboxes: their files are in memory, too."""
    return sandboxes * (limits.memory_bytes + limits.disk_bytes) + SERVER_BYTES


def pod_template(settings: PodSettings) -> dict[str, Any]:
    """Return the template of a sandbox's pod: metadata and spec."""
    limits, count = settings.limits, settings.sandboxes
    memory = f"{-(-memory_for(limits, count) // MIB)}Mi"
    room = f"{-(-(limits.disk_bytes * count + 2 * limits.disk_bytes) // MIB)}Mi"
    environment = {"TOOLCELL_POD_ALONE": str(int(count == 1))}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": settings.image,
        "command": list(COMMAND),
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {
            "requests": {"cpu": CPU_REQUEST, "memory": memory},
            "limits": {"cpu": f"{int(settings.cpus * 1000)}m", "memory": memory},
        },
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "run", "mountPath": DIRECTORY}],
        "startupProbe": {"exec": {"command": list(READY)}, "periodSeconds": 1, "failureThreshold": START_S},
    }
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostNetwork": False,
        "hostPID": False,
        "hostIPC": False,
        "shareProcessNamespace": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 2,
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": room}},
            {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ],
    }
    if settings.runtime_class:
        spec["runtimeClassName"] = settings.runtime_class
    return {"metadata": {"labels": {"app.kubernetes.io/name": "toolcell-sandbox"}}, "spec": spec}


def sandbox_container(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the container that starts sandboxes."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    return next((each for each in containers if each.get("name") == CONTAINER), None)


def memory_of(pod: Mapping[str, Any]) -> int:
    """Return the bytes of memory that the container with the sandboxes may use; 0 if it has no limit."""
    resources = (sandbox_container(pod) or {}).get("resources") or {}
    return bytes_of((resources.get("limits") or {}).get("memory", 0))


def layers_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the layers that everything in a pod without weaknesses has from outside."""
    spec: Mapping[str, Any] = pod.get("spec") or {}
    runtime = spec.get("runtimeClassName")
    by = f" (runtime class {runtime})" if runtime else ""
    layers = {
        "pid": f"the pod's{by}",
        "mount": "a read-only image and emptyDirs",
        "ipc": f"the pod's{by}",
        "uts": f"the pod's{by}",
        "cgroup": f"the pod's: {memory_of(pod) // MIB} MiB of memory",
    }
    if spec.get("hostUsers") is False:
        layers["user"] = "the pod's"
    return layers
