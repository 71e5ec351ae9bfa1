"""What a pod must be: `pod_template` says it to Kubernetes; `weaknesses` and `layers_of` read it from a pod."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from toolcell.config import MIB, Limits
from toolcell.errors import UsageError
from toolcell.sandbox.kubernetes.relay import ADDRESS_FILE, DIRECTORY
from toolcell.tools.checks import brief

CONTAINER: Final = "sandbox"
COMMAND: Final = ("python3", "-P", "-B", "-m", "toolcell.sandbox.kubernetes.pod_server")
RELAY: Final = ("python3", "-P", "-s", "-B", "-m", "toolcell.sandbox.kubernetes.relay")
READY: Final = ("python3", "-I", "-S", "-B", "-c", f"import os; os.stat({DIRECTORY + '/' + ADDRESS_FILE!r})")

USER: Final = 10001
SERVER_BYTES: Final = 256 * MIB
"""Of the server in a pod, its zygote, and what the interpreter's copy takes."""

CPU_REQUEST: Final = "100m"
START_S: Final = 120
CALLER_LABEL: Final = "toolcell-caller"
"""Pods with this label, "true", may connect to sandboxes' pods, where these listen."""

UNCONFINED: Final = frozenset({"spc_t", "unconfined_t"})
"""Types of SELinux that confine nothing."""

MEASURED: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
"""Resources that are no devices."""

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
    port: int = 0
    """0: callers come through the API server only."""


def bytes_of(quantity: object) -> int:
    """Return a quantity of Kubernetes as a number of bytes.

    Raises:
        UsageError: it is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:[eE]([0-9]{1,2}))?(m|k|[MGTP]i?|Ki)?", str(quantity))
    if found is None:
        raise UsageError(f"{str(quantity)[:40]!r} is no quantity of Kubernetes, such as 512Mi")
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
    environment = {"TOOLCELL_POD_PORT": str(settings.port), "TOOLCELL_POD_ALONE": str(int(count == 1))}
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
    if settings.port:
        container["ports"] = [{"name": "sandboxes", "containerPort": settings.port}]
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


def weaknesses(pod: Mapping[str, Any]) -> list[str]:
    """Return what in a pod weakens the isolation of its sandboxes, as the paths of fields with what they should be."""
    spec: Mapping[str, Any] = pod.get("spec") or {}
    found = [f"{name} must not be true" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    if spec.get("shareProcessNamespace"):
        found.append("shareProcessNamespace must not be true")
    if spec.get("automountServiceAccountToken") is not False:
        found.append("automountServiceAccountToken must be false")
    allowed = {"emptyDir", "name"}
    found += [
        f"the volume {each.get('name')!r} must be an emptyDir"
        for each in spec.get("volumes") or ()
        if each.keys() - allowed
    ]
    own: Mapping[str, Any] = spec.get("securityContext") or {}
    beside = [each for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always"]
    for container in [*(spec.get("containers") or ()), *beside, *(spec.get("ephemeralContainers") or ())]:
        where = f"containers[{container.get('name')}].securityContext"
        found += [f"{where}.{each}" for each in _weaknesses_of({**own, **(container.get("securityContext") or {})})]
    found += ["securityContext.sysctls must be empty"] if own.get("sysctls") else []
    container = sandbox_container(pod)
    if container is None:
        return [*found, f"a container must be named {CONTAINER!r}"]
    where = f"containers[{CONTAINER}]"
    if not memory_of(pod):
        found.append(f"{where}.resources.limits.memory must be set")
    if devices := sorted(((container.get("resources") or {}).get("limits") or {}).keys() - MEASURED):
        found.append(f"{where}.resources.limits must have no devices: {', '.join(devices)}")
    sources = [each.get("valueFrom") or {} for each in container.get("env") or ()]
    sources += container.get("envFrom") or ()
    if any(each.keys() & {"secretKeyRef", "secretRef"} for each in sources):
        found.append(f"{where}.env must have no secret")
    return found


def _weaknesses_of(context: Mapping[str, Any]) -> list[str]:
    found = []
    if context.get("privileged"):
        found.append("privileged must not be true")
    if context.get("allowPrivilegeEscalation") is not False:
        found.append("allowPrivilegeEscalation must be false")
    if context.get("readOnlyRootFilesystem") is not True:
        found.append("readOnlyRootFilesystem must be true")
    if not context.get("runAsUser"):
        found.append("runAsUser must be set, and not 0")
    capabilities: Mapping[str, Sequence[str]] = context.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or ()) or capabilities.get("add"):
        found.append('capabilities must be {"drop": ["ALL"]}')
    if context.get("procMount", "Default") != "Default":
        found.append("procMount must be Default")
    found += [f"{name} must not be 0" for name in ("runAsGroup", "fsGroup") if context.get(name) == 0]
    if 0 in (context.get("supplementalGroups") or ()):
        found.append("supplementalGroups must not have 0")
    if (context.get("appArmorProfile") or {}).get("type") == "Unconfined":
        found.append("appArmorProfile.type must not be Unconfined")
    if (context.get("seLinuxOptions") or {}).get("type") in UNCONFINED:
        found.append(f"seLinuxOptions.type must not be {context['seLinuxOptions']['type']}")
    if (context.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
        found.append("seccompProfile.type must be RuntimeDefault or Localhost")
    return found


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
