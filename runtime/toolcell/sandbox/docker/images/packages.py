"""Images derived for `packages=[...]`: built once, found again by content ever after.

The address stands for the image below, what was asked, and, where installed copies answer it, their versions: the same
list on the same image is the same derived image, in whatever process or program.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence

from packaging.utils import canonicalize_name

from toolcell.sandbox.docker.client import Client
from toolcell.sandbox.docker.images import reference
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.process.package_sources import Wanted, parse_wanted

FORMAT = 1
"""Part of every address: a change of layout makes new images instead of misreading old ones."""

_building = threading.Lock()
"""One build at a time here. Two programs may build the same image at once: the engine ends up with one of them."""


def derive(client: Client, on: ImageRef, packages: Sequence[str]) -> ImageRef:
    """Return `on` with `packages`; `on` itself when it has them.

    Raises:
        UsageError: a requirement is malformed.
        PackageError: they cannot be had for the image's interpreter.
        SandboxUnavailable: the engine could not build.
    """
    wanted = parse_wanted(packages)
    missing = [item for item in wanted if not has(on, item)]
    if not missing:
        return on
    key = address(on, missing)
    tag = f"{reference.DERIVED_REPOSITORY}:{key}"
    with _building:
        if found := reference.find_image(client, tag):
            return found
        from toolcell.sandbox.docker.images.build import build_with_packages

        texts = [item.text for item in missing]
        return build_with_packages(client, on, texts, tag=tag, labels={reference.KEY: key})


def has(image: ImageRef, item: Wanted) -> bool:
    """Whether an image satisfies a requirement by the packages it says it has."""
    requirement = item.requirement
    if requirement is None or requirement.extras or requirement.marker:
        return False
    version = image.packages.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def address(on: ImageRef, wanted: Sequence[Wanted]) -> str:
    """Content address of `on` with packages added."""
    asked = [FORMAT, on.id, sorted(item.identity for item in wanted)]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
