"""What `KubernetesBackend` needs of a cluster: its objects, and what it makes of a pod. Needs no cluster and no client."""

from __future__ import annotations

import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgpack
import pytest
import yaml

from kubernetes_pool import FILE, pool_of
from rows import each_row
from toolcell import Limits, UsageError
from toolcell.config import MIB
from toolcell.errors import MissingPackage
from toolcell.sandbox.kubernetes.backend import KubernetesBackend
from toolcell.sandbox.kubernetes.pod_server import PodAddress
from toolcell.sandbox.kubernetes.pods import (
    CONTAINERS,
    CONTEXT,
    HARMLESS_IN_CONTAINERS,
    HARMLESS_IN_CONTEXT,
    HARMLESS_IN_POD_CONTEXT,
    HARMLESS_IN_SPEC,
    POD_CONTEXT,
    SPEC,
    bytes_of,
    layers_of,
    memory_of,
    weaknesses,
)

IMAGE = "registry.example/toolcell/service:0.1.0"
KEY = b"k" * 32


def pod(**settings: Any) -> dict[str, Any]:
    """A pod as the API server would tell it."""
    found = pool_of(IMAGE, **settings)[0]["spec"]["podTemplate"]
    return {"apiVersion": "v1", "kind": "Pod", **found, "metadata": {"name": "toolcell-1", **found["metadata"]}}


def changed(path: str, value: object) -> dict[str, Any]:
    """A pod with one field changed: `a.b.0.c`."""
    found = pod()
    *parents, last = path.split(".")
    place: Any = found["spec"]
    for each in parents:
        place = place[int(each) if isinstance(place, list) else each]
    place[int(last) if isinstance(place, list) else last] = value
    return found


@each_row("version", ["1.30", "1.33"])
@each_row("settings", [{}, {"sandboxes": 4, "runtime_class": "gvisor"}])
def test_the_objects_follow_the_schemas_of_kubernetes(version: str, settings: dict[str, Any]) -> None:
    kubernetes_validate.validate(pod(**settings), version, strict=True)
    objects = {each["kind"]: each for each in pool_of(IMAGE, **settings)}

    for kind in ("Role", "RoleBinding"):
        kubernetes_validate.validate(objects[kind], version, strict=True)
    network = objects["SandboxTemplate"]["spec"]["networkPolicy"]
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "a"}}
    kubernetes_validate.validate(policy | {"spec": {"podSelector": {}, **network}}, version, strict=True)
    assert network == {"ingress": [], "egress": []}
    reference = objects["SandboxWarmPool"]["spec"]["sandboxTemplateRef"]["name"]
    assert reference == objects["SandboxTemplate"]["metadata"]["name"]


def test_the_pods_of_the_template_have_no_weakness() -> None:
    assert weaknesses(pod()) == []
    assert weaknesses(pod(sandboxes=16, runtime_class="gvisor")) == []
    assert weaknesses(changed("initContainers", [{**pod()["spec"]["containers"][0], "name": "prepare"}])) == []
    assert "gvisor" in layers_of(pod(runtime_class="gvisor"))["pid"]
    assert layers_of(changed("hostUsers", False))["user"] == "the pod's"


