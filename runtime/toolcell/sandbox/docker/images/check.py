"""Looks at an image from inside, in a container that is shut in: does the guest load, is there anything to misuse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker.client import Client, explained
from toolcell.sandbox.docker.images import reference
from toolcell.sandbox.docker.images.build import run_python
from toolcell.sandbox.docker.images.reference import ImageRef

USER = "65534:65534"
ENTRYPOINT = ["python3", "-P", "-s", "-B", "-m", "toolcell_bridge.entry.container"]
LINKS = {"/work": "/sandbox/work", "/tmp": "/sandbox/tmp", "/var/tmp": "/sandbox/tmp"}

LOOK = """\
import importlib, importlib.metadata, json, os, platform, stat
os.makedirs("/sandbox/work"), os.makedirs("/sandbox/tmp")
import msgpack, RestrictedPython, toolcell_bridge
unusable = {}
for package in %(packages)r:
    files = importlib.metadata.files(package) or ()
    for name in sorted({path.parts[0] for path in files if path.name == "__init__.py" and len(path.parts) == 2}):
        try:
            importlib.import_module(name)
        except Exception as exc:
            unusable[package] = str(exc)
elevating, writable, programs = [], [], []
for folder, folders, names in os.walk("/"):
    if folder == "/":
        folders[:] = [name for name in folders if not os.path.ismount("/" + name) and name != "dev"]
    for name in folders + names:
        path = os.path.join(folder, name)
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            continue
        if mode & 0o6000:
            elevating.append(path)
        if os.access(path, os.W_OK) or mode & 0o022:
            writable.append(path)
        if folder.endswith("bin") and stat.S_ISREG(mode) and mode & 0o111:
            programs.append(name)
print(json.dumps({
    "guest": toolcell_bridge.__version__,
    "python": platform.python_version(),
    "compiled": msgpack.Packer.__module__ == "msgpack._cmsgpack",
    "links": {name: os.readlink(name) if os.path.islink(name) else None for name in %(links)r
              if not os.path.ismount(name)},  # gVisor mounts something over /tmp
    "elevating": elevating, "writable": writable, "programs": programs,
    "unusable": unusable,
}))
"""

SHOWN = 5


def problems(client: Client, image: ImageRef, runtime: str | None = None) -> list[str]:
    """Say what is wrong with an image; an empty list is a good one.

    Args:
        runtime: what to start it with, "runsc" for instance; None is the engine's default.

    Raises:
        SandboxUnavailable: the engine is gone.
    """
    if problem := reference.unusable(image):
        return [problem]
    config: Mapping[str, Any] = explained(client.api.inspect_image, image.id).get("Config") or {}
    try:
        look = LOOK % {"links": list(LINKS), "packages": sorted(image.packages)}
        found = json.loads(run_python(client, image.id, look, runtime))
    except (SandboxUnavailable, ValueError) as exc:
        return [*problems_of_config(config), f"its guest does not load: {exc}"]
    return [*problems_of_config(config), *problems_inside(found, image)]


def require_sound(client: Client, image: ImageRef) -> None:
    """Refuse an image that has problems.

    Raises:
        SandboxUnavailable: it has; names them.
    """
    if found := problems(client, image):
        raise SandboxUnavailable(f"{image.tag} was built and is not sound: {'; '.join(found)}")


def problems_of_config(config: Mapping[str, Any]) -> list[str]:
    """What an image says about how it is to be run."""
    found = []
    if config.get("User") != USER:
        found.append(f"its user is {config.get('User') or 'root'}, not {USER}")
    if config.get("Entrypoint") != ENTRYPOINT:
        found.append(f"its entry point is {config.get('Entrypoint')}, not the guest's")
    if config.get("Volumes"):
        found.append(f"it declares volumes, which outlive containers: {', '.join(config['Volumes'])}")
    return found


def problems_inside(found: Mapping[str, Any], image: ImageRef) -> list[str]:
    """What `LOOK` saw."""
    wrong = []
    if found["guest"] != image.guest_version or found["python"] != image.python:
        wrong.append(f"its labels say otherwise than the guest {found['guest']} and Python {found['python']} inside")
    if not found["compiled"]:
        wrong.append("its msgpack is the slow one in pure Python")
    if any(target != LINKS[name] for name, target in found["links"].items()):
        wrong.append(f"/work and /tmp do not lead into /sandbox: {found['links']}")
    if programs := [name for name in found["programs"] if not name.startswith("python")]:
        wrong.append(f"there are programs in it: {_some(programs)}")
    wrong += [f"its {package} cannot be imported: {why}" for package, why in found["unusable"].items()]
    for what, text in (
        ("elevating", "set-uid or set-gid files"),
        ("writable", "files its user or everybody may write"),
    ):
        if found[what]:
            wrong.append(f"there are {text} in it: {_some(found[what])}")
    return wrong


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
