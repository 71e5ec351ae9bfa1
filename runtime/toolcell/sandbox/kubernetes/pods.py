"""What a pod must be, as `sandbox_images/kubernetes/sandboxes.yaml` describes it, and what can be read from one.

`weaknesses` names what weakens the isolation of its sandboxes. Only what is known to be harmless is accepted: a field
that is not in a table must not be set. The fields of Kubernetes 1.37 have been read for this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from toolcell.config import MIB, Limits
from toolcell.errors import UsageError
from toolcell.support.checks import brief

MEASURED: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
"""Resources that are not devices."""
PROFILES: Final = frozenset({"runtime/default", "docker/default"})
"""Values of the annotations that older clusters read instead of fields."""
PROFILE_ANNOTATIONS: Final = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)
RUNTIME_ANNOTATIONS: Final = (
    *("io.kubernetes.cri-o.", "io.containers.", "io.katacontainers.", "dev.gvisor.", "run.oci.", "org.systemd."),
    *("k8s.v1.cni.cncf.io/networks", "v1.multus-cni.io/", "cdi.k8s.io/"),
)
"""How annotations begin by which container runtimes give devices, mounts, networks and settings."""
RUNTIME_DOMAINS: Final = ("crio.io", "cri-o.io", "nri.io", "nri.containerd.io")
"""Ends of the same, before the `/`."""

Rule = Callable[[Any], str]
"""Returns what a field must be, and nothing for a harmless value. None: the field is not set."""


def weaknesses(pod: Mapping[str, Any]) -> list[str]:
    """Return the paths of the fields of a pod that weaken the isolation of its sandboxes, with what they must be."""
    spec: Mapping[str, Any] = pod.get("spec") or {}
    own: Mapping[str, Any] = spec.get("securityContext") or {}
    found = [*_of_annotations((pod.get("metadata") or {}).get("annotations") or {})]
    found += _of_fields("", spec, SPEC, HARMLESS_IN_SPEC)
    found += _of_fields("securityContext.", own, POD_CONTEXT, HARMLESS_IN_POD_CONTEXT | CONTEXT.keys())
    found += [
        f"the volume {each.get('name')!r} must be an emptyDir"
        for each in spec.get("volumes") or ()
        if _set(each) - {"name", "emptyDir"}
    ]
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in spec.get(kind) or ():
            where = f"{kind}[{container.get('name')}]."
            found += _of_fields(where, container, CONTAINERS, HARMLESS_IN_CONTAINERS)
            inherited = {name: value for name, value in own.items() if name in CONTEXT}
            context = inherited | _given(container.get("securityContext"))
            found += _of_fields(f"{where}securityContext.", context, CONTEXT, HARMLESS_IN_CONTEXT)
    if sandbox_container(pod) is None:
        found.append(f"a container must be named {CONTAINER!r}")
    elif not memory_of(pod):
        found.append(f"containers[{CONTAINER}].resources.limits.memory must be set")
    return found


def _of_annotations(annotations: Mapping[str, Any]) -> Iterator[str]:
    for name, value in annotations.items():
        if name.startswith(PROFILE_ANNOTATIONS):
            if value not in PROFILES:
                yield f"the annotation {name} must be runtime/default"
        elif name.startswith(RUNTIME_ANNOTATIONS) or name.partition("/")[0].endswith(RUNTIME_DOMAINS):
            yield f"the annotation {name} must not be set"


def _of_fields(
    where: str, part: Mapping[str, Any], rules: Mapping[str, Rule], harmless: frozenset[str]
) -> Iterator[str]:
    for name, problem_of in rules.items():
        if problem := problem_of(part.get(name)):
            yield f"{where}{name} {problem}"
    yield from (f"{where}{name} must not be set" for name in sorted(_set(part) - rules.keys() - harmless))


def _must(is_harmless: Callable[[Any], bool], wanted: str, *, is_shown: bool = True) -> Rule:
    def problem_of(value: Any) -> str:
        if is_harmless(value):
            return ""
        return f"must {wanted}" + (f", not {brief(value)}" if is_shown and value is not None else "")

    return problem_of


def _set(part: Mapping[str, Any]) -> set[str]:
    """Return the names of fields with a value that is not the same as none. An empty object says which kind it is."""
    return {name for name, value in part.items() if value or value == {}}


def _given(part: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields that a part has, without those that are null."""
    return {name: value for name, value in (part or {}).items() if value is not None}


def _problem_of_resources(value: Any) -> str:
    given: Mapping[str, Any] = value or {}
    devices = {name for kind in ("limits", "requests") for name in given.get(kind) or ()} - MEASURED
    devices |= {str(each.get("name")) for each in given.get("claims") or ()}
    return f"must have no devices: {', '.join(sorted(devices))}" if devices else ""


def _are_ports(value: Any) -> bool:
    return all(_set(each) <= {"containerPort", "name", "protocol"} for each in value or ())


def _is_env(value: Any) -> bool:
    return all(
        _set(each) <= {"name", "value", "valueFrom"}
        and _set(each.get("valueFrom") or {}) <= {"fieldRef", "resourceFieldRef", "configMapKeyRef"}
        for each in value or ()
    )


