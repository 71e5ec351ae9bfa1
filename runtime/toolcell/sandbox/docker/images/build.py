"""Build the images from `sandbox_images/`, on a base that the engine has, can pull, or imports from Debian packages.

A build needs no network inside and no tool on this machine but the engine, because the context contains every input.
The engine keeps the stages, so a build after a change of the guest takes seconds. Blocking; use a worker thread.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import IO, Any, Final

from packaging.requirements import Requirement

import toolcell_bridge
from toolcell._version import FOLDER, __version__
from toolcell.errors import PackageError, SandboxUnavailable
from toolcell.sandbox.docker.client import EngineClient, NotFound, call_api
from toolcell.sandbox.docker.images import debian_base, reference
from toolcell.sandbox.docker.images.check import PROBE_TIMEOUT_S, ask_python
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.images.site import (
    ImagePython,
    drop_distributions,
    drop_tests,
    install_guest,
    install_packages,
    read_requirements,
    versions_in,
)
from toolcell.sandbox.process.package_sources import InstallProgress, Wanted, parse_wanted
from toolcell.sandbox.process.programs import NAMES

Report = Callable[[str], None]
"""Called with one line of progress."""

DEFAULT_BASE = f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim-bookworm"
"""The official image with this installation's version of Python, so that installed packages can be copied into it."""

SUITE, MIRROR = "bookworm", "http://deb.debian.org"
"""Of Debian, where it is the base."""


def silent(text: str) -> None:
    """Report no progress."""


STEP_TIMEOUT_S = 900
"""Longest silence of an engine while it builds. Copying a large layer is one silent step."""

KEPT = "24h"
"""Age at which an image without a tag is removed. A younger one may be in use, or make the next build quick."""


@dataclass(frozen=True, slots=True)
class Base:
    """An image to build on."""

    id: str
    label: str
    """The value of the label `base`: its digest in a registry, else its id."""
    python: ImagePython


def sources() -> Path:
    """Return the folder `sandbox_images` of this installation.

    Raises:
        SandboxUnavailable: the folder was not installed.
    """
    package = Path(FOLDER)
    for folder in (package / "sandbox_images", package.parent.parent / "sandbox_images"):
        if (folder / "python" / "Dockerfile").is_file():
            return folder
    raise SandboxUnavailable(f"the folder sandbox_images was not installed next to {package}; reinstall toolcell")


def build_python(
    client: EngineClient,
    base: str | None = None,
    *,
    tag: str = reference.DEFAULT_IMAGE,
    fresh: bool = False,
    report: Report = silent,
) -> ImageRef:
    """Build the sandbox image on `base`, else on the official Python image.

    Raises:
        SandboxUnavailable: the base is not available or has no CPython 3.11, or the engine could not build.
        PackageError: a package that the guest imports is not available for the base's interpreter.
    """
    return _build_guest(client, base, tag, {}, "python", fresh, report)


def build_shell(
    client: EngineClient,
    base: str | None = None,
    *,
    tag: str = reference.SHELL_IMAGE,
    fresh: bool = False,
    report: Report = silent,
) -> ImageRef:
    """Build the image for `Policy(shell=True)` on `base`, which has the programs, else on the official Python image.

    Raises:
        SandboxUnavailable, PackageError: as `build_python`.
    """
    return _build_guest(client, base, tag, {reference.PROGRAMS: "shell"}, "shell", fresh, report)


def _build_guest(
    client: EngineClient, base: str | None, tag: str, more: Mapping[str, str], name: str, fresh: bool, report: Report
) -> ImageRef:
    on = find_base(client, base or DEFAULT_BASE, report)
    with context_of(name) as context:
        if name == "shell":
            (context / "programs.txt").write_text("\n".join(NAMES), encoding="ascii")
        report(f"guest {reference.VERSION} for Python {on.python.version}")
        versions = install_guest(context / "guest", on.python, report)
        labels = {
            **more,
            reference.GUEST: reference.VERSION,
            reference.SOURCES: reference.digest_of(context / "guest" / "toolcell_bridge"),
            reference.PYTHON: on.python.version,
            reference.BASE: on.label,
            f"{reference.LABEL}needs": json.dumps(versions, sort_keys=True),
        }
        return build(client, context, on.id, tag, labels, fresh=fresh, report=report)


