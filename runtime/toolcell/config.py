"""What a caller may set, as frozen models: limits of a run, size of a pool, what isolation is required.

Values only: nothing here knows how a limit is enforced or how a sandbox is started.
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
"""Of a wrong value, in the message that refuses it."""

Layer = Literal[
    "user", "pid", "mount", "net", "ipc", "uts", "cgroup_ns",
    "landlock", "seccomp", "capabilities", "no_new_privs", "rlimits", "cgroup",
]  # fmt: skip
"""One isolation layer of the process backend. `cgroup` is the resource controller, `cgroup_ns` the namespace."""

DEFAULT_LAYERS: frozenset[Layer] = frozenset(set(get_args(Layer)) - {"cgroup"})
"""What a run needs unless told otherwise. `cgroup` is used wherever one can be had, but only root (or a
delegated cgroup) can have one, so it is not required by default; `rlimits` and the watch bound every run."""

LintProfile = Literal["off", "standard", "strict"]


class _Frozen(BaseModel):
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
    """Each wrong value on the same line: its key, what it is, what it should be."""
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))} = {_shown(each['input'])}: {each['msg']}" for each in exc.errors()
    )


def _shown(value: object) -> str:
    return one_line(repr(value), MAX_SHOWN_CHARS)


Settings = TypeVar("Settings", bound=_Frozen)


def settings_of(kind: type[Settings], given: Settings | None, name: str) -> Settings:
    """The settings given as the argument `name`, or the defaults.

    Raises:
        UsageError: they are something else, such as a dict.
    """
    if given is None:
        return kind()
    if not isinstance(given, kind):
        wanted, got = kind.__name__, type(given).__name__
        raise UsageError(f"{name}= takes {wanted}, not {got} {_shown(given)}; write {name}={wanted}(...)")
    return given


class Limits(_Frozen):
    """What one execution may use. Every name ends in its unit; nothing means 'unlimited'."""

    wall_s: PositiveFloat = Field(default=30.0, le=86_400)
    """Seconds from Run to Done, waiting for tools included. Outcome `timeout`."""

    cpu_s: PositiveFloat = Field(default=30.0, le=86_400)
    """CPU seconds of the whole process tree. Outcome `cpu_limit`."""

    memory_bytes: int = Field(default=512 * MIB, ge=32 * MIB)
    """Memory of the whole process tree, tmpfs files included; swap is 0. Outcome `memory_limit`. Where no cgroup can be
    had, a watch measures the processes, and files are bounded by `disk_bytes` alone."""

    processes: PositiveInt = Field(default=64, le=4096)
    """Processes and threads alive at once, the script's own included. Outcome `process_limit`."""

    open_files: int = Field(default=256, ge=16, le=65_536)
    """Descriptors each process may hold. The script sees `OSError: Too many open files`."""

    disk_bytes: int = Field(default=64 * MIB, ge=64 * KIB)
    """Bytes in the workspace, /tmp and /dev/shm together. The script sees `OSError: No space left on device`."""

    inodes: int = Field(default=4096, ge=16)
    """Files and directories in the same places."""

    output_bytes: PositiveInt = 64 * KIB
    """Kept per stream, half from the beginning and half from the end. What lies between is drained, counted and
    marked; it is no error. Only a flood past `output_flood_bytes` ends the run."""

    output_flood_bytes: PositiveInt = 256 * MIB
    """Bytes a run may print in all, kept or not. Outcome `output_limit`."""

    frame_bytes: int = Field(default=8 * MIB, ge=4 * KIB, le=256 * MIB)
    """One message on the bridge, either way. A larger one from the guest is a `protocol_error`."""

    result_bytes: int = Field(default=4 * MIB, ge=64)
    """The encoded value given to `set_result`. Larger: `set_result` raises in the script."""

    files: int = Field(default=64, ge=0)
    """Files a run may return."""

    files_bytes: int = Field(default=32 * MIB, ge=0)
    """Bytes in all returned files together."""

    tool_calls: int = Field(default=100, ge=0)
    """Tool calls one run may make. The call past it raises `ToolError`; the run's outcome is `call_limit` if
    that ends it."""

    call_args_bytes: int = Field(default=32 * MIB, ge=1024)
    """Arguments of all calls of one run together, as the host holds them: encoded, and 64 bytes for each element. A
    call past it is refused."""

    concurrent_calls: PositiveInt = 10
    """Tool calls of one run being executed at once; further ones wait their turn."""


class PoolConfig(_Frozen):
    """How many sandboxes are kept ready."""

    warm: int = Field(default=2, ge=0, le=1024)
    """Started ahead of need and waiting for their script."""

    cap: PositiveInt = Field(default=64, le=65_536)
    """Alive at once, busy ones included. Past it `execute_code` waits for a place."""

    idle_s: PositiveFloat = 300.0
    """A warm sandbox older than this is replaced."""


class Policy(_Frozen):
    """What must hold before a script may start."""

    require: frozenset[Layer] = DEFAULT_LAYERS
    """A layer named here that is not live makes every run `SandboxUnavailable`; nothing is downgraded silently."""

    lint: LintProfile = "off"
    """RestrictedPython profile applied inside the sandbox before the script runs. Early and readable refusals; not
    isolation."""

    seed: int | None = None
    """Seed `random` (and numpy's legacy generator) with this instead of fresh entropy."""

    clock: float | None = None
    """Start the wall clock at this many seconds since the epoch. It stands still but for what the script sleeps, and
    goes on when it is read a thousand times in between; monotonic clocks are real."""

    hash_seed: int | None = Field(default=None, ge=0, le=4_294_967_295)
    """PYTHONHASHSEED of the sandbox's interpreter; None draws a fresh one for each zygote."""

    env: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of every script, beside HOME, TMPDIR, LANG and an empty PATH. Guests can read them: no
    secrets."""

    env_passthrough: tuple[str, ...] = ()
    """Names of variables copied from this process's environment, if set there."""

    def environment(self) -> dict[str, str]:
        """What scripts see added to their environment."""
        passed = {name: os.environ[name] for name in self.env_passthrough if name in os.environ}
        return passed | dict(self.env)

    logs_to_model: bool = True
    """Append captured output to the text a model sees."""
