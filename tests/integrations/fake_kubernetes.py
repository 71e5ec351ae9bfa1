"""An API server with agent-sandbox's controllers and a kubelet, as far as `KubernetesBackend` meets them.

Its pods are processes of this machine, or containers of its Docker engine. It answers as Kubernetes 1.34 and agent-sandbox
1.0 are documented to: objects with versions, watches, merge patches, `Status` for errors, and v4.channel.k8s.io for exec.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import yaml
from aiohttp import WSMsgType, web

import toolcell

TOKEN = "a-token-of-a-service-account"
CORE, AGENTS, EXTENSIONS = "/api/v1", "/apis/agents.x-k8s.io/v1beta1", "/apis/extensions.agents.x-k8s.io/v1beta1"
KINDS = {
    "pods": (CORE, "Pod"),
    "sandboxes": (AGENTS, "Sandbox"),
    "sandboxclaims": (EXTENSIONS, "SandboxClaim"),
    "sandboxtemplates": (EXTENSIONS, "SandboxTemplate"),
    "sandboxwarmpools": (EXTENSIONS, "SandboxWarmPool"),
}
STARTED_S = 60.0


class Kubelet(Protocol):
    """Runs pods."""

    def start(self, pod: dict[str, Any]) -> str:
        """Start the container of a pod; returns its IP."""
        ...

    def command(self, pod: str, command: list[str]) -> tuple[list[str], dict[str, str] | None]:
        """Return what executes `command` in a pod, and its environment."""
        ...

    def is_ready(self, pod: str, probe: list[str]) -> bool:
        """Whether the startup probe of a pod succeeds."""
        ...

    def stop(self, pod: str) -> None:
        """End a pod, and everything in it."""
        ...

    def running(self) -> set[str]:
        """Names of the pods that run."""
        ...


class ProcessKubelet:
    """Pods are processes. They see this machine; only the sandboxes in them are isolated."""

    def __init__(self) -> None:
        self.pods: dict[str, tuple[subprocess.Popen[bytes], str, dict[str, str]]] = {}

    def start(self, pod: dict[str, Any]) -> str:
        container = pod["spec"]["containers"][0]
        home = tempfile.mkdtemp(prefix="toolcell-pod-")
        environment = {each["name"]: each["value"] for each in container.get("env", [])}
        environment |= {"TOOLCELL_POD_DIRECTORY": home, "TMPDIR": home, "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(toolcell.__file__).parents[up]) for up in (1,))
        environment["PYTHONPATH"] += os.pathsep + str(Path(toolcell.__file__).parents[2] / "bridge")
        environment["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        command = [sys.executable, *container["command"][1:]]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        self.pods[pod["metadata"]["name"]] = (process, home, environment)
        return "127.0.0.1"

    def command(self, pod: str, command: list[str]) -> tuple[list[str], dict[str, str] | None]:
        return [sys.executable, *command[1:]], self.pods[pod][2]

    def is_ready(self, pod: str, probe: list[str]) -> bool:
        return Path(self.pods[pod][1], "address").exists()  # what the probe looks for

    def stop(self, pod: str) -> None:
        process, home, _ = self.pods.pop(pod)
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(home, ignore_errors=True)

    def running(self) -> set[str]:
        return {name for name, (process, _, _) in tuple(self.pods.items()) if process.poll() is None}


def _cores(quantity: str) -> float:
    return int(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


class DockerKubelet:
    """Pods are containers, with what a pod's spec asks for."""

    def __init__(self, runtime: str | None = None) -> None:
        self.runtime = runtime
        self.prefix = f"pod-{uuid.uuid4().hex[:8]}-"

    def start(self, pod: dict[str, Any]) -> str:
        spec, name = pod["spec"], self.prefix + pod["metadata"]["name"]
        container = spec["containers"][0]
        context = container["securityContext"]
        flags = ["--name", name, "--user", f"{context['runAsUser']}:{context['runAsGroup']}", "--init=false"]
        flags += ["--read-only"] if context["readOnlyRootFilesystem"] else []
        flags += [] if context["allowPrivilegeEscalation"] else ["--security-opt", "no-new-privileges"]
        flags += [part for each in context["capabilities"]["drop"] for part in ("--cap-drop", each)]
        limits = container["resources"]["limits"]
        memory = limits["memory"].replace("Mi", "m")
        flags += ["--memory", memory, "--memory-swap", memory, "--cpus", str(_cores(limits["cpu"]))]
        volumes = {each["name"]: each["emptyDir"] for each in spec["volumes"]}
        for mount in container["volumeMounts"]:
            size = volumes[mount["name"]]["sizeLimit"].replace("Mi", "m")
            flags += ["--tmpfs", f"{mount['mountPath']}:rw,exec,mode=1777,size={size}"]
        flags += [part for each in container["env"] for part in ("--env", f"{each['name']}={each['value']}")]
        flags += ["--runtime", self.runtime, "--network", "none"] if self.runtime else []
        entry, *arguments = container["command"]
        self._docker("run", "--detach", *flags, "--entrypoint", entry, container["image"], *arguments)
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self._docker("inspect", "--format", form, name).strip()

    def command(self, pod: str, command: list[str]) -> tuple[list[str], dict[str, str] | None]:
        return ["docker", "exec", "--interactive", self.prefix + pod, *command], None

    def is_ready(self, pod: str, probe: list[str]) -> bool:
        done = subprocess.run(["docker", "exec", self.prefix + pod, *probe], capture_output=True, check=False)
        return done.returncode == 0

    def stop(self, pod: str) -> None:
        self._docker("rm", "--force", "--volumes", self.prefix + pod)

    def running(self) -> set[str]:
        found = self._docker("ps", "--all", "--format", "{{.Names}}", "--filter", f"name={self.prefix}").split()
        return {each.removeprefix(self.prefix) for each in found}

    @staticmethod
    def _docker(*arguments: str) -> str:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout


class Refusal(Exception):
    """An answer that is a `Status`."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


class FakeKubernetes:
    """The server, in a thread. Use it with `with`."""

    def __init__(self, kubelet: Kubelet) -> None:
        self.kubelet = kubelet
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.log: list[str] = []
        """Every request: verb, kind, name."""
        self.forbidden: set[str] = set()
        """Pairs of verb and kind: "create sandboxclaims"."""
        self.token = TOKEN
        """Token of whom it serves."""
        self.is_stuck = False
        """No pod gets ready."""
        self.sockets: set[Any] = set()
        self._versions = itertools.count(1)
        self._changed: asyncio.Condition
        self._events: list[tuple[int, str, str, dict[str, Any]]] = []
        """(version, type, kind, object), since the beginning."""
        self._started, self._stopped = threading.Event(), None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._home = tempfile.mkdtemp(prefix="toolcell-kubeconfig-")
        self.port = 0

    def __enter__(self) -> FakeKubernetes:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        shutil.rmtree(self._home, ignore_errors=True)

    @property
    def kubeconfig(self) -> str:
        """Path of a file as kubectl reads it."""
        path = Path(self._home, "config")
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "fake",
                    "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                    "users": [{"name": "me", "user": {"token": TOKEN}}],
                    "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me", "namespace": "agents"}}],
                }
            )
        )
        return str(path)

    def apply(self, *objects: dict[str, Any]) -> None:
        """Create objects, as `kubectl apply` does, and wait until the pools have their pods."""
        for each in objects:
            plural = f"{each['kind'].lower()}s"
            if plural not in KINDS:
                continue
            made = copy.deepcopy(each)
            made["metadata"].setdefault("namespace", "agents")
            asyncio.run_coroutine_threadsafe(self.create(plural, made), self._loop).result(30)
        until = time.monotonic() + STARTED_S
        while not self.is_stuck and any(not pool["status"]["isFull"] for pool in self.all("sandboxwarmpools")):
            assert time.monotonic() < until, "the pools did not fill"
            time.sleep(0.05)

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Every object of a kind."""
        return [each for (plural, _, _), each in list(self.objects.items()) if plural == kind]

    def cut(self) -> None:
        """End every connection to a pod, without a word."""
        for each in list(self.sockets):
            self._loop.call_soon_threadsafe(each.close)

    # The server

    async def _serve(self) -> None:
        self._loop, self._stop, self._changed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Condition()
        app = web.Application(middlewares=[self._guard])
        for base in (CORE, AGENTS, EXTENSIONS):
            path = base + "/namespaces/{namespace}/{kind}"
            app.router.add_get(path, self._list)
            app.router.add_post(path, self._post)
            app.router.add_get(path + "/{name}", self._get)
            app.router.add_patch(path + "/{name}", self._patch)
            app.router.add_delete(path + "/{name}", self._delete)
            app.router.add_get(path + "/{name}/exec", self._exec)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._started.set()
        expiring = asyncio.ensure_future(self._expire())
        await self._stop.wait()
        expiring.cancel()
        for kind, namespace, name in list(self.objects):
            if kind == "sandboxwarmpools":
                self.objects.pop((kind, namespace, name))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self.kubelet.running():
            await asyncio.to_thread(self.kubelet.stop, each)
        await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> Any:
        match = request.match_info
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(request.method, "get")
        kind = match.get("kind", "?") + ("/exec" if request.path.endswith("/exec") else "")
        self.log.append(f"{verb} {kind} {match.get('name', '')}".strip())
        try:
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refusal(401, "Unauthorized", "Unauthorized")
            if f"{verb} {kind}" in self.forbidden:
                said = f'{kind} is forbidden: User "me" cannot {verb} resource "{kind}" in the namespace "agents"'
                raise Refusal(403, "Forbidden", said)
            if match.get("kind") not in KINDS or not request.path.startswith(KINDS[match["kind"]][0]):
                raise Refusal(404, "NotFound", "the server could not find the requested resource")
            return await handler(request)
        except Refusal as exc:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": exc.status}
            return web.json_response(status | {"reason": exc.reason, "message": exc.message}, status=exc.status)

    def _found(self, request: web.Request) -> dict[str, Any]:
        match = request.match_info
        found = self.objects.get((match["kind"], match["namespace"], match["name"]))
        if found is None:
            raise Refusal(404, "NotFound", f'{match["kind"]} "{match["name"]}" not found')
        return found

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._found(request))

    async def _post(self, request: web.Request) -> web.Response:
        match, body = request.match_info, await request.json()
        assert body["kind"] == KINDS[match["kind"]][1], body
        body["metadata"]["namespace"] = match["namespace"]
        if (match["kind"], match["namespace"], body["metadata"]["name"]) in self.objects:
            raise Refusal(409, "AlreadyExists", f'"{body["metadata"]["name"]}" already exists')
        return web.json_response(await self.create(match["kind"], body), status=201)

    async def _patch(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/merge-patch+json", request.content_type
        found = self._found(request)
        merge(found, await request.json())
        await self._note("MODIFIED", request.match_info["kind"], found)
        return web.json_response(found)

    async def _delete(self, request: web.Request) -> web.Response:
        found = self._found(request)
        await self._remove(request.match_info["kind"], found)
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    async def _list(self, request: web.Request) -> web.StreamResponse:
        kind, namespace = request.match_info["kind"], request.match_info["namespace"]
        name = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
        items = [
            each
            for (plural, where, called), each in self.objects.items()
            if (plural, where) == (kind, namespace) and (not name or called == name)
        ]
        if request.query.get("watch") not in ("true", "True", "1"):
            return web.json_response({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})
        answer = web.StreamResponse(headers={"Content-Type": "application/json;stream=watch"})
        await answer.prepare(request)
        seen = int(request.query.get("resourceVersion") or 0)
        until = time.monotonic() + float(request.query.get("timeoutSeconds", 60))
        if not seen:
            for each in items:
                await answer.write(json.dumps({"type": "ADDED", "object": each}).encode() + b"\n")
            seen = self._events[-1][0] if self._events else 0
        while (left := until - time.monotonic()) > 0:
            for version, what, plural, each in list(self._events):
                if version > seen and plural == kind and (not name or each["metadata"]["name"] == name):
                    try:
                        await answer.write(json.dumps({"type": what, "object": each}).encode() + b"\n")
                    except ConnectionError:  # the client has seen enough
                        return answer
            seen = max(seen, self._events[-1][0] if self._events else 0)
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(
                        self._changed.wait_for(lambda: bool(self._events) and self._events[-1][0] > seen),  # noqa: B023
                        left,
                    )
        return answer

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self._found(request)
        assert request.query.get("container") == "sandbox", request.query
        command, environment = self.kubelet.command(name, request.query.getall("command"))
        channel = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await channel.prepare(request)
        assert channel.ws_protocol == "v4.channel.k8s.io"
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin is not None
        self.sockets.add(request.transport)

        async def pass_out(number: int, stream: Any) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await stream.read(32 * 1024):
                    await channel.send_bytes(bytes([number]) + data)

        async def end() -> None:
            await asyncio.gather(pass_out(1, process.stdout), pass_out(2, process.stderr))
            code = await process.wait()
            status = {"metadata": {}, "status": "Success"}
            if code:
                causes = [{"reason": "ExitCode", "message": str(code)}]
                said = f"command terminated with non-zero exit code: exit status {code}"
                status |= {"status": "Failure", "reason": "NonZeroExitCode", "message": said}
                status["details"] = {"causes": causes}
            with contextlib.suppress(ConnectionError):
                await channel.send_bytes(b"\x03" + json.dumps(status).encode())
                await channel.close()

        ending = asyncio.ensure_future(end())
        with contextlib.suppress(ConnectionError):
            async for message in channel:
                if message.type == WSMsgType.BINARY and message.data[:1] == b"\0":
                    process.stdin.write(message.data[1:])
                    await process.stdin.drain()
        # As a kubelet: a program whose caller is gone is not killed; its standard input ends.
        process.stdin.close()
        self.sockets.discard(request.transport)
        self._spawn(ending)
        return channel

    # Objects

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _note(self, what: str, kind: str, each: dict[str, Any]) -> None:
        version = next(self._versions)
        each["metadata"]["resourceVersion"] = str(version)
        self._events.append((version, what, kind, copy.deepcopy(each)))
        async with self._changed:
            self._changed.notify_all()

    async def create(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        meta = body["metadata"]
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": datetime.now(UTC).isoformat()}
        self.objects[kind, meta["namespace"], meta["name"]] = body
        if kind == "sandboxwarmpools":
            body["status"] = {"isFull": False}
            self._spawn(self._fill(body))
        await self._note("ADDED", kind, body)
        answer = copy.deepcopy(body)
        if kind == "sandboxclaims":
            self._spawn(self._bind(body))
        return answer

    async def _remove(self, kind: str, found: dict[str, Any]) -> None:
        meta = found["metadata"]
        self.objects.pop((kind, meta["namespace"], meta["name"]), None)
        await self._note("DELETED", kind, found)
        if kind == "sandboxclaims" and (name := found.get("status", {}).get("sandbox", {}).get("name")):
            for each in ("sandboxes", "pods"):
                if owned := self.objects.pop((each, meta["namespace"], name), None):
                    await self._note("DELETED", each, owned)
            self._spawn(asyncio.to_thread(self.kubelet.stop, name))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for claim in self.all("sandboxclaims"):
                at = datetime.fromisoformat(claim["spec"]["lifecycle"]["shutdownTime"].replace("Z", "+00:00"))
                if at < datetime.now(UTC):
                    assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"
                    await self._remove("sandboxclaims", claim)

    # The controllers of agent-sandbox

    async def _fill(self, pool: dict[str, Any]) -> None:
        """Keep a pool at its size."""
        wanted, key = pool["spec"]["replicas"], pool["metadata"]["name"]
        while self.objects.get(("sandboxwarmpools", "agents", key)) is pool:
            own = [each for each in self.all("sandboxes") if each["pool"] == key and not each["isTaken"]]
            if len(own) < wanted and not self.is_stuck:
                await self._start(pool)
            pool["status"]["isFull"] = len([each for each in own if each["isReady"]]) >= wanted
            await asyncio.sleep(0.02)

    async def _start(self, pool: dict[str, Any], *, is_taken: bool = False) -> dict[str, Any]:
        reference = pool["spec"]["sandboxTemplateRef"]["name"]
        template = self.objects["sandboxtemplates", "agents", reference]["spec"]["podTemplate"]
        name = f"{pool['metadata']['name']}-{uuid.uuid4().hex[:5]}"
        pod = {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "namespace": "agents"}, "status": {}}
        pod |= {"spec": copy.deepcopy(template["spec"])}
        sandbox = {"kind": "Sandbox", "metadata": {"name": name, "namespace": "agents"}, "isTaken": is_taken}
        sandbox |= {"pool": pool["metadata"]["name"], "isReady": False, "status": {}}
        self.objects["pods", "agents", name] = pod
        self.objects["sandboxes", "agents", name] = sandbox
        pod["status"] = {"phase": "Running", "podIP": await asyncio.to_thread(self.kubelet.start, pod)}
        probe = pod["spec"]["containers"][0]["startupProbe"]["exec"]["command"]
        for _ in range(1200):
            if name not in self.kubelet.running() or await asyncio.to_thread(self.kubelet.is_ready, name, probe):
                break
            await asyncio.sleep(0.05)
        sandbox["isReady"] = True
        return sandbox

    async def _bind(self, claim: dict[str, Any]) -> None:
        """Give a claim a pod of its pool, else a new one."""
        wanted = claim["spec"]["warmPoolRef"]["name"]
        pool = self.objects.get(("sandboxwarmpools", "agents", wanted))
        if pool is None:
            await self._say(claim, "False", "WarmPoolNotFound", f'SandboxWarmPool "{wanted}" not found')
            return
        if self.is_stuck:
            await self._say(claim, "False", "SandboxNotReady", "0/3 nodes are available: 3 Insufficient memory")
            return
        own = [each for each in self.all("sandboxes") if each["pool"] == wanted and each["isReady"]]
        sandbox = next((each for each in own if not each["isTaken"]), None)
        if sandbox is None:
            sandbox = await self._start(pool, is_taken=True)
        sandbox["isTaken"] = True
        name = sandbox["metadata"]["name"]
        claim.setdefault("status", {})["sandbox"] = {"name": name}
        if (("sandboxclaims", "agents", claim["metadata"]["name"])) not in self.objects:
            await asyncio.to_thread(self.kubelet.stop, name)  # it was deleted meanwhile
            return
        await self._say(claim, "True", "DependenciesReady", "Pod is Ready")

    async def _say(self, claim: dict[str, Any], status: str, reason: str, message: str) -> None:
        condition = {"type": "Ready", "status": status, "reason": reason, "message": message}
        claim.setdefault("status", {})["conditions"] = [condition]
        await self._note("MODIFIED", "sandboxclaims", claim)


def merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """Apply a merge patch (RFC 7386)."""
    for name, value in patch.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            merge(target[name], value)
        elif value is None:
            target.pop(name, None)
        else:
            target[name] = value