@each_row(
    ("path", "value", "said"),
    [
        ("hostNetwork", True, "hostNetwork"),
        ("hostPID", True, "hostPID"),
        ("hostIPC", True, "hostIPC"),
        ("shareProcessNamespace", True, "shareProcessNamespace"),
        ("automountServiceAccountToken", None, "automountServiceAccountToken"),
        ("volumes.0", {"name": "host", "hostPath": {"path": "/"}}, "the volume 'host'"),
        ("volumes.0", {"name": "token", "projected": {}}, "the volume 'token'"),
        ("containers.0.securityContext.privileged", True, "privileged"),
        ("containers.0.securityContext.allowPrivilegeEscalation", True, "allowPrivilegeEscalation"),
        ("containers.0.securityContext.readOnlyRootFilesystem", False, "readOnlyRootFilesystem"),
        ("containers.0.securityContext.runAsUser", 0, "runAsUser"),
        ("containers.0.securityContext.capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}, "capabilities"),
        ("containers.0.securityContext.capabilities", {}, "capabilities"),
        ("containers.0.securityContext.seccompProfile", {"type": "Unconfined"}, "seccompProfile"),
        ("containers.0.securityContext", {}, "allowPrivilegeEscalation"),
        ("containers.0.resources", {}, "resources.limits.memory"),
        ("containers.0.name", "other", "must be named 'sandbox'"),
        ("containers.0.securityContext.procMount", "Unmasked", "procMount"),
        ("containers.0.securityContext.runAsGroup", 0, "runAsGroup"),
        ("containers.0.securityContext.appArmorProfile", {"type": "Unconfined"}, "appArmorProfile"),
        ("containers.0.securityContext.seLinuxOptions", {"type": "spc_t"}, "seLinuxOptions"),
        ("securityContext", {"supplementalGroups": [0]}, "supplementalGroups"),
        ("securityContext", {"fsGroup": 0}, "fsGroup"),
        ("securityContext", {"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "0"}]}, "sysctls"),
        ("containers.0.resources.limits", {"memory": "1Gi", "devices.example/kvm": 1}, "devices.example/kvm"),
        ("containers.0.env", [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}], "no secret"),
        ("containers.0.envFrom", [{"secretRef": {"name": "a"}}], "no secret"),
        ("ephemeralContainers", [{"name": "debug"}], "ephemeralContainers[debug].securityContext.runAsUser"),
        ("initContainers", [{"name": "proxy", "restartPolicy": "Always"}], "initContainers[proxy]"),
        ("initContainers", [{"name": "once", "securityContext": {"privileged": True}}], "privileged must not be set"),
        ("initContainers", [{"name": "once", "volumeDevices": [{"name": "a", "devicePath": "/d"}]}], "volumeDevices"),
        ("ephemeralContainers", [{"name": "debug", "targetContainerName": "sandbox"}], "targetContainerName"),
        ("containers.0.securityContext.runAsUser", "0", "runAsUser"),
        ("containers.0.securityContext.runAsUser", True, "runAsUser"),
        ("containers.0.securityContext.runAsGroup", "0", "runAsGroup"),
        ("containers.0.securityContext.allowPrivilegeEscalation", "false", "allowPrivilegeEscalation"),
        (
            "containers.0.securityContext.seccompProfile",
            {"type": "Localhost", "localhostProfile": "a"},
            "seccompProfile",
        ),
        ("containers.0.securityContext.appArmorProfile", {"type": "Localhost", "localhostProfile": "a"}, "appArmor"),
        ("containers.0.securityContext.seLinuxOptions", {"user": "unconfined_u"}, "seLinuxOptions"),
        ("containers.0.securityContext.windowsOptions", {"hostProcess": True}, "windowsOptions"),
        ("containers.0.securityContext.capabilities", {"drop": ["NET_RAW"]}, "capabilities"),
        ("securityContext", {"supplementalGroups": ["0"]}, "supplementalGroups"),
        ("securityContext", {"windowsOptions": {"hostProcess": True}}, "windowsOptions"),
        ("resourceClaims", [{"name": "gpu"}], "resourceClaims"),
        ("resources", {"limits": {"devices.example/kvm": 1}}, "resources"),
        ("os", {"name": "windows"}, "os"),
        ("containers.0.resources.requests", {"devices.example/kvm": 1}, "devices"),
        ("containers.0.resources.claims", [{"name": "gpu"}], "devices"),
        ("containers.0.ports", [{"containerPort": 1, "hostPort": 1}], "hostPort"),
        ("containers.0.lifecycle", {"postStart": {"exec": {"command": ["true"]}}}, "lifecycle"),
        ("containers.0.volumeDevices", [{"name": "a", "devicePath": "/d"}], "volumeDevices"),
        ("containers.0.volumeMounts.0.mountPropagation", "HostToContainer", "propagate"),
        ("containers.0.volumeMounts.0.bindMountOptions", ["exec"], "options"),
        ("containers.0.livenessProbe", {"httpGet": {"host": "169.254.169.254", "port": 80}}, "livenessProbe"),
        ("containers.0.stdin", True, "stdin"),
        ("containers.0.tty", True, "tty"),
        ("containers.0.env", [{"name": "A", "valueFrom": {"fileKeyRef": {"key": "b"}}}], "no secret"),
        ("initContainers", [{"name": "once", "envFrom": [{"secretRef": {"name": "a"}}]}], "once].envFrom"),
    ],
)
def test_each_weakness_of_a_pod_is_named(path: str, value: object, said: str) -> None:
    assert said in "; ".join(weaknesses(changed(path, value)))


@each_row(
    ("name", "value"),
    [
        ("container.apparmor.security.beta.kubernetes.io/sandbox", "unconfined"),
        ("container.apparmor.security.beta.kubernetes.io/sandbox", "localhost/any"),
        ("seccomp.security.alpha.kubernetes.io/pod", "unconfined"),
        ("container.seccomp.security.alpha.kubernetes.io/sandbox", "localhost/any"),
        ("io.kubernetes.cri-o.Devices", "/dev/kvm"),
        ("seccomp-profile.kubernetes.cri-o.io/sandbox", "registry.example/any"),
        ("cpu-quota.crio.io", "disable"),
        ("io.katacontainers.config.hypervisor.path", "/bin/any"),
        ("dev.gvisor.spec.mount.tmp.type", "bind"),
        ("org.systemd.property.SuccessAction", "'poweroff-force'"),
        ("devices.nri.io/container.sandbox", "- path: /dev/kvm"),
        ("cdi.k8s.io/gpu", "vendor.example/gpu=all"),
        ("k8s.v1.cni.cncf.io/networks", "another"),
    ],
)
def test_an_annotation_that_changes_the_isolation_is_a_weakness(name: str, value: str) -> None:
    found = pod()
    found["metadata"]["annotations"] = {name: value}
    assert name in "; ".join(weaknesses(found))
    found["metadata"]["annotations"] = {
        "container.apparmor.security.beta.kubernetes.io/sandbox": "runtime/default",
        "cni.projectcalico.org/podIP": "10.0.0.7/32",
        "k8s.v1.cni.cncf.io/network-status": "[]",
    }
    assert weaknesses(found) == []


def fields_of(kind: str) -> set[str]:
    """The fields of a type of Kubernetes, in the newest version that the schemas have."""
    schemas = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.37.0-local-strict"
    return set(json.loads((schemas / f"{kind}-v1.json").read_text(encoding="utf-8"))["properties"])


def test_every_field_is_refused_that_is_not_known_to_be_harmless() -> None:
    containers = SPEC | {"containers": None, "initContainers": None, "ephemeralContainers": None}
    for kind, path, known in (
        ("podspec", "", HARMLESS_IN_SPEC | containers.keys()),
        ("podsecuritycontext", "securityContext.", HARMLESS_IN_POD_CONTEXT | POD_CONTEXT.keys() | CONTEXT.keys()),
        ("ephemeralcontainer", "containers.0.", HARMLESS_IN_CONTAINERS | CONTAINERS.keys()),
        ("securitycontext", "containers.0.securityContext.", HARMLESS_IN_CONTEXT | CONTEXT.keys()),
    ):
        fields = fields_of(kind)
        assert len(fields) > len(fields - known) >= 2, kind
        for name in (fields - known) | {"ofTomorrow"}:
            found = pod()
            found["spec"].setdefault("securityContext", {})
            place = found["spec"]
            for each in path.split(".")[:-1]:
                place = place[int(each) if each == "0" else each]
            place[name] = True
            assert f"{name} must not be set" in "; ".join(weaknesses(found)), (kind, name)


def test_what_a_pod_says_for_all_its_containers_counts_unless_one_says_otherwise() -> None:
    found = pod()
    found["spec"]["securityContext"] = {"runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    for name in ("runAsUser", "seccompProfile"):
        del found["spec"]["containers"][0]["securityContext"][name]
    assert weaknesses(found) == []
    found["spec"]["containers"][0]["securityContext"]["runAsUser"] = 0
    assert "runAsUser" in weaknesses(found)[0]


@each_row(
    ("text", "count"),
    [("512Mi", 512 * MIB), ("1Gi", 1 << 30), ("1G", 10**9), ("1e9", 10**9), ("1500m", 1), ("1.5Gi", 3 << 29), (7, 7)],
)
def test_quantities_are_read(text: object, count: int) -> None:
    assert bytes_of(text) == count


@each_row("text", ["", "much", "1Zi", "-1", "1 Gi", "1.2.3Mi"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a quantity"):
        bytes_of(text)


def test_the_memory_of_a_pod_holds_all_its_sandboxes() -> None:
    limits = Limits(memory_bytes=100 * MIB, disk_bytes=20 * MIB)
    assert memory_of(pod(limits=limits, sandboxes=4)) >= 4 * 120 * MIB
    assert memory_of({}) == 0


def test_what_a_pod_tells_is_read_whole_or_refused() -> None:
    told = PodAddress("0.1.0", KEY)
    assert PodAddress.unpack(told.pack()) == told
    assert "kkk" not in repr(told)
    older = msgpack.packb(["0.0.9", KEY, 8443, "certificate"])
    assert PodAddress.unpack(older).version == "0.0.9"


@each_row(
    "data", [b"\x01", msgpack.packb([1, KEY]), msgpack.packb(["0.1.0", KEY]) + b"\x01", b"\xc4" + KEY, b"\xa1\xff"]
)
def test_the_error_about_a_pods_address_says_what_to_do_and_nothing_of_its_key(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not the address of a pod.* build the image again") as caught:
        PodAddress.unpack(data)
    assert f"{len(data)} bytes" in str(caught.value)
    assert "kkk" not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None  # msgpack's error would keep what it was given


def test_the_caller_may_do_what_the_backend_asks_for_and_nothing_else() -> None:
    role = next(each for each in pool_of(IMAGE) if each["kind"] == "Role")
    rights = {f"{verb} {plural}" for each in role["rules"] for plural in each["resources"] for verb in each["verbs"]}
    claims = {f"{verb} sandboxclaims" for verb in ("create", "get", "list", "watch", "patch", "delete")}
    assert rights == claims | {
        *("get sandboxwarmpools", "get sandboxes", "get pods"),
        *("create pods/exec", "get pods/exec"),
    }


def test_the_sizes_of_the_file_are_those_of_the_default_limits() -> None:
    (template, *_), changed = (
        yaml.safe_load_all(FILE.read_text(encoding="utf-8")),
        pool_of("REGISTRY/toolcell/service:0.1.0"),
    )
    assert template == changed[0]


@pytest.mark.anyio
async def test_the_client_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "k8s_agent_sandbox.async_k8s_helper", None)
    with pytest.raises(MissingPackage, match=re.escape("toolcell[kubernetes]")):
        await KubernetesBackend().open()
