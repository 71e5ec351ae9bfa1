"""Builds the images: from `sandbox_images/`, on a base that an engine has, can pull, or gets from Debian packages here.

A build needs no network inside and no tool on this machine but the engine: the context carries all that goes in. Stages
stay with the engine, so building again after a change of the guest takes seconds. Blocking; use a worker thread.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import toolcell
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker.client import Client, Conflict, NotThere, explained
from toolcell.sandbox.docker.images import debian_base, reference
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.images.site import (
    ASK,
    ImagePython,
    drop_distributions,
    drop_tests,
    fill,
    fill_guest,
    read_requirements,
    versions_in,
)

Say = Callable[[str], None]

DEFAULT_BASE = f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim-bookworm"
"""The official image with the interpreter of this installation, so that what is installed here can be copied there."""


def silent(text: str) -> None:
    """Say nothing of how a build gets on."""


STEP_TIMEOUT_S = 900
"""Between two lines that an engine says while it builds. Copying a large layer is one silent step."""

ASK_TIMEOUT_S = 60

KEPT_S = {reference.STAGE: STEP_TIMEOUT_S, reference.SANDBOX: 24 * 3600}
"""How old an image must be to be removed once no tag names it: a stage may belong to a build that is under way."""


@dataclass(frozen=True, slots=True)
class Base:
    """An image to build on."""

    id: str
    told_as: str
    """Its digest in a registry, else its id; goes into the label."""
    python: ImagePython


def sources() -> Path:
    """The folder `sandbox_images` of this installation.

    Raises:
        SandboxUnavailable: it was installed without.
    """
    package = Path(toolcell.__file__).parent
    for folder in (package / "sandbox_images", package.parent.parent / "sandbox_images"):
        if (folder / "python" / "Dockerfile").is_file():
            return folder
    raise SandboxUnavailable(f"the folder sandbox_images was not installed next to {package}; reinstall toolcell")


def build_python(
    client: Client,
    base: str | None = None,
    *,
    tag: str = reference.DEFAULT_IMAGE,
    fresh: bool = False,
    say: Say = silent,
) -> ImageRef:
    """Build the sandbox image on `base`, else on the official Python image.

    Raises:
        SandboxUnavailable: the base cannot be had or has no Python 3.11, or the engine could not build.
        PackageError: what the guest imports cannot be had for the base's interpreter.
    """
    on = find_base(client, base or DEFAULT_BASE, say)
    with _context("python") as context:
        say(f"guest {reference.VERSION} for Python {on.python.version}")
        versions = fill_guest(context / "guest", on.python)
        labels = {
            reference.GUEST: reference.VERSION,
            reference.SOURCES: reference.digest_of(context / "guest" / "toolcell_bridge"),
            reference.PYTHON: on.python.version,
            reference.BASE: on.told_as,
            f"{reference.LABEL}needs": json.dumps(versions, sort_keys=True),
        }
        return build(client, context, on.id, tag, labels, fresh=fresh, keep_stages=True, say=say)


def renew(client: Client, image: ImageRef, say: Say = silent) -> ImageRef:
    """Build a sandbox image again on its own base, with the guest of this installation: seconds, and no download.

    Raises:
        SandboxUnavailable: the base is gone, or the engine could not build.
    """
    return build_python(client, image.base, tag=image.tag, say=say)


def build_data(
    client: Client, on: ImageRef, *, tag: str = reference.DATA_IMAGE, fresh: bool = False, say: Say = silent
) -> ImageRef:
    """Build the image with packages for looking at data, on the sandbox image `on`."""
    wanted = read_requirements((sources() / "python-data" / "packages.txt").read_text(encoding="utf-8").splitlines())
    return build_with_packages(client, on, wanted, tag=tag, labels={}, fresh=fresh, say=say)


def build_with_packages(
    client: Client,
    on: ImageRef,
    wanted: list[str],
    *,
    tag: str,
    labels: Mapping[str, str],
    fresh: bool = False,
    say: Say = silent,
) -> ImageRef:
    """Build `on` with packages added; they and what they need are fetched here, for its interpreter.

    Raises:
        UsageError, PackageError: the packages cannot be had.
        SandboxUnavailable: the engine could not build.
    """
    with _context("python-data") as context:
        say(f"fetching {', '.join(wanted)} for Python {on.python}")
        site = context / "packages"
        fill(site, wanted, ask_python(client, on.id), on.packages)
        drop_distributions(site, on.packages)
        drop_tests(site)
        packages = json.dumps({**on.packages, **versions_in(site)}, sort_keys=True)
        labels = {**labels, reference.PACKAGES: packages}
        return build(client, context, on.id, tag, labels, fresh=fresh, keep_stages=False, say=say)


@contextmanager
def _context(name: str) -> Iterator[Path]:
    """A directory to build from: the Dockerfile and what it copies; the caller adds the rest."""
    folder = sources()
    with tempfile.TemporaryDirectory(prefix="toolcell-image-") as directory:
        context = Path(directory)
        shutil.copyfile(folder / name / "Dockerfile", context / "Dockerfile")
        shutil.copyfile(folder / "python" / "prepare.py", context / "prepare.py")
        yield context


def find_base(client: Client, name: str, say: Say) -> Base:
    """Find an image to build on, pulling it when the engine does not have it.

    Raises:
        SandboxUnavailable: it is not to be had, or has no CPython from 3.11 on.
    """
    try:
        told = explained(client.api.inspect_image, name)
    except NotThere:
        say(f"pulling {name}")
        told = _pull(client, name)
    python = ask_python(client, str(told["Id"]))
    short = tuple(int(part) for part in python.short.split("."))
    if python.implementation != "cpython" or short < (3, 11):
        raise SandboxUnavailable(
            f"{name} has {python.implementation} {python.version}; guests need CPython 3.11 or newer"
        )
    return Base(str(told["Id"]), str((told.get("RepoDigests") or [told["Id"]])[0]), python)


def _pull(client: Client, name: str) -> dict[str, Any]:
    try:
        explained(client.api.pull, name)
        return dict(explained(client.api.inspect_image, name))
    except SandboxUnavailable as exc:
        raise SandboxUnavailable(
            f"the engine has no image {name} and cannot pull it ({exc}); where no container registry can be reached, "
            "build on Debian packages: toolcell images build --debian"
        ) from exc


def ask_python(client: Client, image: str) -> ImagePython:
    """Run an image's interpreter once, shut in, and hear what it is.

    Raises:
        SandboxUnavailable: it has none, or it does not run here.
    """
    try:
        return ImagePython.read(run_python(client, image, ASK))
    except (ValueError, TypeError) as exc:
        raise SandboxUnavailable(f"the Python in {image} did not say what it is: {exc}") from exc


def run_python(client: Client, image: str, code: str, runtime: str | None = None) -> str:
    """Run code of ours in a container of `image` with no network and little to write to; returns what it printed.

    Raises:
        SandboxUnavailable: there is no python3, or it failed; repeats its last words.
    """
    api = client.api
    config = {
        "Image": image,
        "Entrypoint": ["python3", "-P", "-s", "-B", "-c", code],
        "Cmd": [],
        "Labels": {reference.ROLE: reference.QUESTION},
        "Env": ["OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"],
        "HostConfig": {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "PidsLimit": 256,  # gVisor's own threads count, some dozens of them
            "Tmpfs": {"/sandbox": "size=64m,uid=65534,gid=65534,mode=0700"},
            **({"Runtime": runtime} if runtime else {}),
        },
    }
    container = str(explained(api.create_container_from_config, config)["Id"])
    try:
        explained(api.start, container)
        status = int(explained(api.wait, container, timeout=ASK_TIMEOUT_S)["StatusCode"])
        said = explained(api.logs, container, stdout=True, stderr=bool(status)).decode(errors="replace")
    finally:
        explained(api.remove_container, container, v=True, force=True)
    if status:
        last = "\n".join(said.strip().splitlines()[-5:])
        raise SandboxUnavailable(f"python3 in {image} failed (exit status {status}): {last}")
    return said


def build(
    client: Client,
    context: Path,
    base: str,
    tag: str,
    labels: Mapping[str, str],
    *,
    fresh: bool,
    keep_stages: bool,
    say: Say,
) -> ImageRef:
    """Have the engine build a context; `tag` names the result only once it is whole.

    What it named before stays for a day: a program that began with it makes its containers of that very image.

    Raises:
        SandboxUnavailable: a step failed; repeats what the engine said.
    """
    with tempfile.TemporaryFile() as archive:
        pack(context, archive)
        archive.seek(0)
        options = {"buildargs": {"BASE_IMAGE": base}, "labels": dict(labels), "nocache": fresh}
        stages = explained(_build, client, archive, tag, options, say)
    found = reference.find_image(client, tag)
    if found is None:
        raise SandboxUnavailable(f"the engine built {tag} and does not have it")
    remove_unheard(client)
    for image in [*outlived(client, stages), *([] if keep_stages else stages)]:
        remove_unused(client, image)
    return found


def _build(client: Client, archive: IO[bytes], tag: str, options: Mapping[str, Any], say: Say) -> list[str]:
    """Returns the ids of the stages below the result."""
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
    said: list[str] = []
    for line in lines:
        if text := str(line.get("stream") or "").strip():
            said.append(text)
            say(text)
        if "error" in line:
            told = "\n".join([*said[-5:], str(line["error"])])
            raise SandboxUnavailable(f"the engine could not build {tag}:\n{told}")
    return stages_in(said)


def stages_in(said: list[str]) -> list[str]:
    """The last image before each FROM but the first, in what an engine says; another engine's dialect has none."""
    stages, last = [], ""
    for text in said:
        if text.startswith("---> ") and re.fullmatch("[0-9a-f]{12,64}", text[5:]):
            last = text[5:]
        elif re.match(r"Step \d+/\d+ : FROM ", text) and last:
            stages.append(last)
    return stages


