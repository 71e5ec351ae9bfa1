"""Which image a container is made of: names, labels, and the checks before one is used.

Blocking, like the SDK it calls: use a worker thread. Builds nothing but what `packages` ask for, and that through
`image_packages`; a missing image is said to be missing, never pulled.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import toolcell_bridge
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker.client import Client, NotThere, explained

LABEL = "io.toolcell."
GUEST, PYTHON, ROLE = f"{LABEL}guest", f"{LABEL}python", f"{LABEL}role"
SOURCES = f"{LABEL}sources"
"""Digest of the guest's sources: of one version there are many while it is being written."""
BASE = f"{LABEL}base"
"""What the image was built on, pinned: a digest where it came from a registry, else an image's id."""
PACKAGES = f"{LABEL}packages"
"""JSON, name to version, of what scripts can import beside the standard library."""
KEY = f"{LABEL}key"
"""Content address of an image that was derived for a list of packages."""

REPOSITORY, DATA_REPOSITORY = "toolcell/python", "toolcell/python-data"
DERIVED_REPOSITORY, DEBIAN_REPOSITORY = "toolcell/packages", "toolcell/debian"
SANDBOX, DEBIAN, STAGE, QUESTION = "sandbox", "debian", "stage", "question"
"""Roles. A stage is what the engine keeps of a build so that the next one is quick; a question is a short container."""

VERSION = toolcell_bridge.__version__
DEFAULT_IMAGE = f"{REPOSITORY}:{VERSION}"
DATA_IMAGE = f"{DATA_REPOSITORY}:{VERSION}"

HOW_TO_BUILD = "toolcell images build (add --debian where no container registry can be reached)"


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image that can be used, pinned."""

    id: str
    """sha256:...; containers are created from this, so nobody can move a tag in between."""
    tag: str
    python: str
    guest_version: str
    sources: str = ""
    """Digest of the guest's sources in it."""
    base: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int = 0
    created: str = ""

    @property
    def is_current(self) -> bool:
        """It holds the very guest that this installation would put there."""
        return self.guest_version == VERSION and self.sources == guest_sources()

    @property
    def has_guest(self) -> bool:
        """It is an image of toolcell at all."""
        return bool(self.guest_version)


def ensure_image(client: Client, image: str | None = None, packages: Sequence[str] = ()) -> ImageRef:
    """Find the image to make containers of; with `packages` it does not have, the one derived for them, built once.

    Raises:
        UsageError: a package is malformed.
        PackageError: the packages could not be installed.
        SandboxUnavailable: there is no such image, or its guest is not of our version; says what to do.
    """
    found = require_image(client, image)
    if not packages:
        return found
    from toolcell.sandbox.docker.images.packages import derive

    return derive(client, found, packages)


def require_image(client: Client, image: str | None = None) -> ImageRef:
    """Find `image`, else the default one, and check that its guest speaks our protocol.

    Raises:
        SandboxUnavailable: it is missing, no image of ours, or of another version.
    """
    name = image or DEFAULT_IMAGE
    found = find_image(client, name)
    if found is None:
        raise SandboxUnavailable(f"the engine has no image {name}; {how_to_get(name)}")
    if problem := unusable(found):
        raise SandboxUnavailable(problem)
    return found


def how_to_get(name: str) -> str:
    """What to do about a missing image: our command builds our own two, all others are the caller's."""
    if name in (DEFAULT_IMAGE, DATA_IMAGE):
        return f"build it: {HOW_TO_BUILD if name == DEFAULT_IMAGE else 'toolcell images build --data'}"
    return (
        f"docker pull or docker build it and see that it fits: toolcell images check {name}; "
        f"or leave the image out for {DEFAULT_IMAGE}, which `toolcell images build` makes"
    )


def unusable(found: ImageRef) -> str | None:
    """Say why no sandbox can be made of an image; None when it can."""
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


def find_image(client: Client, name: str) -> ImageRef | None:
    """Look an image up by tag or id."""
    try:
        told = explained(client.api.inspect_image, name)
    except NotThere:
        return None
    return read_image(told, name)


def read_image(told: Mapping[str, Any], name: str = "") -> ImageRef:
    """Read what GET /images/{name}/json told."""
    labels: Mapping[str, str] = (told.get("Config") or {}).get("Labels") or {}
    tags = _tags(told)
    return ImageRef(
        id=str(told["Id"]),
        tag=name or (tags[0] if tags else str(told["Id"])),
        python=labels.get(PYTHON, ""),
        guest_version=labels.get(GUEST, ""),
        sources=labels.get(SOURCES, ""),
        base=labels.get(BASE, ""),
        packages=_packages(labels.get(PACKAGES, "")),
        size_bytes=int(told.get("Size") or 0),
        created=str(told.get("Created") or ""),
    )


def _packages(label: str) -> dict[str, str]:
    try:
        found = json.loads(label or "{}")
    except ValueError:
        return {}
    return {str(name): str(version) for name, version in found.items()} if isinstance(found, dict) else {}


def list_images(client: Client) -> list[ImageRef]:
    """Every image that a sandbox could be made of, by tag."""
    summaries = explained(client.api.images, filters={"label": [f"{ROLE}={SANDBOX}"]})
    tags = sorted(tag for each in summaries for tag in _tags(each))
    return [found for tag in tags if (found := find_image(client, tag)) is not None]


def kept(client: Client) -> list[dict[str, Any]]:
    """What no sandbox is made of any more or directly: Debian bases, stages of builds, images that were replaced."""
    found: list[dict[str, Any]] = []
    for role in (DEBIAN, STAGE, SANDBOX):
        summaries = explained(client.api.images, filters={"label": [f"{ROLE}={role}"]})
        found += [each for each in summaries if role == DEBIAN or not _tags(each)]
    return found


def _tags(told: Mapping[str, Any]) -> list[str]:
    return [str(tag) for tag in told.get("RepoTags") or [] if tag != "<none>:<none>"]


@functools.cache
def guest_sources() -> str:
    """Digest of the guest's sources in this installation."""
    return digest_of(Path(toolcell_bridge.__file__).parent)


def digest_of(folder: Path) -> str:
    """Digest names and contents of a folder's sources."""
    whole = hashlib.sha256()
    for path in sources_in(folder):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def sources_in(folder: Path) -> list[Path]:
    """The files of a package that belong into an image: all but caches."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
