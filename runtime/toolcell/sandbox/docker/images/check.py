"""Check an image from inside: run its interpreter in an isolated container, and look at what is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker.client import EngineClient, call_api
from toolcell.sandbox.docker.images import reference
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.images.site import DESCRIBE_PYTHON, ImagePython
from toolcell.sandbox.process.programs import NAMES

PROBE_TIMEOUT_S = 60

USER = "65534:65534"
ENTRYPOINT = ["python3", "-P", "-s", "-B", "-m", "toolcell_bridge.entry.container"]
LINKS = {"/work": "/sandbox/work", "/tmp": "/sandbox/tmp", "/var/tmp": "/sandbox/tmp"}

INSPECT = """\
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

SHELL_PROGRAMS = frozenset({*NAMES, "dash", "mawk", "gawk"})
"""What an image of a shell may have."""


def ask_python(client: EngineClient, image: str) -> ImagePython:
    """Run an image's interpreter once to learn its version and platform.

    Raises:
        SandboxUnavailable: the image has no Python, or it does not run here.
    """
    try:
        return ImagePython.read(run_python(client, image, DESCRIBE_PYTHON))
    except (ValueError, TypeError) as exc:
        raise SandboxUnavailable(f"the Python in {image} did not describe itself: {exc}") from exc


def run_python(client: EngineClient, image: str, code: str, runtime: str | None = None) -> str:
    """Run our own code in a container of `image`, without network and nearly read-only; return what it printed.

    Raises:
        SandboxUnavailable: there is no python3, or it failed; repeats its last lines.
    """
    api = client.api
    container = str(call_api(api.create_container_from_config, _probe_config(image, code, runtime))["Id"])
    try:
        call_api(api.start, container)
        status = int(call_api(api.wait, container, timeout=PROBE_TIMEOUT_S)["StatusCode"])
        output = call_api(api.logs, container, stdout=True, stderr=bool(status)).decode(errors="replace")
    finally:
        call_api(api.remove_container, container, v=True, force=True)
    if status:
        last = "\n".join(output.strip().splitlines()[-5:])
        raise SandboxUnavailable(f"python3 in {image} failed (exit status {status}): {last}")
    return output


def _probe_config(image: str, code: str, runtime: str | None) -> dict[str, Any]:
    return {
        "Image": image,
        "Entrypoint": ["python3", "-P", "-s", "-B", "-c", code],
        "Cmd": [],
        "Labels": {reference.ROLE: reference.PROBE},
        "Env": ["OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"],
        "HostConfig": {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "PidsLimit": 256,  # gVisor's own threads count too, some dozens
            "Tmpfs": {"/sandbox": "size=64m,uid=65534,gid=65534,mode=0700"},
            **({"Runtime": runtime} if runtime else {}),
        },
    }


def problems(client: EngineClient, image: ImageRef, runtime: str | None = None) -> list[str]:
    """Return the problems of an image; an empty list means that it is sound.

    Args:
        runtime: runtime to start it with, for example "runsc"; None is the engine's default.

    Raises:
        SandboxUnavailable: the engine is gone.
    """
    if problem := reference.why_unusable(image):
        return [problem]
    config: Mapping[str, Any] = call_api(client.api.inspect_image, image.id).get("Config") or {}
    try:
        code = INSPECT % {"links": list(LINKS), "packages": sorted(image.packages)}
        found = json.loads(run_python(client, image.id, code, runtime))
    except (SandboxUnavailable, ValueError) as exc:
        return [*problems_of_config(config), f"its guest does not load: {exc}"]
    return [*problems_of_config(config), *problems_inside(found, image)]


def require_sound(client: EngineClient, image: ImageRef) -> None:
    """Check that an image has no problems.

    Raises:
        SandboxUnavailable: it has problems; the message names them.
    """
    if found := problems(client, image):
        raise SandboxUnavailable(f"{image.tag} was built and is not sound: {'; '.join(found)}")


def problems_of_config(config: Mapping[str, Any]) -> list[str]:
    """Return the problems in an image's configuration."""
    found = []
    if config.get("User") != USER:
        found.append(f"its user is {config.get('User') or 'root'}, not {USER}")
    if config.get("Entrypoint") != ENTRYPOINT:
        found.append(f"its entry point is {config.get('Entrypoint')}, not the guest's")
    if config.get("Volumes"):
        found.append(f"it declares volumes, which outlive containers: {', '.join(config['Volumes'])}")
    return found


def problems_inside(found: Mapping[str, Any], image: ImageRef) -> list[str]:
    """Return the problems in what `INSPECT` reported."""
    wrong = []
    if found["guest"] != image.guest_version or found["python"] != image.python:
        wrong.append(f"its labels say otherwise than the guest {found['guest']} and Python {found['python']} inside")
    if not found["compiled"]:
        wrong.append("its msgpack is the slow one in pure Python")
    if any(target != LINKS[name] for name, target in found["links"].items()):
        wrong.append(f"/work and /tmp do not lead into /sandbox: {found['links']}")
    known = SHELL_PROGRAMS if image.has_programs else frozenset()
    if programs := [name for name in found["programs"] if not name.startswith("python") and name not in known]:
        wrong.append(f"there are programs in it: {_first_few(programs)}")
    wrong += [f"its {package} cannot be imported: {why}" for package, why in found["unusable"].items()]
    for what, text in (
        ("elevating", "set-uid or set-gid files"),
        ("writable", "files its user or everybody may write"),
    ):
        if found[what]:
            wrong.append(f"there are {text} in it: {_first_few(found[what])}")
    return wrong


def _first_few(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