def outlived(client: Client, own: list[str]) -> list[str]:
    """Images of earlier builds that no tag names, old enough that nobody can be about to use them."""
    old: list[str] = []
    for role, kept_s in KEPT_S.items():
        found = explained(client.api.images, filters={"label": [f"{reference.ROLE}={role}"], "dangling": True})
        old += [str(each["Id"]) for each in found if float(each.get("Created") or 0) < time.time() - kept_s]
    return [each for each in old if not any(each.startswith(f"sha256:{stage}") for stage in own)]


def remove_unheard(client: Client) -> None:
    """Remove containers that were asked something by a program which died before the answer."""
    asked = explained(client.api.containers, all=True, filters={"label": f"{reference.ROLE}={reference.QUESTION}"})
    for each in asked:
        if float(each.get("Created") or 0) < time.time() - 2 * ASK_TIMEOUT_S:
            try:
                explained(client.api.remove_container, each["Id"], v=True, force=True)
            except (NotThere, Conflict):
                continue


def remove_unused(client: Client, image: str) -> None:
    """Remove an image unless a tag, a container or another image still needs it; one that stays is listed as kept."""
    try:
        told = explained(client.api.inspect_image, image)
        if not [tag for tag in told.get("RepoTags") or [] if tag != "<none>:<none>"]:
            explained(client.api.remove_image, image)
    except SandboxUnavailable:  # in use, gone already, or busy: nothing that was asked for depends on it
        return


