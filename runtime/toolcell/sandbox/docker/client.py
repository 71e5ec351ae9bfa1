"""Call the Docker API without blocking the event loop: a thin layer over the `docker` SDK.

Every blocking call runs in a worker thread. Every failure becomes a `SandboxUnavailable` that says what to do.
Podman's socket and remote daemons answer the same calls. This module knows nothing of sandboxes.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import anyio

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.shortages import REMEDIES, describe
from toolcell.support import daemon_threads

if TYPE_CHECKING:
    from docker import APIClient

P = ParamSpec("P")
R = TypeVar("R")

CALL_S = 60.0
"""Timeout of one API call. Creating a container on a machine under load takes seconds, never a minute."""

CALLS_AT_ONCE = 16
"""Worker threads that talk to one daemon. A daemon serialises most of its work, so more threads would only wait."""

SET_IT = "set DOCKER_HOST to a daemon or to Podman's socket"
START_DAEMON = f'start it ("systemctl start docker"), or {SET_IT}'
ADDRESSES = "unix:///PATH, tcp://HOST:PORT or ssh://USER@HOST"


CAN_LIMIT: Final = ("MemoryLimit", "SwapLimit", "PidsLimit")
"""Fields of GET /info."""


@dataclass(frozen=True, slots=True)
class DaemonInfo:
    """Properties of a daemon that sandboxes depend on."""

    version: str
    api_version: str
    is_podman: bool
    is_local: bool
    """The daemon is reached over a Unix socket. Its containers' cgroups may be visible in our /sys/fs/cgroup."""
    cgroup_version: str
    cgroup_driver: str
    storage_driver: str
    runtimes: tuple[str, ...]
    default_runtime: str
    security: tuple[str, ...]
    """As `docker info` prints them, for example "name=seccomp,profile=default"."""
    architecture: str
    has_init: bool
    """The daemon can put a small init in front of a container's program."""
    cannot_limit: tuple[str, ...] = ()
    """Which of `CAN_LIMIT` it says it cannot do."""


class NotFound(SandboxUnavailable):
    """The daemon has no such container or image."""


class Conflict(SandboxUnavailable):
    """The object is in the wrong state: it has already stopped, or is already being removed."""


class EngineClient:
    """A connection to one daemon. Make it with `connect`."""

    def __init__(self, api: APIClient, info: DaemonInfo, address: str) -> None:
        """`address`: in the form of DOCKER_HOST."""
        self._address = address
        self.api = api
        """The SDK's own client. Calls go through `call`."""
        self.info = info
        self._limiter = anyio.CapacityLimiter(CALLS_AT_ONCE)

    @classmethod
    async def connect(cls, docker_host: str | None = None) -> EngineClient:
        """Connect to the daemon at `docker_host`, else at DOCKER_HOST, else to the local one.

        DOCKER_TLS_VERIFY and DOCKER_CERT_PATH apply as in Docker's own command line.

        Raises:
            SandboxUnavailable: no daemon answers; the message says what to do.
        """
        return await daemon_threads.run_sync(cls.connect_now, docker_host)

    @classmethod
    def connect_now(cls, docker_host: str | None = None) -> EngineClient:
        """Blocking form of `connect`."""
        address = _address(docker_host)
        with translate_errors(address):
            api, info = _connect(docker_host)
        return cls(api, info, address)

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make one blocking call in a worker thread.

        Cancellation: takes effect after the call, so its result is never lost.

        Raises:
            SandboxUnavailable: the daemon refused or is gone; `NotFound` or `Conflict` where that is the reason.
        """
        work = functools.partial(function, *args, **kwargs)
        return await daemon_threads.run_sync(self._call_now, work, limiter=self._limiter)

    def _call_now(self, work: Callable[[], R]) -> R:
        with translate_errors(self._address):
            check_socket(self._address)
            return work()

    async def create(self, config: Mapping[str, Any], name: str) -> str:
        return str((await self.call(self.api.create_container_from_config, dict(config), name))["Id"])

    async def start(self, container: str) -> None:
        await self.call(self.api.start, container)

    async def inspect(self, container: str) -> dict[str, Any]:
        return await self.call(self.api.inspect_container, container)

    async def kill(self, container: str, signal: int | None = None) -> None:
        """Kill a container, or send its first process `signal`. Do nothing when it is dead or gone."""
        try:
            await self.call(self.api.kill, container, signal)
        except (NotFound, Conflict):
            return

    def kill_now(self, container: str) -> None:
        """Blocking form of `kill`. A daemon that cannot be reached is ignored: the caller tries again."""
        with suppress(SandboxUnavailable):
            self._call_now(functools.partial(self.api.kill, container))

    async def remove(self, container: str) -> None:
        """Kill and remove a container with its volumes. Do nothing when it is gone or being removed."""
        try:
            await self.call(self.api.remove_container, container, v=True, force=True)
        except (NotFound, Conflict):
            return

    async def update(self, container: str, resources: Mapping[str, int]) -> None:
        """Change resource limits of a live container. The keys are those of HostConfig."""
        await self.call(_update, self.api, container, dict(resources))

    async def list(self, labels: Mapping[str, str | None]) -> list[dict[str, Any]]:
        """List containers that carry all `labels`, stopped ones too. A value of None matches any value."""
        return await self.call(list_labelled, self.api, labels)

    async def stats(self, container: str) -> dict[str, Any]:
        """Measure a container once, without the second that the daemon waits to compute a rate."""
        return await self.call(self.api.stats, container, stream=False, one_shot=True)

    async def aclose(self) -> None:
        """Close idle connections. Attached streams stay open."""
        await daemon_threads.run_sync(self.api.close)


def list_labelled(api: APIClient, labels: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Blocking form of `EngineClient.list`."""
    wanted = [key if value is None else f"{key}={value}" for key, value in labels.items()]
    found: list[dict[str, Any]] = api.containers(all=True, filters={"label": wanted})
    return found


