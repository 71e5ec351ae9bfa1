"""The objects of `sandbox_images/kubernetes/sandboxes.yaml`, changed as its comments say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from toolcell import Limits
from toolcell.config import MIB
from toolcell.sandbox.kubernetes.pods import memory_for

FILE = Path(__file__).parents[1] / "sandbox_images" / "kubernetes" / "sandboxes.yaml"


def pool_of(
    image: str,
    limits: Limits | None = None,
    sandboxes: int = 1,
    runtime_class: str | None = None,
    replicas: int | None = None,
) -> list[dict[str, Any]]:
    objects: list[dict[str, Any]] = list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))
    template, pool = objects[0]["spec"]["podTemplate"], objects[1]["spec"]
    (container,) = template["spec"]["containers"]
    container["image"] = image
    (alone,) = container["env"]
    alone["value"] = str(int(sandboxes == 1))
    most = limits or Limits()
    for kind in container["resources"].values():
        kind["memory"] = f"{memory_for(most, sandboxes) // MIB}Mi"
    template["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] = f"{most.disk_bytes * (sandboxes + 2) // MIB}Mi"
    if runtime_class is not None:
        template["spec"]["runtimeClassName"] = runtime_class
    pool["replicas"] = pool["replicas"] if replicas is None else replicas
    return objects