def pack(context: Path, target: IO[bytes]) -> None:
    """Archive a context so that the same content is the same archive, whoever made it: engines cache by that."""
    with tarfile.open(fileobj=target, mode="w") as archive:
        for path in sorted(context.rglob("*")):
            entry = archive.gettarinfo(str(path), path.relative_to(context).as_posix())
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if entry.isdir() else 0o644
            with path.open("rb") if entry.isreg() else io.BytesIO() as content:
                archive.addfile(entry, content)


def import_debian(
    client: Client, *, suite: str = debian_base.SUITE, mirror: str = debian_base.MIRROR, say: Say = silent
) -> str:
    """Have a base image of Debian packages; returns its id. Nothing is imported when the packages are as before.

    Raises:
        SandboxUnavailable: no packages can be had here, or the engine did not take them.
    """
    tag = f"{reference.DEBIAN_REPOSITORY}:{suite}"
    label = f"{reference.LABEL}debian"
    with debian_base.fetched(suite, mirror, say) as packages, tempfile.TemporaryFile() as archive:
        # Images built on a base inherit its labels, all but the role.
        known = [f"{label}={packages.digest}", f"{reference.ROLE}={reference.DEBIAN}"]
        found = explained(client.api.images, filters={"label": known})
        if not found:
            say(f"merging {len(packages.files)} packages")
            debian_base.write_archive(packages, archive)
            archive.seek(0)
            changes = [f"LABEL {label}={packages.digest}", f"LABEL {reference.ROLE}={reference.DEBIAN}"]
            explained(client.api.import_image_from_data, archive, repository=reference.DEBIAN_REPOSITORY, tag=suite,
                      changes=changes)  # fmt: skip
    inspected = explained(client.api.inspect_image, found[0]["Id"] if found else tag)
    return str(inspected["Id"])
