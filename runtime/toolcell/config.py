"""Settings as frozen models: the limits of a run, the size of the pool, and the policy for isolation.

This module holds values only. It does not enforce a limit or start a sandbox.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from toolcell.errors import UsageError
from toolcell.text import one_line

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MAX_SHOWN_CHARS = 80
"""Characters of a wrong value that an error message shows."""

Layer = Literal[
    "user", "pid", "mount", "net", "ipc", "uts", "cgroup_ns",
    "landlock", "seccomp", "capabilities", "no_new_privs", "rlimits", "cgroup",
]  # fmt: skip
"""One isolation layer of the process backend. `cgroup` is the resource controller, `cgroup_ns` the namespace."""

DEFAULT_LAYERS: frozenset[Layer] = frozenset(set(get_args(Layer)) - {"cgroup"})
"""Layers that a run requires by default. A `cgroup` needs root or a delegated cgroup. It is used where one is
available, but it is not required; `rlimits` and the process watch bound every run."""

LintProfile = Literal["off", "standard", "strict"]


class SettingsModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Load from a TOML file whose keys are this model's fields.

        Raises:
            UsageError: the file cannot be read, is not TOML, or a key or value is wrong.
        """
        try:
            return cls(**tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except ValidationError as exc:
            raise UsageError(f"cannot load {cls.__name__} from {path}: {_problems(exc)}") from exc
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
            raise UsageError(f"cannot load {cls.__name__} from {path}: {exc}") from exc


def _problems(exc: ValidationError) -> str:
    """Name each wrong value with its key and what it should be, on one line."""
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))} = {_shown(each['input'])}: {each['msg']}" for each in exc.errors()
    )


def _shown(value: object) -> str:
    return one_line(repr(value), MAX_SHOWN_CHARS)


Settings = TypeVar("Settings", bound=SettingsModel)


def settings_of(kind: type[Settings], given: Settings | None, name: str) -> Settings:
    """Return the settings that were given as the argument `name`, or the defaults.

    Raises:
        UsageError: `given` is something else, such as a dict.
    """
    if given is None:
        return kind()
    if not isinstance(given, kind):
        wanted, got = kind.__name__, type(given).__name__
        raise UsageError(f"{name}= takes {wanted}, not {got} {_shown(given)}; write {name}={wanted}(...)")
    return given


class Limits(SettingsModel):
    """What one run may use. Each name ends in its unit. No value means 'unlimited'."""

    wall_s: PositiveFloat = Field(default=30.0, le=86_400)
    """Seconds from Run to Done, including the time in which tools run. Outcome `timeout`."""

    cpu_s: PositiveFloat = Field(default=30.0, le=86_400)
    """CPU seconds of the whole process tree. Outcome `cpu_limit`."""

    memory_bytes: int = Field(default=512 * MIB, ge=32 * MIB)
    """Memory of the whole process tree, tmpfs files included. Swap is 0. Outcome `memory_limit`. Without a cgroup, a
    watch measures the processes, and only `disk_bytes` bounds the files."""

    processes: PositiveInt = Field(default=64, le=4096)
    """Processes and threads alive at once, including the script's own. Outcome `process_limit`."""

    open_files: int = Field(default=256, ge=16, le=65_536)
    """Open descriptors of each process. Past it the script gets `OSError: Too many open files`."""

    disk_bytes: int = Field(default=64 * MIB, ge=64 * KIB)
    """Bytes in the workspace, /tmp and /dev/shm together. Past it the script gets `OSError: No space left on
    device`."""

    inodes: int = Field(default=4096, ge=16)
    """Files and directories in the workspace, /tmp and /dev/shm together."""

    output_bytes: PositiveInt = 64 * KIB
    """Bytes kept of each stream, half from its beginning and half from its end. The bytes between are counted and
    dropped, and a mark shows where; this is no error. Only output past `output_flood_bytes` ends the run."""

    output_flood_bytes: PositiveInt = 256 * MIB
    """Bytes that a run may print in total, kept or not. Outcome `output_limit`."""

    frame_bytes: int = Field(default=8 * MIB, ge=4 * KIB, le=256 * MIB)
    """Bytes of one message on the bridge, in either direction. A larger one from the guest is a `protocol_error`."""

    result_bytes: int = Field(default=4 * MIB, ge=64)
    """Bytes of the encoded value given to `set_result`. For a larger value `set_result` raises in the script."""

    files: int = Field(default=64, ge=0)
    """Files that a run may return."""

    files_bytes: int = Field(default=32 * MIB, ge=0)
    """Bytes of all returned files together."""

    tool_calls: int = Field(default=100, ge=0)
    """Tool calls that one run may make. The next call raises `ToolError` in the script. If that ends the run, the
    outcome is `call_limit`."""

    call_args_bytes: int = Field(default=32 * MIB, ge=1024)
    """Size of the arguments of all calls of one run together, as the host counts it: the encoded bytes, and 64 bytes
    for each element. A call past it is refused."""

    concurrent_calls: PositiveInt = 10
    """Tool calls of one run that execute at the same time. Further calls wait."""


class PoolConfig(SettingsModel):
    """How many sandboxes the pool keeps."""

    warm: int = Field(default=2, ge=0, le=1024)
    """Sandboxes that are started in advance and wait for a script."""

    cap: PositiveInt = Field(default=64, le=65_536)
    """Sandboxes alive at once, including busy ones. At the cap, `execute_code` waits until one ends."""

    idle_s: PositiveFloat = 300.0
    """Age in seconds at which a warm sandbox is replaced."""


class Policy(SettingsModel):
    """What must hold before a script starts, and what it finds in its environment."""

    require: frozenset[Layer] = DEFAULT_LAYERS
    """Layers that must be live. If one is not, every run raises `SandboxUnavailable`; there is no silent downgrade."""

    lint: LintProfile = "off"
    """RestrictedPython profile that checks a script inside the sandbox before it runs. It refuses early, with readable
    messages. It is not isolation."""

    seed: int | None = None
    """Seed for `random` and for numpy's legacy generator. None: fresh entropy."""

    clock: float | None = None
    """Start of the script's wall clock, in seconds since the epoch. The clock advances when the script sleeps, and when
    the script has read it a thousand times in between. Monotonic clocks are real. None: the real time."""

    hash_seed: int | None = Field(default=None, ge=0, le=4_294_967_295)
    """PYTHONHASHSEED of the sandbox's interpreter. None: a fresh one for each zygote."""

    env: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of every script, in addition to HOME, TMPDIR, LANG and an empty PATH. The script can read
    them, so they must hold no secrets."""

    env_passthrough: tuple[str, ...] = ()
    """Names of variables to copy from this process's environment, if they are set there."""

    def environment(self) -> dict[str, str]:
        """Return the variables that are added to a script's environment."""
        passed = {name: os.environ[name] for name in self.env_passthrough if name in os.environ}
        return passed | dict(self.env)

    logs_to_model: bool = True
    """Append what the script printed to the text that the model reads."""
