"""The profiles in `toolcell doctor`: whether a script runs in each, and the exact flag or field that is missing."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, get_args

from toolcell.config import Policy, PoolConfig, Profile
from toolcell.errors import ToolcellError

CHOOSE = {
    "full": "the default",
    "container": 'choose it with Policy(profile="container") or --profile container',
    "auto": 'the strongest that runs here: Policy(profile="auto"), and what commands choose',
}

FULL_AS_ROOT = (
    "docker run --cap-add SYS_ADMIN --security-opt seccomp=unconfined, and on a host with AppArmor --security-opt "
    "apparmor=unconfined",
    "Kubernetes securityContext: capabilities.add: [SYS_ADMIN], seccompProfile.type: Unconfined, "
    "appArmorProfile.type: Unconfined",
    "CI: the same flags in GitHub's container.options, or cap_add and security_opt in GitLab's [runners.docker]",
)

FULL_AS_USER = (
    "docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined, and --security-opt "
    "apparmor=unconfined on a host with AppArmor",
    "Kubernetes securityContext: procMount: Unmasked, with hostUsers: false in the pod, seccompProfile.type: "
    "Unconfined, appArmorProfile.type: Unconfined",
    "CI: the same flags in GitHub's container.options, or security_opt in GitLab's [runners.docker]; on a runner "
    "without a container: sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0",
)

LANDLOCK_DENIED = (
    "docker run: an engine of version 23 or newer (Debian's 20.10.24 has it too) allows the landlock calls by default; "
    "with an older one --security-opt seccomp=unconfined",
    "Kubernetes securityContext: seccompProfile.type: RuntimeDefault with containerd 1.6 or newer, else Unconfined",
)


def examine(required: Mapping[Profile, Collection[str]]) -> list[dict[str, Any]]:
    """Run a script in every profile. `required`: layers of each."""
    found = []
    for name in get_args(Profile):
        problem = why_no_script_runs(required[name], name)
        found.append({"name": name, "runs": not problem, "problem": problem, "fixes": fixes(name, problem)})
    return found


def why_no_script_runs(required: Collection[str], profile: Profile) -> str:
    """Run a script in a real sandbox. Return what went wrong, or an empty text."""
    from toolcell.sync import SyncRuntime

    policy = Policy(profile=profile, require=frozenset(required))  # type: ignore[arg-type]  # names of layers
    try:
        with SyncRuntime(policy=policy, pool=PoolConfig(warm=0)) as runtime:
            result = runtime.execute_code("set_result(1)")
    except ToolcellError as exc:
        return str(
            exc.__cause__ if isinstance(exc.__cause__, ToolcellError) else exc
        )  # without advice to ask the doctor
    return "" if result.error is None else f"{result.outcome}: {result.error.message}"


def fixes(profile: str, problem: str) -> list[str]:
    """Return the flags and fields that give a profile what it lacks, inside a container."""
    if not problem or "gVisor" in problem or not _is_in_container():
        return []
    if profile == "full":
        return list(FULL_AS_ROOT if os.geteuid() == 0 else FULL_AS_USER)
    return list(LANDLOCK_DENIED) if "landlock" in problem.lower() and "ABI" not in problem else []


def _is_in_container() -> bool:
    """Whether this process looks like one of a container: it has a seccomp filter, or an engine left its mark."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            is_filtered = "\nSeccomp:\t2\n" in status.read()
    except OSError:
        is_filtered = False
    marks = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
    return is_filtered or any(map(os.path.exists, marks))
