"""`toolcell images`: build, list and check the images of the Docker backend."""

from __future__ import annotations

from typing import Annotated, Any

import anyio
import anyio.to_thread
import typer
from rich.filesize import decimal
from rich.text import Text

from toolcell.cli import exits
from toolcell.cli.engine import engine
from toolcell.cli.execution import Watch, run_watched, showing_installation
from toolcell.cli.flags import AsJson, group
from toolcell.cli.terminal import output, print_json, safe, stdout
from toolcell.errors import UsageError
from toolcell.sandbox.docker.images import build, check, reference

SUMMARY = """Build, list and check images for `backend="docker"`.

Images are built on this machine and never pulled: an interpreter of your choice with the guest of this installation.
The engine is the one at $DOCKER_HOST, which may be Podman's socket, or else the local Docker daemon.
"""

EPILOG = f"Exit status: {exits.OK} success, {exits.UNAVAILABLE} there is no engine, or an image is missing or unusable."

STALE = "its guest differs from the guest of this installation; build it again"


def build_image(
    base: Annotated[
        str | None, typer.Option(metavar="IMAGE", help=f"Build on this image [default: {build.DEFAULT_BASE}].")
    ] = None,
    debian: Annotated[bool, typer.Option("--debian", help="Build on Debian packages; needs no registry.")] = False,
    suite: Annotated[str, typer.Option(help="Debian release.")] = build.SUITE,
    mirror: Annotated[str, typer.Option(help="Debian mirror.")] = build.MIRROR,
    data: Annotated[bool, typer.Option("--data", help="Also build python-data: numpy, pandas, and so on.")] = False,
    shell: Annotated[bool, typer.Option("--shell", help="Also build shell: a shell and small programs.")] = False,
    service: Annotated[
        bool, typer.Option("--service", help="Build the image of `toolcell serve`, and no other.")
    ] = False,
    package: Annotated[
        list[str] | None,
        typer.Option(
            "--package",
            "-p",
            metavar="REQUIREMENT",
            help="Also build the image for Runtime(packages=...); with --service, a package for its scripts.",
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Repeat every step instead of using cached stages.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build the sandbox image, or the service's. A build after an upgrade takes seconds and replaces the image."""
    if debian and base:
        raise UsageError("--base and --debian exclude each other: both say what to build on")
    if service and (data or shell):
        raise UsageError("--service builds one image: leave out --data and --shell")

    def work(watch: Watch) -> list[reference.ImageRef]:
        with engine() as client:
            on = build.import_debian(client, suite=suite, mirror=mirror, report=watch.say) if debian else base
            if service:
                return [build.build_service(client, on, package or (), fresh=fresh, report=watch.say)]
            built = [build.build_python(client, on, fresh=fresh, report=watch.say)]
            if data:
                built.append(build.build_data(client, built[0], fresh=fresh, report=watch.say))
            if shell:
                programs = base
                if debian:
                    programs = build.import_debian(client, suite=suite, mirror=mirror, report=watch.say, shell=True)
                built.append(build.build_shell(client, programs, fresh=fresh, report=watch.say))
            if package:
                with showing_installation(watch):
                    built.append(build.ensure_image(client, (built[1] if data else built[0]).tag, package))
            for each in built:
                watch.say(f"checking {each.tag}")
                check.require_sound(client, each)
            return built

    built = _watched("building", work)
    output({"images": [as_dict(each) for each in built]}, as_json, lambda: _show_images(built))


def list_images(as_json: AsJson = False) -> None:
    """List sandbox images with their contents and sizes, and the engine's build cache."""
    with engine() as client:
        found, kept = reference.list_images(client), reference.list_build_images(client)
    if as_json:
        total = sum(int(each["Size"]) for each in kept)
        print_json({"images": [as_dict(each) for each in found], "kept": len(kept), "kept_bytes": total})
        return
    if not found:
        stdout().print(f"no sandbox image; build one: {reference.HOW_TO_BUILD}")
        return
    _show_images(found)
    if kept:
        size = decimal(sum(int(each["Size"]) for each in kept))
        stdout().print(f"{len(kept)} more images kept for quick builds or running programs, {size} with shared layers")


def check_images(
    image: Annotated[list[str] | None, typer.Argument(metavar="[IMAGE...]", help="Tags. Default: all images.")] = None,
    runtime: Annotated[
        str | None, typer.Option(metavar="NAME", help="Start them with this runtime, for example runsc.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start each image once and check its guest, its user, and that it has nothing to misuse."""

    def work(watch: Watch) -> list[tuple[reference.ImageRef, list[str]]]:
        with engine() as client:
            if image:
                found = [reference.require_image(client, name) for name in image]
            else:
                found = reference.list_images(client) or [reference.require_image(client)]
            results = []
            for each in found:
                watch.say(each.tag)
                problems = check.problems(client, each, runtime)
                results.append((each, problems if each.is_current else [STALE, *problems]))
            return results

    results = _watched("checking", work)
    shown = [{**as_dict(each), "problems": problems} for each, problems in results]
    output({"images": shown}, as_json, lambda: _show_checked(results))
    raise typer.Exit(exits.UNAVAILABLE if any(problems for _, problems in results) else exits.OK)


def _watched(doing: str, work: Any) -> Any:
    """Run blocking work with a progress line. An interrupted build leaves the older image in place."""

    async def shell(watch: Watch) -> Any:
        watch.doing = doing
        return await anyio.to_thread.run_sync(work, watch, abandon_on_cancel=True)

    return run_watched(shell)


def as_dict(image: reference.ImageRef) -> dict[str, Any]:
    return {
        "tag": image.tag,
        "id": image.id,
        "python": image.python,
        "guest": image.guest_version,
        "current": image.is_current,
        "base": image.base,
        "packages": dict(image.packages),
        "size_bytes": image.size_bytes,
        "created": image.created,
    }


def _show_images(found: list[reference.ImageRef]) -> None:
    console, width = stdout(), max(len(each.tag) for each in found)
    for each in found:
        line = Text.assemble(safe(f"{each.tag:<{width}}", "cyan"), f"  {decimal(each.size_bytes):>9}  ")
        line.append_text(safe(f"Python {each.python}"))
        if each.has_guest:
            line.append_text(safe(f"  guest {each.guest_version}"))
            line.append_text(safe("" if each.is_current else " (another one)", "yellow"))
        console.print(line.append_text(safe(f"  {each.id.removeprefix('sha256:')[:12]}", "dim")))
        if each.packages:
            console.print(
                safe(f"  {', '.join(f'{name} {each.packages[name]}' for name in sorted(each.packages))}", "dim")
            )


def _show_checked(results: list[tuple[reference.ImageRef, list[str]]]) -> None:
    console = stdout()
    for image, problems in results:
        word, style = ("BAD", "bold red") if problems else ("good", "green")
        console.print(Text.assemble((f"{word:<6}", style), safe(image.tag, "bold"), f"  {decimal(image.size_bytes)}"))
        for problem in problems:
            console.print(safe(f"      {problem}", "yellow"))


register = group(SUMMARY, {"build": build_image, "list": list_images, "check": check_images}, epilog=EPILOG)
