"""Settings as frozen models: the limits of a run, the size of the pool, and the policy for isolation.

This module holds values only. It does not enforce a limit or start a sandbox.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, get_args

from toolcell.errors import UsageError
from toolcell.flows import Flow
from toolcell.settings import MAX_SHOWN_CHARS, SettingsModel, repr_of, setting

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MOST = 2**53
"""The largest limit: kernels and messages take no number of more than 63 bits, and a float no exact one."""
_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)

Layer = Literal[
    "user", "pid", "mount", "net", "ipc", "uts", "cgroup_ns",
    "landlock", "seccomp", "capabilities", "no_new_privs", "rlimits", "cgroup",
]  # fmt: skip
"""One isolation layer of the process backend. `cgroup` is the resource controller, `cgroup_ns` the namespace."""

DEFAULT_LAYERS: frozenset[Layer] = frozenset(set(get_args(Layer)) - {"cgroup"})
"""Layers that a run requires by default. A `cgroup` needs root or a delegated cgroup. It is used where one is
available, but it is not required; `rlimits` and the process watch bound every run."""

CONTAINER_LAYERS: frozenset[Layer] = frozenset({"landlock", "seccomp", "capabilities", "no_new_privs", "rlimits"})
"""Layers that `Policy(profile="container")` requires: those that a process without privileges can apply to itself."""

Profile = Literal["full", "container", "auto"]

AUTO_FLOOR: Mapping[Profile, frozenset[Layer]] = {
    "full": DEFAULT_LAYERS - {"landlock"},
    "container": CONTAINER_LAYERS,
}
"""What `Policy(profile="auto")` tries, strongest first, and the layers that each must have. Nothing weaker runs."""

PROFILES: Mapping[Profile, frozenset[Layer]] = {
    "full": DEFAULT_LAYERS,
    "container": CONTAINER_LAYERS,
    "auto": AUTO_FLOOR["full"] & AUTO_FLOOR["container"],
}
"""Layers that each profile requires by default."""

MAX_DECISIONS: Final = 10_000
"""Most decisions of one request about calls that wait."""
MAX_PLAN_STEPS: Final = 50


def check_decisions(given: object) -> None:
    """Refuse a request with too many decisions, or ids of effects to approve, before it looks at them.

    Raises:
        UsageError: there are too many.
    """
    if not isinstance(given, dict | list) or len(given) <= MAX_DECISIONS:
        return
    if isinstance(given, dict):
        raise UsageError(f"{len(given)} decisions, limit {MAX_DECISIONS}; what is left out waits for the next request")
    raise UsageError(f"{len(given)} ids to approve, limit {MAX_DECISIONS}; give the draft's digest, which approves all")


SHOWN_CHARS: Final = 32_000
"""Most characters of tools that a model is shown before it asks: about 8,000 tokens."""

LintProfile = Literal["off", "standard", "strict"]

OnApproval = Literal["ask", "deny", "suspend"]
"""What becomes of a call that needs approval."""

CheckTypes = Literal["off", "warn", "refuse"]
"""What becomes of a script with wrong types. `warn`: it runs, and the result has the findings."""


def check_types_of(value: object) -> CheckTypes | None:
    """Return how to check types; True is `refuse`, False is `off`.

    Raises:
        UsageError: it is nothing of that.
    """
    if value is None or isinstance(value, bool):
        return None if value is None else "refuse" if value else "off"
    if value not in get_args(CheckTypes):
        raise UsageError(f"check_types= takes 'off', 'warn', 'refuse' or a bool, not {value!r:.{MAX_SHOWN_CHARS}}")
    degree: CheckTypes = value  # type: ignore[assignment]
    return degree


def parse_size(text: str) -> int:
    """Read a number of bytes such as 65536, 64k, 1.5GiB.

    Raises:
        ValueError: it is none.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{repr_of(text)} is not a size such as 65536, 512k, 64MiB or 1.5g")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def names_of(given: Iterable[object], name: str) -> tuple[str, ...]:
    """Return the names that were given as the argument `name`.

    Raises:
        UsageError: `given` is one text, which would be taken apart into letters, or something in it is not a name.
    """
    if isinstance(given, str):
        raise UsageError(f"{name}= takes a list of names, not the text {repr_of(given)}; write {name}=[{given!r}]")
    if not isinstance(given, Iterable):
        raise UsageError(f"{name}= takes a list of names, not {type(given).__name__} {repr_of(given)}")
    names = []
    for each in given:
        if not isinstance(each, str) or not each.strip():
            raise UsageError(f"{name}= takes a list of names, and {repr_of(each)} is not a name")
        names.append(each)
    return tuple(names)


def package_name(requirement: str) -> str:
    """Return a requirement as models and tenants may see it: of a wheel file name and version, without its folder."""
    if not requirement.endswith(".whl"):
        return requirement
    return " ".join(Path(requirement).name.removesuffix(".whl").split("-")[:2])


