"""`toolcell kubernetes`: what a cluster needs for `KubernetesBackend`, and whether its pool starts sandboxes."""

from __future__ import annotations

from typing import Annotated, Any

import anyio
import typer

from toolcell.cli import exits
from toolcell.cli.arguments import as_flag, parse_size
from toolcell.cli.flags import AsJson, group
from toolcell.cli.terminal import output, print_json, safe, stdout
from toolcell.config import CONTAINER_LAYERS, Limits
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.support.checks import brief

SUMMARY = """Sandboxes in pods of a Kubernetes cluster: `Runtime(registry, backend=KubernetesBackend())`.

The cluster needs agent-sandbox (kubernetes-sigs/agent-sandbox) with its extensions.
"""

EPILOG = f"Exit status of `check`: {exits.OK} a sandbox started, {exits.UNAVAILABLE} none did."

Pool = Annotated[str, typer.Option("--pool", metavar="NAME", help="Name of the SandboxWarmPool and its template.")]


def manifest(
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="The image of `toolcell images build --service`, in your registry.")
    ],
    pool: Pool = "toolcell",
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of pods and caller.")] = "default",
    replicas: Annotated[int, typer.Option(min=0, help="Pods kept warm.")] = 2,
    sandboxes: Annotated[int, typer.Option(min=1, help="Sandboxes in one pod at the same time.")] = 1,
    memory: Annotated[
        int | None, typer.Option(metavar="SIZE", parser=parse_size, help="Largest memory_bytes of a run.")
    ] = None,
    disk: Annotated[
        int | None, typer.Option(metavar="SIZE", parser=parse_size, help="Largest disk_bytes of a run.")
    ] = None,
    cpus: Annotated[float, typer.Option(min=0.01, max=1024, help="Processors of a pod.")] = 1.0,
    runtime_class: Annotated[
        str | None, typer.Option("--runtime-class", metavar="NAME", help="RuntimeClass of the pods, such as gvisor.")
    ] = None,
    service_account: Annotated[
        str, typer.Option("--service-account", help="Service account of the caller.")
    ] = "default",
    as_json: AsJson = False,
) -> None:
    """Write the template, the warm pool and the caller's rights: `... | kubectl apply -f -`."""
    from toolcell.sandbox.kubernetes import IMAGE, PodSettings, check_name, manifests, to_yaml

    names = {"--pool": pool, "--namespace": namespace, "--service-account": service_account}
    for flag, name in (names if runtime_class is None else names | {"--runtime-class": runtime_class}).items():
        check_name(flag, name)
    if not IMAGE.fullmatch(image):
        raise UsageError(f"--image takes a name such as registry.example/toolcell/service:0.1.0, not {brief(image)}")
    if runtime_class is not None and "gvisor" in runtime_class and sandboxes > 1:
        raise UsageError("sandboxes of one pod are kept apart by Landlock, which gVisor has not; use --sandboxes 1")
    settings = PodSettings(
        image,
        _limits(memory, disk),
        sandboxes=sandboxes,
        cpus=cpus,
        runtime_class=runtime_class,
    )
    objects = manifests(settings, pool=pool, namespace=namespace, replicas=replicas, service_account=service_account)
    shown = {"apiVersion": "v1", "kind": "List", "items": objects}
    output(shown, as_json, lambda: typer.echo(to_yaml(objects), nl=False))


def _limits(memory: int | None, disk: int | None) -> Limits:
    given = {"memory_bytes": memory, "disk_bytes": disk}
    try:
        return Limits(**{name: size for name, size in given.items() if size is not None})
    except UsageError as exc:
        raise UsageError(as_flag(exc).replace("-bytes", "", 1)) from exc


def check(
    pool: Pool = "toolcell",
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Namespace of the pool [default: that of the context].")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="LAYER", help="Do not require this layer: landlock under gVisor."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a sandbox in a pod of the pool, run a script in it, and show its isolation."""
    if unknown := sorted(set(without or ()) - CONTAINER_LAYERS):
        raise UsageError(f"--without {unknown[0]!r}: the layers are {', '.join(sorted(CONTAINER_LAYERS))}")
    found = anyio.run(_check, pool, namespace, context, frozenset(without or ()))
    if as_json:
        print_json(found)
    elif found["ok"]:
        for name, detail in sorted(found["layers"].items()):
            stdout().print(safe(f"{name:14} {detail}"), soft_wrap=True)
        stdout().print(safe(f"the pool {pool!r} starts sandboxes"), soft_wrap=True)
    else:
        stdout().print(safe(f"the pool {pool!r} starts no sandbox: {found['problem']}"), soft_wrap=True)
    raise typer.Exit(exits.OK if found["ok"] else exits.UNAVAILABLE)


async def _check(pool: str, namespace: str | None, context: str | None, without: frozenset[str]) -> dict[str, Any]:
    from toolcell.config import Policy, PoolConfig
    from toolcell.runtime import Runtime
    from toolcell.sandbox.kubernetes import KubernetesBackend

    policy = Policy(profile="container", require=CONTAINER_LAYERS - without)
    backend = KubernetesBackend(pool, namespace=namespace, context=context, policy=policy)
    try:
        async with Runtime(backend=backend, pool=PoolConfig(warm=0)) as runtime:
            result = await runtime.execute_code("6 * 7")
    except SandboxUnavailable as exc:
        return {"ok": False, "problem": str(exc), "layers": {}}
    problem = "" if result.ok else str(result.error.message if result.error is not None else result.outcome)
    return {"ok": result.ok, "problem": problem, "layers": dict(result.isolation.layers)}


register = group(SUMMARY, {"manifest": manifest, "check": check}, epilog=EPILOG)