def connect_api(docker_host: str | None) -> APIClient:
    """Make an SDK client that speaks the newest API version both sides know."""
    import docker.utils

    address = _address(docker_host)
    _check_address(address)
    check_socket(address)
    environment = dict(os.environ) | ({"DOCKER_HOST": address} if docker_host is not None else {})
    known = docker.utils.kwargs_from_env(environment=environment)
    return docker.APIClient(version="auto", timeout=int(CALL_S), **known)


def _address(docker_host: str | None) -> str:
    return docker_host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def _check_address(address: str) -> None:
    """Check the form of an address, and that the packages it needs are installed.

    Raises:
        SandboxUnavailable: the address is malformed, or needs paramiko; the message says what to do.
    """
    import docker.errors
    import docker.utils

    try:
        docker.utils.parse_host(address)
    except (docker.errors.DockerException, ValueError) as exc:
        raise SandboxUnavailable(
            f"{address!r} is not the address of a Docker daemon ({exc}); DOCKER_HOST may be {ADDRESSES}"
        ) from exc
    if address.startswith("ssh://"):
        try:
            importlib.import_module("paramiko")
        except ImportError as exc:
            raise SandboxUnavailable(
                f"{address} needs the \"paramiko\" package ({exc}): pip install 'docker[ssh]'"
            ) from exc


def check_socket(address: str) -> None:
    """Check that a process listens on a Unix socket. When none does, the SDK would leak its own socket.

    Raises:
        OSError: no process listens.
    """
    path = address.removeprefix("unix://")
    if path != address and hasattr(socket, "AF_UNIX"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CALL_S)
            probe.connect(path)


def _connect(docker_host: str | None) -> tuple[APIClient, DaemonInfo]:
    api = connect_api(docker_host)
    try:
        return api, daemon_info(api.info(), api.version(), str(api.base_url))
    except BaseException:
        api.close()
        raise