class Limits(SettingsModel):
    """What one run may use. Each name ends in its unit. No value means 'unlimited'. Sizes may be text: `"64MiB"`."""

    other_names: ClassVar = {
        "timeout": "wall_s", "timeout_s": "wall_s", "time_s": "wall_s", "max_time": "wall_s", "seconds": "wall_s",
        "cores": "cpu_cores", "cpus": "cpu_cores", "max_memory": "memory_bytes", "mem": "memory_bytes",
        "pids": "processes", "threads": "processes", "max_calls": "tool_calls", "calls": "tool_calls",
        "elements": "message_elements", "max_elements": "message_elements", "answer_bytes": "frame_bytes",
        "message_bytes": "frame_bytes", "max_output": "output_bytes", "stdout_bytes": "output_bytes",
        "file_bytes": "files_bytes",
    }  # fmt: skip

    @classmethod
    def read(cls, name: str, value: Any) -> Any:
        if isinstance(value, str) and name.endswith("_bytes"):
            value = parse_size(value)
        if isinstance(value, int) and value > MOST:
            raise ValueError(f"must be at most {MOST}")
        return super().read(name, value)

    wall_s: float = setting(default=30.0, gt=0, le=86_400)
    """Seconds that a run may take, including the time of its tools. Outcome `timeout`."""

    cpu_s: float = setting(default=30.0, gt=0, le=86_400)
    """CPU seconds of the whole process tree. Outcome `cpu_limit`."""

    cpu_cores: float | None = setting(default=None, ge=0.01, le=4096)
    """Processors that the whole process tree may keep busy. A script that wants more is slowed down, not ended.
    Default None: no limit of its own; all sandboxes of the runtime share nine tenths of the machine with a cgroup; in
    Docker `cpus`. Where it cannot be enforced, a run that sets it raises `SandboxUnavailable`."""

    memory_bytes: int = setting(default=512 * MIB, ge=32 * MIB)
    """Memory of the whole process tree, tmpfs files included. Swap is 0. Outcome `memory_limit`. Without a
    cgroup, processes are measured, and only `disk_bytes` bounds the files."""

    processes: int = setting(default=64, gt=0, le=4096)
    """Processes and threads alive at once, including the script's own. Outcome `process_limit`."""

    open_files: int = setting(default=256, ge=16, le=65_536)
    """Open descriptors of each process. Beyond it the script gets `OSError: Too many open files`."""

    disk_bytes: int = setting(default=64 * MIB, ge=64 * KIB)
    """Bytes in the workspace, /tmp and /dev/shm together. Beyond it the script gets `OSError: No space left on
    device`."""

    inodes: int = setting(default=4096, ge=16)
    """Files and directories in the workspace, /tmp and /dev/shm together."""

    output_bytes: int = setting(default=64 * KIB, gt=0)
    """Bytes kept of each stream, half from its beginning and half from its end. A mark shows where bytes between were
    dropped; this is not an error. Only output beyond `output_flood_bytes` ends the run."""

    output_flood_bytes: int = setting(default=256 * MIB, gt=0)
    """Bytes that a run and its processes may print to both streams together, kept or not. Outcome `output_limit`."""

    frame_bytes: int = setting(default=8 * MIB, ge=4 * KIB, le=256 * MIB)
    """Bytes of one message on the bridge, in either direction. A larger one from the guest is a `protocol_error`."""

    message_elements: int = setting(default=2**18, ge=8192, le=2**20)
    """Lists, dicts, and their items, keys and values in one message of the script: a result, the arguments of a call,
    progress. For more, the call raises in the script. The default takes the host's event loop some 50 ms."""

    answer_elements: int = setting(default=2**20, ge=8192, le=2**20)
    """The same for one answer to the script. The call of a tool that returns more fails; its bytes count towards
    `frame_bytes`."""

    result_bytes: int = setting(default=4 * MIB, ge=64)
    """Bytes of the encoded value given to `set_result`. For a larger value `set_result` raises in the script."""

    files: int = setting(default=64, ge=0)
    """Files that a run may return."""

    files_bytes: int = setting(default=32 * MIB, ge=0)
    """Bytes of all returned files together. They count towards `host_work`: raise both for more than 500 MB."""

    tool_calls: int = setting(default=1000, ge=0)
    """Tool calls that one run may make. The next call raises `ToolError` in the script. If that ends the run, the
    outcome is `call_limit`."""

    call_args_bytes: int = setting(default=32 * MIB, ge=1024)
    """Size of the arguments of all calls of one run together: the encoded bytes of each call, and 64 bytes for each
    element. Calls beyond it are refused."""

    host_work: int = setting(default=512 * MIB, ge=64 * KIB)
    """Work that a run's messages cause on the host: 1 for each byte, 64 for each list, dict, item and key, 256 for each
    message, and 64 for each value that the check of a call's arguments visits. Texts that are printed in quick
    succession are one message, and 64 for each. 100 million take a second at most, and usually far less. Outcome
    `host_work_limit`."""

    egress_requests: int = setting(default=1000, ge=0)
    """HTTP requests that the libraries of one run may send. The next one fails in the script. Needs `egress=`."""

    egress_bytes: int = setting(default=256 * MIB, ge=0)
    """Bytes of the bodies of these requests and their answers together, as sent and as decompressed by the host."""

    concurrent_calls: int = setting(default=10, gt=0)
    """Tool calls of one run that execute at the same time. Further calls wait."""


