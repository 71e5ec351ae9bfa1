"""Find and describe images: names, labels, and the checks before an image is used.

Blocking, like the SDK: use a worker thread. A missing image is reported and never pulled.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import toolcell_bridge
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker.client import EngineClient, NotFound, call_api

LABEL = "io.toolcell."
GUEST, PYTHON, ROLE = f"{LABEL}guest", f"{LABEL}python", f"{LABEL}role"
SOURCES = f"{LABEL}sources"
"""Digest of the guest's sources. During development, images of one version contain different sources."""
BASE = f"{LABEL}base"
"""The image that this one was built on: its digest when it came from a registry, else its id."""
PACKAGES = f"{LABEL}packages"
"""JSON object, name to version, of the packages that scripts can import beside the standard library."""
PROGRAMS = f"{LABEL}programs"
"""Set for an image that has the programs of a shell."""
KEY = f"{LABEL}key"
"""Content address of an image that was derived for a list of packages."""

REPOSITORY, DATA_REPOSITORY, SHELL_REPOSITORY = "toolcell/python", "toolcell/python-data", "toolcell/shell"
DERIVED_REPOSITORY, DEBIAN_REPOSITORY = "toolcell/packages", "toolcell/debian"
SANDBOX, SERVICE, DEBIAN, STAGE, PROBE = "sandbox", "service", "debian", "stage", "question"
"""Roles. A stage is an intermediate image that makes the next build quick. A probe is a container that runs once."""

VERSION = toolcell_bridge.__version__
DEFAULT_IMAGE = f"{REPOSITORY}:{VERSION}"
DATA_IMAGE = f"{DATA_REPOSITORY}:{VERSION}"
SHELL_IMAGE = f"{SHELL_REPOSITORY}:{VERSION}"
SERVICE_IMAGE = f"toolcell/service:{VERSION}"

HOW_TO_BUILD = "toolcell images build (add --debian where no container registry can be reached)"


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image of the engine, identified by content."""

    id: str
    """sha256:... Containers are created from the id, so a tag that moves in between changes nothing."""
    tag: str
    python: str
    guest_version: str
    sources: str = ""
    """Digest of the guest's sources in the image."""
    base: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    has_programs: bool = False
    """It has the programs of a shell."""
    size_bytes: int = 0
    created: str = ""

    @property
    def is_current(self) -> bool:
        """The image contains the same guest as this installation."""
        return self.guest_version == VERSION and self.sources == guest_sources()

    @property
    def has_guest(self) -> bool:
        """The image is one of toolcell's."""
        return bool(self.guest_version)


def require_image(client: EngineClient, image: str | None = None) -> ImageRef:
    """Find `image`, else the default one, and check that its guest speaks our protocol.

    Raises:
        SandboxUnavailable: the image is missing, is not a sandbox image, or has a guest of another version.
    """
    name = image or DEFAULT_IMAGE
    found = find_image(client, name)
    if found is None:
        raise SandboxUnavailable(f"the engine has no image {name}; {how_to_get(name)}")
    if problem := why_unusable(found):
        raise SandboxUnavailable(problem)
    return found


def how_to_get(name: str) -> str:
    """Say how to get a missing image. Our command builds our own three images; the caller builds any other."""
    if name in (DEFAULT_IMAGE, DATA_IMAGE, SHELL_IMAGE):
        ours = {DATA_IMAGE: "toolcell images build --data", SHELL_IMAGE: "toolcell images build --shell"}
        return f"build it: {ours.get(name, HOW_TO_BUILD)}"
    return (
        f"docker pull or docker build it and see that it fits: toolcell images check {name}; "
        f"or leave the image out for {DEFAULT_IMAGE}, which `toolcell images build` makes"
    )


def why_unusable(found: ImageRef) -> str | None:
    """Return why no sandbox can be made of an image; None when it can."""
    if not found.has_guest:
        return (
            f"{found.tag} is not a sandbox image (it has no label {GUEST}); build one on it: "
            f"toolcell images build --base {found.tag}"
        )
    if found.guest_version != VERSION:
        return (
            f"the guest in {found.tag} is toolcell {found.guest_version}, this is toolcell {VERSION}; "
            f"build it anew: {HOW_TO_BUILD}"
        )
    return None


def find_image(client: EngineClient, name: str) -> ImageRef | None:
    try:
        inspected = call_api(client.api.inspect_image, name)
    except NotFound:
        return None
    return read_image(inspected, name)


def read_image(inspected: Mapping[str, Any], name: str = "") -> ImageRef:
    """Read the answer of GET /images/{name}/json."""
    labels: Mapping[str, str] = (inspected.get("Config") or {}).get("Labels") or {}
    tags = _tags(inspected)
    return ImageRef(
        id=str(inspected["Id"]),
        tag=name or (tags[0] if tags else str(inspected["Id"])),
        python=labels.get(PYTHON, ""),
        guest_version=labels.get(GUEST, ""),
        sources=labels.get(SOURCES, ""),
        base=labels.get(BASE, ""),
        packages=_packages(labels.get(PACKAGES, "")),
        has_programs=PROGRAMS in labels,
        size_bytes=int(inspected.get("Size") or 0),
        created=str(inspected.get("Created") or ""),
    )


def _packages(label: str) -> dict[str, str]:
    try:
        found = json.loads(label or "{}")
    except ValueError:
        return {}
    return {str(name): str(version) for name, version in found.items()} if isinstance(found, dict) else {}


def list_images(client: EngineClient) -> list[ImageRef]:
    """Return every image that a sandbox could be made of, by tag."""
    summaries = call_api(client.api.images, filters={"label": [f"{ROLE}={SANDBOX}"]})
    tags = sorted(tag for each in summaries for tag in _tags(each))
    return [found for tag in tags if (found := find_image(client, tag)) is not None]


def list_build_images(client: EngineClient) -> list[dict[str, Any]]:
    """Return the images kept for later builds and running programs: Debian bases, stages, replaced images."""
    found: list[dict[str, Any]] = []
    for role in (DEBIAN, STAGE, SANDBOX, SERVICE):
        summaries = call_api(client.api.images, filters={"label": [f"{ROLE}={role}"]})
        found += [each for each in summaries if role == DEBIAN or not _tags(each)]
    return found


def _tags(described: Mapping[str, Any]) -> list[str]:
    return [str(tag) for tag in described.get("RepoTags") or [] if tag != "<none>:<none>"]


@functools.cache
def guest_sources() -> str:
    """Return the digest of the guest's sources in this installation."""
    return digest_of(Path(toolcell_bridge.__file__).parent)


def digest_of(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sources_in(folder):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def sources_in(folder: Path) -> list[Path]:
    """Return the files of a package that belong into an image: all but caches."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