def build_data(client: EngineClient, on: ImageRef, *, fresh: bool = False, report: Report = silent) -> ImageRef:
    """Build the image with packages for looking at data, on the sandbox image `on`."""
    wanted = read_requirements((sources() / "python-data" / "packages.txt").read_text(encoding="utf-8").splitlines())
    return build_with_packages(client, on, wanted, tag=reference.DATA_IMAGE, labels={}, fresh=fresh, report=report)


def build_with_packages(
    client: EngineClient,
    on: ImageRef,
    wanted: list[str],
    *,
    tag: str,
    labels: Mapping[str, str],
    fresh: bool = False,
    report: Report = silent,
) -> ImageRef:
    """Build an image that is `on` with packages. They and their dependencies are fetched here, for its interpreter.

    Raises:
        UsageError, PackageError: a package is not available.
        SandboxUnavailable: the engine could not build.
    """
    with context_of("python-data") as context:
        report(f"fetching {', '.join(wanted)} for Python {on.python}")
        site = context / "packages"
        install_packages(site, wanted, ask_python(client, on.id), report, on.packages)
        drop_distributions(site, on.packages)
        drop_tests(site)
        labels = {**labels, reference.PACKAGES: json.dumps({**on.packages, **versions_in(site)}, sort_keys=True)}
        return build(client, context, on.id, tag, labels, fresh=fresh, report=report)


@contextmanager
def context_of(name: str) -> Iterator[Path]:
    """Make a build context with the Dockerfile and prepare.py; the caller adds the rest."""
    folder = sources()
    with tempfile.TemporaryDirectory(prefix="toolcell-image-") as directory:
        context = Path(directory)
        shutil.copyfile(folder / name / "Dockerfile", context / "Dockerfile")
        shutil.copyfile(folder / "python" / "prepare.py", context / "prepare.py")
        yield context


def find_base(client: EngineClient, name: str, report: Report) -> Base:
    """Find an image to build on; pull it when the engine does not have it.

    Raises:
        SandboxUnavailable: the image is not available, or has no CPython 3.11 or newer.
    """
    try:
        inspected = call_api(client.api.inspect_image, name)
    except NotFound:
        report(f"pulling {name}")
        inspected = _pull(client, name)
    python = ask_python(client, str(inspected["Id"]))
    short = tuple(int(part) for part in python.short.split("."))
    if python.implementation != "cpython" or short < (3, 11):
        raise SandboxUnavailable(
            f"{name} has {python.implementation} {python.version}; guests need CPython 3.11 or newer"
        )
    return Base(str(inspected["Id"]), str((inspected.get("RepoDigests") or [inspected["Id"]])[0]), python)


def _pull(client: EngineClient, name: str) -> dict[str, Any]:
    try:
        call_api(client.api.pull, name)
        return dict(call_api(client.api.inspect_image, name))
    except SandboxUnavailable as exc:
        raise SandboxUnavailable(
            f"the engine has no image {name} and cannot pull it ({exc}); where no container registry can be reached, "
            "build on Debian packages: toolcell images build --debian"
        ) from exc


def build(
    client: EngineClient,
    context: Path,
    base: str,
    tag: str,
    labels: Mapping[str, str],
    *,
    fresh: bool,
    report: Report,
) -> ImageRef:
    """Let the engine build a context. `tag` names the result only once it is complete.

    The image that had the tag before is kept for a day: a program that started with it creates containers from its id.

    Raises:
        SandboxUnavailable: a step failed; repeats the engine's output.
    """
    with tempfile.TemporaryFile() as archive:
        pack(context, archive)
        archive.seek(0)
        options = {"buildargs": {"BASE_IMAGE": base}, "labels": dict(labels), "nocache": fresh}
        call_api(_build, client, archive, tag, options, report)
    found = reference.find_image(client, tag)
    if found is None:
        raise SandboxUnavailable(f"the engine built {tag} and does not have it")
    remove_leftovers(client)
    return found