OF_SANDBOX: Final[Mapping[str, Literal["changed", "lowered", "fixed"]]] = {
    "cpu_cores": "changed",
    "cpu_s": "lowered",
    "memory_bytes": "lowered",
    "processes": "lowered",
    "open_files": "lowered",
    "disk_bytes": "fixed",
    "inodes": "fixed",
    "frame_bytes": "fixed",
}
"""Limits that a sandbox is started with, and what can become of each afterwards, from outside. Every other limit is
held by the host for one run."""


def fits(wanted: Limits, made_with: Limits, fixed: Collection[str] = ()) -> bool:
    """Return True when a sandbox made with the limits `made_with` can be held to `wanted` from outside.

    `fixed`: further limits that the backend cannot change.
    """
    for name, change in OF_SANDBOX.items():
        asked, has = getattr(wanted, name), getattr(made_with, name)
        if asked != has and (change == "fixed" or name in fixed or (change == "lowered" and asked > has)):
            return False
    return True


class PoolConfig(SettingsModel):
    """How many sandboxes the pool keeps."""

    other_names: ClassVar = {"size": "warm", "min_size": "warm", "max": "cap", "max_size": "cap", "timeout": "start_s"}

    warm: int = setting(default=2, ge=0, le=1024)
    """Sandboxes that are started in advance and wait for a script."""

    cap: int = setting(default=64, gt=0, le=65_536)
    """Sandboxes alive at once, including busy ones. At the cap, `execute_code` waits until one ends. When all are held
    by scripts that wait for a script inside them, up to eight more are started for these."""

    idle_s: float = setting(default=300.0, gt=0)
    """Age in seconds at which a warm sandbox is replaced."""

    start_s: float = setting(default=30.0, gt=0, le=3600)
    """Seconds in which a sandbox must start. It takes milliseconds; when none has started for this long, runs that
    wait for one raise `SandboxUnavailable`. Time in which every place of `cap` is busy does not count."""


class Policy(SettingsModel):
    """What must hold before a script starts, and what it finds in its environment."""

    profile: Profile = "full"
    """How the process backend isolates. `full`: namespaces and a root file system of its own, with Landlock as a second
    wall. `container`: less, for a container or pod that allows no namespaces. `auto`: the strongest that runs on this
    machine, never below `AUTO_FLOOR`; each result says which, and what is missing. See docs/containers.md."""

    require: frozenset[Layer] = setting(default_factory=lambda given: PROFILES[given.get("profile", "full")])
    """Layers that must be live. If one is not, the runtime raises `SandboxUnavailable`; there is no silent downgrade.
    By default those of the profile; with `auto` these are needed beside its floor."""

    shell: bool = False
    """Scripts may execute programs: a shell, the usual small tools, and Python. The process backend shows them a copy
    of this machine's; Docker has them in the image `toolcell/shell`. Every other layer stays. For `shell_exec`."""

    lint: LintProfile = "off"
    """RestrictedPython profile that checks a script inside the sandbox before it runs. It refuses early, with readable
    messages. It is not isolation."""

    check_types: CheckTypes | None = None
    """What becomes of scripts that call tools with wrong arguments, or use what tools return wrongly: `refuse` (True)
    runs nothing of them, with `warn` the result has the findings, `off` (False) does not look. ty checks them in a
    sandbox of its own: pip install 'toolcell[types]'. None: `off`, and `warn` for an `Agent` where ty is installed."""

    @classmethod
    def read(cls, name: str, value: Any) -> Any:
        is_degree = name == "check_types" and isinstance(value, bool)
        return check_types_of(value) if is_degree else super().read(name, value)

    seed: int | None = None
    """Seed for `random` and for numpy's legacy generator. None: fresh entropy."""

    clock: float | None = setting(default=None, gt=-1e15, lt=1e15)
    """Start of the script's wall clock, in seconds since the epoch. The clock advances when the script sleeps, and when
    the script has read it a thousand times in between. Monotonic clocks are real. None: the real time."""

    hash_seed: int | None = setting(default=None, ge=0, le=4_294_967_295)
    """PYTHONHASHSEED of the sandbox's interpreter. None: a fresh one for each zygote."""

    env: Mapping[str, str] = setting(default_factory=lambda _: {})
    """Environment variables of every script, in addition to HOME, TMPDIR, LANG and an empty PATH. The script can read
    them, so they must hold no secrets."""

    env_passthrough: tuple[str, ...] = ()
    """Names of variables to copy from this process's environment, if they are set there."""

    def environment(self) -> dict[str, str]:
        """Return the variables that are added to a script's environment."""
        passed = {name: os.environ[name] for name in self.env_passthrough if name in os.environ}
        return passed | dict(self.env)

    flows: tuple[Flow, ...] = ()
    """Where runs must not send what they have read: rules about tools with `reads=` and `sends=`. They hold for scripts
    and plans of the runtime, and for every registry and agent that offers its `execute_code`."""

    logs_to_model: bool = True
    """Append what the script printed to the text that the model reads."""
