"""`toolcell kubernetes`: what a cluster needs for `KubernetesBackend`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolcell.cli.arguments import as_flag, parse_size
from toolcell.cli.flags import AsJson, group
from toolcell.cli.terminal import output
from toolcell.config import Limits
from toolcell.errors import MissingPackage, UsageError

SUMMARY = """Sandboxes in pods of a Kubernetes cluster: `Runtime(registry, backend=KubernetesBackend())`.

The cluster needs agent-sandbox (kubernetes-sigs/agent-sandbox) with its extensions.
"""

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
    from toolcell.sandbox.kubernetes import PodSettings, manifests

    if runtime_class is not None and "gvisor" in runtime_class and sandboxes > 1:
        raise UsageError("sandboxes of one pod are kept apart by Landlock, which gVisor has not; use --sandboxes 1")
    limits = _limits(memory, disk)
    settings = PodSettings(image, limits=limits, sandboxes=sandboxes, cpus=cpus, runtime_class=runtime_class)
    objects = manifests(settings, pool=pool, namespace=namespace, replicas=replicas, service_account=service_account)
    shown = {"apiVersion": "v1", "kind": "List", "items": objects}
    output(shown, as_json, lambda: typer.echo(_yaml(objects), nl=False))


def _yaml(objects: list[dict[str, Any]]) -> str:
    """Return objects as kubectl reads them.

    Raises:
        MissingPackage: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as exc:
        raise MissingPackage("manifests need PyYAML: pip install 'toolcell[kubernetes]'") from exc
    text: str = yaml.safe_dump_all(objects, sort_keys=False)
    return text


def _limits(memory: int | None, disk: int | None) -> Limits:
    given = {"memory_bytes": memory, "disk_bytes": disk}
    try:
        return Limits(**{name: size for name, size in given.items() if size is not None})
    except UsageError as exc:
        raise UsageError(as_flag(exc).replace("-bytes", "", 1)) from exc


register = group(SUMMARY, {"manifest": manifest})
