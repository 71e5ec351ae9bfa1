"""The Docker API off the event loop: one thin layer over the `docker` SDK.

Every blocking call runs in a worker thread and every failure becomes `SandboxUnavailable` that says what to do.
Podman's socket and remote daemons answer the same calls. Knows nothing of sandboxes.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import anyio
import anyio.to_thread

from toolcell.errors import SandboxUnavailable

if TYPE_CHECKING:
    from docker import APIClient

P = ParamSpec("P")
R = TypeVar("R")

CALL_S = 60.0
"""One API call. Creating a container on a machine under load takes seconds, never a minute."""

CALLS_AT_ONCE = 16
"""Worker threads talking to one daemon. It serialises most of its work, so more only wait."""

SET_IT = "set DOCKER_HOST to a daemon or to Podman's socket"
START_IT = f'start it ("systemctl start docker"), or {SET_IT}'
ADDRESSES = "unix:///PATH, tcp://HOST:PORT or ssh://USER@HOST"


@dataclass(frozen=True, slots=True)
class DaemonInfo:
    """What a daemon says about itself, as far as sandboxes depend on it."""

    version: str
    api_version: str
    is_podman: bool
    is_local: bool
    """Reached over a Unix socket. Its containers' cgroups may be visible in our /sys/fs/cgroup."""
    cgroup_version: str
    cgroup_driver: str
    storage_driver: str
    runtimes: tuple[str, ...]
    default_runtime: str
    security: tuple[str, ...]
    """As `docker info` has them, e.g. "name=seccomp,profile=default"."""
    architecture: str
    has_init: bool
    """It can put a small init in front of a container's program."""


class NotThere(SandboxUnavailable):
    """The daemon has no such container or image."""


class Conflict(SandboxUnavailable):
    """The object is not in a state for that: already stopped, already being removed."""


class Client:
    """One daemon. Make it with `connect`."""

    def __init__(self, api: APIClient, info: DaemonInfo, address: str) -> None:
        """`address`: as DOCKER_HOST has it."""
        self._address = address
        self.api = api
        """The SDK's own client, for calls made through `call`."""
        self.info = info
        self._limiter = anyio.CapacityLimiter(CALLS_AT_ONCE)

    @classmethod
    async def connect(cls, docker_host: str | None = None) -> Client:
        """Reach the daemon at `docker_host`, at DOCKER_HOST (with DOCKER_TLS_VERIFY, DOCKER_CERT_PATH), or here.

        Raises:
            SandboxUnavailable: nothing answers there; says what to do.
        """
        return await anyio.to_thread.run_sync(cls.connect_now, docker_host)

    @classmethod
    def connect_now(cls, docker_host: str | None = None) -> Client:
        """As `connect`, blocking."""
        address = _address(docker_host)
        api, info = explained_at(address, _connect, docker_host)
        return cls(api, info, address)

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make one blocking call in a worker thread.

        Cancellation: takes effect after the call, whose result is never lost on the way.

        Raises:
            SandboxUnavailable: the daemon refused or is gone; `NotThere`, `Conflict` where that is the reason.
        """
        work = functools.partial(function, *args, **kwargs)
        return await anyio.to_thread.run_sync(explained_at, self._address, self._knocking, work, limiter=self._limiter)

    def _knocking(self, work: Callable[[], R]) -> R:
        _knock(self._address)
        return work()

    async def create(self, config: Mapping[str, Any], name: str) -> str:
        """Create a container from the body of POST /containers/create; returns its id."""
        made = await self.call(self.api.create_container_from_config, dict(config), name)
        return str(made["Id"])

    async def start(self, container: str) -> None:
        """Start a created container."""
        await self.call(self.api.start, container)

    async def inspect(self, container: str) -> dict[str, Any]:
        """Everything the daemon knows of a container."""
        found: dict[str, Any] = await self.call(self.api.inspect_container, container)
        return found

    async def kill(self, container: str) -> None:
        """Send SIGKILL to all of a container. Already dead or gone is well."""
        try:
            await self.call(self.api.kill, container)
        except (NotThere, Conflict):
            return

    async def remove(self, container: str) -> None:
        """Kill and remove a container with its volumes. Already gone, or being removed, is well."""
        try:
            await self.call(self.api.remove_container, container, v=True, force=True)
        except (NotThere, Conflict):
            return

    async def update(self, container: str, resources: Mapping[str, int]) -> None:
        """Change resource limits of a live container, by their names in HostConfig."""
        await self.call(_update, self.api, container, dict(resources))

    async def list(self, labels: Mapping[str, str | None]) -> list[dict[str, Any]]:
        """Containers, stopped ones too, that carry all `labels`; None is any value."""
        return await self.call(list_labelled, self.api, labels)

    async def stats(self, container: str) -> dict[str, Any]:
        """One measurement, without the second of waiting that the daemon does for a rate."""
        found: dict[str, Any] = await self.call(self.api.stats, container, stream=False, one_shot=True)
        return found

    async def aclose(self) -> None:
        """Close idle connections. Attached streams live on."""
        await anyio.to_thread.run_sync(self.api.close)


def list_labelled(api: APIClient, labels: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Blocking form of `Client.list`."""
    wanted = [key if value is None else f"{key}={value}" for key, value in labels.items()]
    found: list[dict[str, Any]] = api.containers(all=True, filters={"label": wanted})
    return found


