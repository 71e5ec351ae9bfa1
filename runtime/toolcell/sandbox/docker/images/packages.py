"""Images derived for `packages=[...]`: built once, then found again by their content address.

The address is a digest of the base image, of the requirements and, for installed copies, of their versions. The same
list on the same image is the same derived image in every process.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence

from packaging.utils import canonicalize_name

from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.images import reference
from toolcell.sandbox.docker.images.build import build_with_packages
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.process.package_installers import InstallProgress
from toolcell.sandbox.process.package_sources import Wanted, parse_wanted

FORMAT = 1
"""Part of every address: after a change of layout, old images are not found any more."""

_building = threading.Lock()
"""One build at a time in this process. When two processes build the same image at once, the engine keeps one."""


def ensure_image(client: EngineClient, image: str | None = None, packages: Sequence[str] = ()) -> ImageRef:
    """Find the image to make containers of. With `packages` that it lacks, derive an image, once.

    Raises:
        UsageError: a requirement is malformed.
        PackageError: the packages could not be installed.
        SandboxUnavailable: the image is missing or its guest is of another version; the message says what to do.
    """
    found = reference.require_image(client, image)
    return derive(client, found, packages) if packages else found


def derive(client: EngineClient, on: ImageRef, packages: Sequence[str]) -> ImageRef:
    """Return an image that is `on` with `packages`; `on` itself when it has them.

    Raises:
        UsageError: a requirement is malformed.
        PackageError: a package is not available for the image's interpreter.
        SandboxUnavailable: the engine could not build.
    """
    wanted = parse_wanted(packages)
    missing = [item for item in wanted if not provides(on, item)]
    if not missing:
        return on
    key = content_address(on, missing)
    tag = f"{reference.DERIVED_REPOSITORY}:{key}"
    with _building:
        if found := reference.find_image(client, tag):
            return found
        texts, progress = [item.text for item in missing], InstallProgress()
        try:
            return build_with_packages(client, on, texts, tag=tag, labels={reference.KEY: key}, report=progress.say)
        finally:
            progress.end()


def provides(image: ImageRef, item: Wanted) -> bool:
    """Return whether the packages in an image's label satisfy a requirement."""
    requirement = item.requirement
    if requirement is None or requirement.extras or requirement.marker:
        return False
    version = image.packages.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def content_address(on: ImageRef, wanted: Sequence[Wanted]) -> str:
    """Return the content address of `on` with packages added."""
    asked = [FORMAT, on.id, sorted(item.identity for item in wanted)]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
