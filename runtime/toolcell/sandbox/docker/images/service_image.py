"""Build the image of `toolcell serve`: this installation's toolcell and what it imports, for a base's interpreter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

import toolcell_bridge
from toolcell._version import FOLDER, __version__
from toolcell.errors import PackageError
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.images import reference
from toolcell.sandbox.docker.images.build import DEFAULT_BASE, Report, build, context_of, find_base, silent, sources
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.images.site import ImagePython, drop_tests, install_packages, versions_in

EXTRA: Final = "service"
FILES: Final = ("service.toml", "siblings.toml")


def build_service(
    client: EngineClient,
    base: str | None = None,
    packages: Sequence[str] = (),
    *,
    fresh: bool = False,
    report: Report = silent,
) -> ImageRef:
    """Build the image on `base`, else on the official Python image. `packages`: that scripts may import.

    Raises:
        UsageError, PackageError: a package is not available for the base's interpreter.
        SandboxUnavailable: the base is not available or has no CPython 3.11, or the engine could not build.
    """
    on = find_base(client, base or DEFAULT_BASE, report)
    with context_of("service") as context:
        for name in FILES:
            shutil.copyfile(sources() / "service" / name, context / name)
        report(f"toolcell {__version__} for Python {on.python.version}")
        site = context / "site"
        install_packages(site, [*requirements(on.python), *packages], on.python, report)
        drop_tests(site)
        copy_toolcell(site)
        labels = {
            reference.PYTHON: on.python.version,
            reference.BASE: on.label,
            reference.PACKAGES: json.dumps(versions_in(site), sort_keys=True),
        }
        return build(client, context, on.id, reference.SERVICE_IMAGE, labels, fresh=fresh, report=report)


def requirements(python: ImagePython) -> list[str]:
    """Return what toolcell with the extra `service` requires there.

    Raises:
        PackageError: this toolcell was not installed, so nobody knows.
    """
    try:
        wanted = map(Requirement, distribution("toolcell").requires or ())
    except ModuleNotFoundError as exc:
        raise PackageError("this toolcell is not an installed package; install it, and build again") from exc
    there = {"python_version": python.short, "python_full_version": python.version, "sys_platform": "linux"}
    found = []
    for each in wanted:
        marker, each.marker = each.marker, None
        if marker is None or any(marker.evaluate({**there, "extra": extra}) for extra in ("", EXTRA)):
            found.append(str(each))
    return found


def copy_toolcell(site: Path) -> None:
    """Copy both packages, and the folder of the images, into `site`."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
    for folder in (Path(FOLDER), Path(toolcell_bridge.__file__).parent):
        shutil.copytree(folder, site / folder.name, ignore=unwanted, dirs_exist_ok=True)
    shutil.copytree(sources(), site / "toolcell" / "sandbox_images", ignore=unwanted, dirs_exist_ok=True)
    about = site / f"toolcell-{__version__}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toolcell\nVersion: {__version__}\n")