def connect_api(docker_host: str | None) -> APIClient:
    """A client of the daemon, with the API version both sides know."""
    import docker.utils

    address = _address(docker_host)
    _check(address)
    _knock(address)
    environment = dict(os.environ) | ({"DOCKER_HOST": address} if docker_host is not None else {})
    known = docker.utils.kwargs_from_env(environment=environment)
    return docker.APIClient(version="auto", timeout=int(CALL_S), **known)


def _address(docker_host: str | None) -> str:
    return docker_host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def _check(address: str) -> None:
    """See that an address is one, and that what it needs beside the SDK is here.

    Raises:
        SandboxUnavailable: it names no daemon, or one over ssh without paramiko; says what to do.
    """
    import docker.errors
    import docker.utils

    try:
        docker.utils.parse_host(address)
    except (docker.errors.DockerException, ValueError) as exc:
        raise SandboxUnavailable(
            f"{address!r} is no address of a Docker daemon ({exc}); DOCKER_HOST may be {ADDRESSES}"
        ) from exc
    if address.startswith("ssh://"):
        try:
            importlib.import_module("paramiko")
        except ImportError as exc:
            raise SandboxUnavailable(
                f"{address} needs the \"paramiko\" package ({exc}): pip install 'docker[ssh]'"
            ) from exc


def _knock(address: str) -> None:
    """See that somebody listens on a Unix socket: where nobody does, the SDK would leave its own open.

    Raises:
        OSError: nobody does.
    """
    path = address.removeprefix("unix://")
    if path != address and hasattr(socket, "AF_UNIX"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(CALL_S)
            caller.connect(path)


def _connect(docker_host: str | None) -> tuple[APIClient, DaemonInfo]:
    api = connect_api(docker_host)
    try:
        return api, daemon_info(api.info(), api.version(), str(api.base_url))
    except BaseException:
        api.close()
        raise


def daemon_info(info: Mapping[str, Any], version: Mapping[str, Any], base_url: str) -> DaemonInfo:
    """Pick what matters from GET /info and GET /version."""
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
    )


def _update(api: Any, container: str, resources: dict[str, int]) -> None:
    # The SDK's own method knows neither the process limit nor nanoseconds of CPU.
    response = api._post_json(api._url("/containers/{0}/update", container), data=resources)
    api._result(response, True)


def explained(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the SDK; its exceptions come out as ours, with what to do about them."""
    return explained_at("", function, *args, **kwargs)


def explained_at(address: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """As `explained`, naming the daemon's address where nobody answers."""
    try:
        import docker.errors
        import requests.exceptions
    except ImportError as exc:
        raise SandboxUnavailable(f'the Docker backend needs the "docker" package ({exc}): pip install docker') from exc
    try:
        return function(*args, **kwargs)
    except docker.errors.NotFound as exc:
        raise NotThere(_said(exc)) from exc
    except docker.errors.APIError as exc:
        raise (Conflict if exc.status_code in (304, 409) else SandboxUnavailable)(_said(exc)) from exc
    except requests.exceptions.Timeout as exc:
        raise SandboxUnavailable(f"the Docker daemon did not answer within {CALL_S:g} s; is it overloaded?") from exc
    except _no_answer() as exc:
        raise SandboxUnavailable(_unreachable(exc, address)) from exc


def _no_answer() -> tuple[type[Exception], ...]:
    """What the SDK raises where no daemon answers; of paramiko it lets through what is no OSError."""
    import docker.errors
    import requests.exceptions

    paramiko = sys.modules.get("paramiko")
    over_ssh = () if paramiko is None else (paramiko.SSHException,)
    return (docker.errors.DockerException, requests.exceptions.RequestException, OSError, *over_ssh)


def _said(error: Any) -> str:
    return f"the Docker daemon says: {error.explanation or error}"


def _unreachable(error: BaseException, address: str) -> str:
    from docker.errors import APIError

    causes = list(_causes(error))
    at = f" at {address}" if address else ""
    if address.startswith("ssh://"):
        return f"no Docker daemon answers{at} ({error}): see that `ssh {address} docker version` works and asks nothing"
    if any(isinstance(each, PermissionError) for each in causes) or "Permission denied" in str(error):
        return f"this user may not talk to the Docker daemon{at}: join the group of its socket, or run rootless Docker"
    if other := next((each for each in causes if isinstance(each, APIError)), None):
        return f"what answers{at} is no Docker daemon (HTTP {other.status_code}): {SET_IT}, DOCKER_TLS_VERIFY=1 for TLS"
    if not any(isinstance(each, OSError) for each in causes):  # nobody was asked: certificates are missing, perhaps
        return f"cannot ask a Docker daemon{at} ({error}): see DOCKER_HOST, DOCKER_TLS_VERIFY and DOCKER_CERT_PATH"
    return f"no Docker daemon answers{at} ({error}): {START_IT}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