def daemon_info(info: Mapping[str, Any], version: Mapping[str, Any], base_url: str) -> DaemonInfo:
    """Read the answers of GET /info and GET /version."""
    components = [str(each.get("Name", "")) for each in version.get("Components") or ()]
    return DaemonInfo(
        version=str(info.get("ServerVersion") or version.get("Version") or ""),
        api_version=str(version.get("ApiVersion") or ""),
        is_podman=any("podman" in name.lower() for name in components),
        is_local=base_url.startswith("http+docker://localhost"),
        cgroup_version=str(info.get("CgroupVersion") or ""),
        cgroup_driver=str(info.get("CgroupDriver") or ""),
        storage_driver=str(info.get("Driver") or ""),
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        default_runtime=str(info.get("DefaultRuntime") or ""),
        security=tuple(str(each) for each in info.get("SecurityOptions") or ()),
        architecture=str(info.get("Architecture") or ""),
        has_init=bool(info.get("InitBinary")) or any("podman" in name.lower() for name in components),
        cannot_limit=tuple(name for name in CAN_LIMIT if info.get(name) is False),
    )


def _update(api: Any, container: str, resources: dict[str, int]) -> None:
    # The SDK's own method knows neither the process limit nor nanoseconds of CPU.
    import docker.errors
    import requests.exceptions

    url = f"{api.base_url}/v{api.api_version}/containers/{container}/update"
    try:
        api.post(url, json=resources, timeout=api.timeout).raise_for_status()
    except requests.exceptions.HTTPError as exc:
        docker.errors.create_api_error_from_http_exception(exc)  # raises


def call_api(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the SDK and translate its exceptions into ours."""
    with translate_errors():
        return function(*args, **kwargs)


@contextmanager
def translate_errors(address: str = "") -> Iterator[None]:
    """Turn the SDK's exceptions into ours. `address`: named in the message when no daemon answers.

    Raises:
        SandboxUnavailable: the SDK is missing, the daemon refused, or no daemon answers.
    """
    try:
        import docker.errors
        import requests.exceptions
    except ImportError as exc:
        raise SandboxUnavailable(f'the Docker backend needs the "docker" package ({exc}): pip install docker') from exc
    try:
        yield
    except docker.errors.NotFound as exc:
        raise NotFound(_daemon_message(exc)) from exc
    except docker.errors.APIError as exc:
        raise (Conflict if exc.status_code in (304, 409) else SandboxUnavailable)(_daemon_message(exc)) from exc
    except requests.exceptions.Timeout as exc:
        raise SandboxUnavailable(f"the Docker daemon did not answer within {CALL_S:g} s; is it overloaded?") from exc
    except _connection_errors() as exc:
        raise SandboxUnavailable(_unreachable(exc, address)) from exc


def _connection_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the SDK raises when no daemon answers. Some of paramiko's are not an OSError."""
    import docker.errors
    import requests.exceptions

    paramiko = sys.modules.get("paramiko")
    over_ssh = () if paramiko is None else (paramiko.SSHException,)
    return (docker.errors.DockerException, requests.exceptions.RequestException, OSError, *over_ssh)


def _daemon_message(error: Any) -> str:
    return f"the Docker daemon says: {error.explanation or error}"


def _unreachable(error: BaseException, address: str) -> str:
    from docker.errors import APIError

    causes = list(_causes(error))
    at = f" at {address}" if address else ""
    if address.startswith("ssh://"):
        return f"no Docker daemon answers{at} ({error}): see that `ssh {address} docker version` works and asks nothing"
    if any(isinstance(each, PermissionError) for each in causes):
        return f"this user may not talk to the Docker daemon{at}: join the group of its socket, or run rootless Docker"
    if short := next((each.errno for each in causes if isinstance(each, OSError) and each.errno in REMEDIES), None):
        return f"the Docker daemon{at} cannot be asked: {describe(short, '')}"
    if other := next((each for each in causes if isinstance(each, APIError)), None):
        return (
            f"what answers{at} is not a Docker daemon (HTTP {other.status_code}): {SET_IT}, DOCKER_TLS_VERIFY=1 for TLS"
        )
    if not any(isinstance(each, OSError) for each in causes):  # no connection was tried: certificates may be missing
        return f"cannot ask a Docker daemon{at} ({error}): see DOCKER_HOST, DOCKER_TLS_VERIFY and DOCKER_CERT_PATH"
    return f"no Docker daemon answers{at} ({error}): {START_DAEMON}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