def _build(client: EngineClient, archive: IO[bytes], tag: str, options: Mapping[str, Any], report: Report) -> None:
    lines = client.api.build(
        fileobj=archive,
        custom_context=True,
        tag=tag,
        network_mode="none",
        rm=True,
        forcerm=True,
        decode=True,
        timeout=STEP_TIMEOUT_S,
        **options,
    )
    output: list[str] = []
    for line in lines:
        if text := str(line.get("stream") or "").strip():
            output.append(text)
            report(text)
        if "error" in line:
            last_lines = "\n".join([*output[-5:], str(line["error"])])
            raise SandboxUnavailable(f"the engine could not build {tag}:\n{last_lines}")


def remove_leftovers(client: EngineClient) -> None:
    """Remove images of earlier builds that have no tag and are old, and probes of programs that died before them."""
    try:
        call_api(client.api.prune_images, {"dangling": True, "label": reference.ROLE, "until": KEPT})
        probes = {"label": f"{reference.ROLE}={reference.PROBE}", "until": f"{2 * PROBE_TIMEOUT_S}s"}
        call_api(client.api.prune_containers, probes)
    except SandboxUnavailable:  # another program does the same; the build does not depend on it
        return


def pack(context: Path, target: IO[bytes]) -> None:
    """Archive a context. The same content gives the same bytes, because engines cache by the archive's bytes."""
    with tarfile.open(fileobj=target, mode="w") as archive:
        for path in sorted(context.rglob("*")):
            entry = archive.gettarinfo(str(path), path.relative_to(context).as_posix())
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if entry.isdir() else 0o644
            with path.open("rb") if entry.isreg() else io.BytesIO() as content:
                archive.addfile(entry, content)


def import_debian(
    client: EngineClient,
    *,
    suite: str = SUITE,
    mirror: str = MIRROR,
    report: Report = silent,
    shell: bool = False,
) -> str:
    """Import a base image of Debian packages, unless it has the same packages already; return its id.

    `shell`: with the programs of a shell.

    Raises:
        SandboxUnavailable: the packages are not available here, or the engine refused the image.
    """
    name = f"{suite}-shell" if shell else suite
    tag = f"{reference.DEBIAN_REPOSITORY}:{name}"
    label = f"{reference.LABEL}debian"
    with debian_base.download(suite, mirror, report, shell=shell) as packages, tempfile.TemporaryFile() as archive:
        # Images built on a base inherit its labels, except the role.
        known = [f"{label}={packages.digest}", f"{reference.ROLE}={reference.DEBIAN}"]
        if not (found := call_api(client.api.images, filters={"label": known})):
            report(f"merging {len(packages.files)} packages")
            debian_base.write_archive(packages, archive)
            archive.seek(0)
            call_api(
                client.api.import_image_from_data,
                archive,
                repository=reference.DEBIAN_REPOSITORY,
                tag=name,
                changes=[f"LABEL {label}={packages.digest}", f"LABEL {reference.ROLE}={reference.DEBIAN}"],
            )
    return str(call_api(client.api.inspect_image, found[0]["Id"] if found else tag)["Id"])


# Build the image of `toolcell serve`: this installation's toolcell and what it imports, for a base's interpreter.

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


# Images derived for `packages=[...]`: built once, then found again by their content address.
#
# The address is a digest of the base image, of the requirements and, for installed copies, of their versions. The
# same list on the same image is the same derived image in every process.

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
    version = image.packages.get(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def content_address(on: ImageRef, wanted: Sequence[Wanted]) -> str:
    """Return the content address of `on` with packages added."""
    asked = [FORMAT, on.id, sorted(item.identity for item in wanted)]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
