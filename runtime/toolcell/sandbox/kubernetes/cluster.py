"""`Cluster`: everything that is asked of the API server: claims of agent-sandbox, their pods, programs in them.

All of it runs in the event loop of a `LoopThread`: the client libraries of Kubernetes need asyncio, a Runtime may run
under trio, and its event loop may stand still while a tool blocks.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.kubernetes.pod_server import PodAddress
from toolcell.sandbox.kubernetes.pods import CONTAINER, RELAY
from toolcell.support.log import logger_of

# Bytes to and from a program that is executed in a pod, over one WebSocket through the API server.


STDIN, STDOUT, STDERR, STATUS = 0, 1, 2, 3

PIECE_BYTES: Final = 1 << 15
"""What a message carries at most: some servers take no more than 32 KiB of it at once."""

HEAD_BYTES: Final = 4
ADDRESS_BYTES: Final = 1 << 16
LAST_WORDS_BYTES: Final = 2000


class ExecutedProgram:
    """A relay in a pod, from the WebSocket's side. It runs in the event loop of the cluster's thread."""

    def __init__(self, websocket: Any, where: str) -> None:
        self._websocket = websocket
        self._where = where
        self._messages = self._output()
        self._received = bytearray()
        self._last_words = b""

    async def _output(self) -> AsyncIterator[bytes]:
        async for message in self._websocket:
            data = message.data
            if not isinstance(data, bytes) or not data:
                continue
            if data[0] == STDOUT:
                yield data[1:]
            elif data[0] == STDERR:
                self._last_words = (self._last_words + data[1:])[-LAST_WORDS_BYTES:]
            elif data[0] == STATUS and not self._last_words:
                with suppress(ValueError, AttributeError):
                    self._last_words = str(json.loads(data[1:]).get("message") or "").encode()

    async def address(self) -> PodAddress:
        """Return what the pod says about itself, before anything else is read.

        Raises:
            SandboxUnavailable: the pod has no toolcell, or is gone.
        """
        head = int.from_bytes(await self._exactly(HEAD_BYTES), "big")
        if not 0 < head <= ADDRESS_BYTES:
            raise SandboxUnavailable(f"{self._where} has another program than toolcell's")
        try:
            return PodAddress.unpack(await self._exactly(head))
        except ValueError as exc:
            raise SandboxUnavailable(f"{self._where}: {exc}") from exc

    async def _exactly(self, count: int) -> bytes:
        while len(self._received) < count:
            piece = await anext(self._messages, b"")
            if not piece:
                why = self._last_words.decode("utf-8", "replace").strip() or "the connection ended"
                raise SandboxUnavailable(f"nothing could be executed in {self._where}: {why}")
            self._received += piece
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    async def carry(self, sock: socket.socket) -> None:
        """Pass bytes between `sock` and the program until one of them ends; closes both."""
        sock.setblocking(False)
        sending = asyncio.ensure_future(self._pass_in(sock))
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, bytes(self._received))
            async for piece in self._messages:
                await loop.sock_sendall(sock, piece)
        except OSError:
            pass  # nobody reads any more
        finally:
            sending.cancel()
            with suppress(BaseException):
                await sending
            sock.close()
            await self.aclose()

    async def _pass_in(self, sock: socket.socket) -> None:
        loop, prefix = asyncio.get_running_loop(), bytes([STDIN])
        while True:
            data = await loop.sock_recv(sock, PIECE_BYTES - HEAD_BYTES - 1)
            await self._websocket.send_bytes(prefix + len(data).to_bytes(HEAD_BYTES, "big") + data)
            if not data:
                return

    async def aclose(self) -> None:
        """Close the connection. The program ends with it."""
        with suppress(Exception):
            await self._websocket.close()


logger = logger_of("toolcell.kubernetes")

GROUP: Final = "extensions.agents.x-k8s.io"
VERSION: Final = "v1beta1"
CLAIMS: Final = "sandboxclaims"
POOLS: Final = "sandboxwarmpools"
POD_NAME: Final = "agents.x-k8s.io/pod-name"
OWNER_LABEL: Final = "toolcell-backend"

SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
HEARTBEAT_S: Final = 15.0
REFRESH_S: Final = 30.0
"""How often the credentials of a kubeconfig are looked at again."""
REQUEST_S: Final = 30.0

INSTALL = (
    "the cluster has no {plural}: install agent-sandbox with its extensions (kubernetes-sigs/agent-sandbox), API "
    f"{GROUP}/{VERSION}"
)
UNKNOWN = (
    "the API server does not know this caller: {why}; its credentials have expired or are of another cluster. "
    "`kubectl auth whoami` shows what a kubeconfig gives"
)
MANIFEST: Final = "sandbox_images/kubernetes/sandboxes.yaml of toolcell"
FORBIDDEN = (
    "the API server does not allow {verb} {plural} in the namespace {namespace}: {why}; the Role that is "
    f"needed is in {MANIFEST}"
)


@dataclass(frozen=True, slots=True)
class ClaimedPod:
    """A pod that belongs to one claim of this backend."""

    claim: str
    name: str
    body: Mapping[str, Any] = field(repr=False)


class Cluster:
    """The connection with one API server."""

    def __init__(self, pool: str, namespace: str | None, kubeconfig: str | None, context: str | None) -> None:
        self.pool = pool
        self.namespace = namespace or ""
        self._kubeconfig, self._context = kubeconfig, context
        self._owner = uuid.uuid4().hex
        self._claims: set[str] = set()
        """Names of the claims that were made and not deleted."""
        self._given_up: set[str] = set()
        """Those of them that could not be deleted: their lease ends them."""
        self._apis: Any = None
        self._helper: Any = None
        self._sockets: Any = None

    # The connection

    async def connect(self) -> None:
        """Connect, and look whether the pool is there.

        Raises:
            ImportError: the client is not installed.
            SandboxUnavailable: there is no cluster, no pool, or no right; says what to do.
        """
        from k8s_agent_sandbox.async_k8s_helper import AsyncK8sHelper
        from kubernetes_asyncio import client
        from kubernetes_asyncio.stream import WsApiClient

        configuration = await self._configuration()
        try:
            self._apis = client.ApiClient(configuration)
            self._sockets = WsApiClient(configuration, heartbeat=HEARTBEAT_S)
        except (OSError, ValueError) as exc:
            await self.aclose()
            raise SandboxUnavailable(f"the certificates of the kubeconfig cannot be used: {exc}") from exc
        self._helper = AsyncK8sHelper(self._apis)
        try:
            get = client.CustomObjectsApi(self._apis).get_namespaced_custom_object
            await self._ask("get", POOLS, get(GROUP, VERSION, self.namespace, POOLS, self.pool))
        except BaseException:
            await self.aclose()
            raise

    async def _configuration(self) -> Any:
        from kubernetes_asyncio import client, config

        configuration = client.Configuration()
        try:
            if self._kubeconfig is None and self._context is None:
                with suppress(config.ConfigException):
                    config.load_incluster_config(client_configuration=configuration)
                    if not self.namespace:
                        with open(SERVICE_ACCOUNT, encoding="ascii") as file:
                            self.namespace = file.read().strip()
                    return configuration
            load = config.load_kube_config(self._kubeconfig, self._context, client_configuration=configuration)
            configuration.refresh_api_key_hook = Refresh(await asyncio.wait_for(load, REQUEST_S))
            if not self.namespace:
                contexts, active = config.list_kube_config_contexts(self._kubeconfig)
                chosen = next((each for each in contexts if each["name"] == self._context), active)
                self.namespace = chosen["context"].get("namespace") or "default"
        except Exception as exc:  # the loader raises whatever a broken file leads to
            why = f"{type(exc).__name__}: {exc}".splitlines()[0]
            if isinstance(exc, TimeoutError):
                why = f"its program gave no credentials within {REQUEST_S:g} s"
            where = self._kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
            raise SandboxUnavailable(
                f"the kubeconfig {where} leads to no cluster: {why}. `kubectl cluster-info` has to work with it; "
                "pass another as kubeconfig=, set KUBECONFIG, or run in a pod"
            ) from exc
        return configuration

    async def _ask(self, verb: str, plural: str, request: Any, watched_s: float | None = None) -> Any:
        """Await a request, and say in our words why it failed. `watched_s`: it may take this long.

        Raises:
            SandboxUnavailable: it failed.
            TimeoutError: what was watched for did not happen.
        """
        import aiohttp
        from kubernetes_asyncio.client import ApiException

        try:
            return await asyncio.wait_for(request, REQUEST_S if watched_s is None else watched_s)
        except ApiException as exc:
            why = _message(exc)
            if exc.status in (401, 403):
                said = self._refusal(exc.status, verb, plural, why)
            elif exc.status == 404 and plural == POOLS and self.pool in why:
                said = (
                    f"the namespace {self.namespace} has no SandboxWarmPool {self.pool!r}; "
                    f"make one: {MANIFEST} describes it"
                )
            elif exc.status == 404 and plural in (POOLS, CLAIMS) and "not found" not in why:  # the kind, not one of it
                said = INSTALL.format(plural=plural)
            else:
                said = f"the API server could not {verb} {plural}: {exc.status} {why}"
            raise SandboxUnavailable(said) from exc
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            if watched_s is not None and isinstance(exc, TimeoutError):
                raise
            raise SandboxUnavailable(f"the API server does not answer: {str(exc) or type(exc).__name__}") from exc

    def _refusal(self, status: int, verb: str, plural: str, why: str) -> str:
        text = UNKNOWN if status == 401 else FORBIDDEN
        return text.format(verb=verb, plural=plural, namespace=self.namespace, why=why)

    # Claims

    async def claim(self, ready_s: float, lease_s: float) -> ClaimedPod:
        """Claim a pod of the pool, and wait until it is ready.

        Cancellation, and errors: the claim is deleted.

        Raises:
            SandboxUnavailable: there is none; says why.
        """
        from k8s_agent_sandbox.exceptions import SandboxError

        name = f"toolcell-{uuid.uuid4().hex[:20]}"
        labels = {OWNER_LABEL: self._owner}
        lifecycle = {"shutdownTime": _after(lease_s), "shutdownPolicy": "Delete"}
        create = self._helper.create_sandbox_claim(name, self.pool, self.namespace, labels=labels, lifecycle=lifecycle)
        creating = asyncio.ensure_future(self._ask("create", CLAIMS, create))
        self._claims.add(name)
        try:
            made = await asyncio.shield(creating)
            seen = (made.get("metadata") or {}).get("resourceVersion")
            wait = self._helper.wait_for_claim_ready(name, self.namespace, ready_s, resource_version=seen)
            try:
                sandbox = await self._ask("watch", CLAIMS, wait, ready_s)
            except TimeoutError as exc:
                raise SandboxUnavailable(await self._why_not(name, ready_s)) from exc
            except SandboxError as exc:
                raise SandboxUnavailable(f"the pool {self.pool!r} gives no pod: {exc}") from exc
            found = await self._ask("get", "sandboxes", self._helper.get_sandbox(sandbox, self.namespace)) or {}
            pod = ((found.get("metadata") or {}).get("annotations") or {}).get(POD_NAME) or sandbox
            return ClaimedPod(name, pod, await self._ask("get", "pods", self._read_pod(pod)))
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._release_later(name, creating)))
            raise

    async def _release_later(self, name: str, creating: asyncio.Future[Any]) -> None:
        """Delete a claim when it is certain that it is there, or is not: a request under way may still make it."""
        await asyncio.wait({creating})
        if not creating.cancelled():
            creating.exception()  # the caller has it, or does not want it any more
        with suppress(SandboxUnavailable):
            await self.release(name)

    async def _read_pod(self, name: str) -> dict[str, Any]:
        """Return a pod as the API server tells it: the client's classes leave out fields that they do not know."""
        from kubernetes_asyncio.client import ApiException, CoreV1Api

        answer = await CoreV1Api(self._apis).read_namespaced_pod(name, self.namespace, _preload_content=False)
        text = await answer.text()
        if answer.status != 200:
            refused = ApiException(answer.status, answer.reason)
            refused.body = text
            raise refused
        found: dict[str, Any] = json.loads(text)
        return found

    async def _why_not(self, name: str, ready_s: float) -> str:
        said = ""
        with suppress(SandboxUnavailable):
            found = await self._ask("get", CLAIMS, self._helper.get_sandbox_claim(name, self.namespace)) or {}
            conditions = (found.get("status") or {}).get("conditions") or ()
            said = "; ".join(f"{each.get('reason')}: {each.get('message')}" for each in conditions)
        said = said or "its status says nothing; does agent-sandbox's controller run?"
        return f"no pod of the pool {self.pool!r} was ready within {ready_s:g} s: {said}"

    async def release(self, claim: str) -> None:
        """Delete a claim; its pod is deleted with it.

        Raises:
            SandboxUnavailable: the API server does not answer. The claim is kept in mind, and ends by its lease.
        """
        if claim in self._claims:
            self._given_up.add(claim)
            await self._ask("delete", CLAIMS, self._helper.delete_sandbox_claim(claim, self.namespace))
            self._claims.discard(claim)
            self._given_up.discard(claim)

    async def renew(self, lease_s: float) -> list[str]:
        """Let the claims live longer, also those whose pod is not ready yet. Returns what went wrong."""
        from kubernetes_asyncio.client import CustomObjectsApi

        patch = CustomObjectsApi(self._apis).patch_namespaced_custom_object
        body = {"spec": {"lifecycle": {"shutdownTime": _after(lease_s)}}}
        requests = [
            self._ask(
                "patch",
                CLAIMS,
                patch(GROUP, VERSION, self.namespace, CLAIMS, name, body, _content_type="application/merge-patch+json"),
            )
            for name in self._claims - self._given_up
        ]
        # Side by side: a slow server must not let the last ones end meanwhile.
        answers = await asyncio.gather(*requests, return_exceptions=True)
        return [f"{type(each).__name__}: {each}" for each in answers if isinstance(each, Exception)]

    # Programs in pods

    async def execute(self, pod: str) -> ExecutedProgram:
        """Execute a relay in a pod.

        Raises:
            SandboxUnavailable: that cannot be done; says why.
        """
        import aiohttp
        from kubernetes_asyncio.client import CoreV1Api

        connecting = await CoreV1Api(self._sockets).connect_get_namespaced_pod_exec(
            pod,
            self.namespace,
            container=CONTAINER,
            command=[*RELAY],
            stdin=True,
            stdout=True,
            stderr=True,
            tty=False,
            _preload_content=False,
        )
        try:
            websocket = await asyncio.wait_for(connecting, REQUEST_S)
        except aiohttp.WSServerHandshakeError as exc:
            if exc.status in (401, 403):
                raise SandboxUnavailable(self._refusal(exc.status, "create", "pods/exec", exc.message)) from exc
            raise SandboxUnavailable(f"nothing can be executed in the pod {pod}: {exc.status} {exc.message}") from exc
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            raise SandboxUnavailable(f"the API server does not answer: {str(exc) or type(exc).__name__}") from exc
        return ExecutedProgram(websocket, f"the pod {pod}")

    async def aclose(self) -> None:
        """Delete every claim of this backend, and disconnect."""
        await asyncio.gather(*[self.release(each) for each in tuple(self._claims)], return_exceptions=True)
        for each in (self._apis, self._sockets):
            if each is not None:
                await each.close()


class Refresh:
    """Keeps the token of a kubeconfig fresh: those of a program (`exec`), a file or OIDC hold for minutes.

    The client calls it before each request. The loader asks the program again when a token expires within 5 minutes.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._at = time.monotonic()

    async def __call__(self, configuration: Any) -> None:
        """Read the token again, if the last time was long ago."""
        if time.monotonic() - self._at < REFRESH_S:
            return
        self._at = time.monotonic()  # others go on with the old token meanwhile
        try:
            await asyncio.wait_for(self._loader.load_and_set(configuration), REQUEST_S)
        except Exception as exc:  # the old token may still hold; if not, the API server says so
            logger.warning("the credentials of the kubeconfig could not be renewed: %s", str(exc) or type(exc).__name__)


def _after(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _message(exc: Any) -> str:
    with suppress(ValueError, AttributeError, TypeError):
        return str(json.loads(exc.body)["message"])
    return str(exc.reason)