def _are_mounts(value: Any) -> bool:
    return all(
        _set(each) <= {"name", "mountPath", "mountPropagation", "readOnly", "recursiveReadOnly", "subPath"}
        and each.get("mountPropagation") in (None, "None")
        for each in value or ()
    )


def _is_probe(value: Any) -> bool:
    """Say whether a probe asks this pod only."""
    probe = value or {}
    return not any((probe.get(kind) or {}).get("host") for kind in ("httpGet", "tcpSocket"))


def _is_id(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_selinux(value: Any) -> bool:
    return _set(value or {}) <= {"level", "type"} and (value or {}).get("type") in (None, "container_t")


SPEC: Final[dict[str, Rule]] = {
    "automountServiceAccountToken": _must(lambda value: value is False, "be false"),
    "os": _must(lambda value: not value or value == {"name": "linux"}, "be linux"),
    "resources": _problem_of_resources,
}
HARMLESS_IN_SPEC: Final = frozenset(  # objects have tables of their own
    {
        *("affinity", "nodeName", "nodeSelector", "overhead", "preemptionPolicy", "priority", "priorityClassName"),
        *("schedulerName", "schedulingGates", "schedulingGroup", "tolerations", "topologySpreadConstraints"),
        *("activeDeadlineSeconds", "evictionResponders", "readinessGates", "restartPolicy"),
        *("dnsConfig", "dnsPolicy", "enableServiceLinks", "hostAliases", "hostname", "hostnameOverride"),
        *("setHostnameAsFQDN", "subdomain", "terminationGracePeriodSeconds"),
        *("hostUsers", "imagePullSecrets", "runtimeClassName", "serviceAccount", "serviceAccountName"),
        *("containers", "initContainers", "ephemeralContainers", "securityContext", "volumes"),
    }
)
POD_CONTEXT: Final[dict[str, Rule]] = {
    "fsGroup": _must(lambda value: value is None or _is_id(value), "not be 0"),
    "supplementalGroups": _must(lambda value: all(map(_is_id, value or ())), "not have 0"),
}
HARMLESS_IN_POD_CONTEXT: Final = frozenset({"fsGroupChangePolicy", "seLinuxChangePolicy", "supplementalGroupsPolicy"})
CONTAINERS: Final[dict[str, Rule]] = {
    "env": _must(_is_env, "have no secret, only values, fields and keys of config maps", is_shown=False),
    "envFrom": _must(
        lambda value: all(_set(each) <= {"prefix", "configMapRef"} for each in value or ()),
        "have no secret, only config maps",
    ),
    "ports": _must(_are_ports, "have neither hostPort nor hostIP"),
    "resources": _problem_of_resources,
    "volumeMounts": _must(_are_mounts, "neither propagate mounts nor have subPathExpr or options"),
    **dict.fromkeys(("livenessProbe", "readinessProbe", "startupProbe"), _must(_is_probe, "not name a host")),
}
HARMLESS_IN_CONTAINERS: Final = frozenset(
    {
        *("args", "command", "image", "imagePullPolicy", "name", "workingDir"),
        *("resizePolicy", "restartPolicy", "restartPolicyRules", "terminationMessagePath", "terminationMessagePolicy"),
        "securityContext",
    }
)
CONTEXT: Final[dict[str, Rule]] = {
    "allowPrivilegeEscalation": _must(lambda value: value is False, "be false"),
    "appArmorProfile": _must(
        lambda value: _given(value) in ({}, {"type": "RuntimeDefault"}),
        "be of the type RuntimeDefault",
    ),
    "capabilities": _must(
        lambda value: _set(value or {}) == {"drop"} and "ALL" in value["drop"],
        'be {"drop": ["ALL"]}',
    ),
    "procMount": _must(lambda value: value in (None, "", "Default"), "be Default"),
    "readOnlyRootFilesystem": _must(lambda value: value is True, "be true"),
    "runAsGroup": _must(lambda value: value is None or _is_id(value), "not be 0"),
    "runAsUser": _must(_is_id, "be a number, and not 0"),
    "seLinuxOptions": _must(_is_selinux, "have no user and no role, and the type container_t if any"),
    "seccompProfile": _must(
        lambda value: _given(value) == {"type": "RuntimeDefault"},
        "be of the type RuntimeDefault",
    ),
}
HARMLESS_IN_CONTEXT: Final = frozenset({"runAsNonRoot"})


CONTAINER: Final = "sandbox"
RELAY: Final = ("python3", "-P", "-s", "-B", "-m", "toolcell.sandbox.kubernetes.relay")
SERVER_BYTES: Final = 256 * MIB
"""Memory of the server in a pod, its zygote, and what the interpreter's copy takes."""

SUFFIXES: Final = {
    "": 1, "m": Decimal("0.001"), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip


NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def check_name(what: str, text: object) -> None:
    """Check a name of an object of Kubernetes. `what`: whose it is, in the message.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(text, str) or not NAME.fullmatch(text):
        raise UsageError(f"{what} takes a name of Kubernetes (up to 253 of a-z, 0-9, - and .), not {brief(text)}")


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


def sandbox_container(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
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
