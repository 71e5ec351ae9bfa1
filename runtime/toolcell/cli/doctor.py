"""`toolcell doctor`: probe every isolation layer, and show one line for each with the remedy for missing ones."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.text import Text

import toolcell_bridge
from toolcell._version import FOLDER
from toolcell.cli import doctor_apparmor, doctor_docker, doctor_profiles, exits
from toolcell.cli.flags import command
from toolcell.cli.terminal import output, safe, stdout
from toolcell.config import PROFILES, Layer, Limits, Profile
from toolcell.errors import UsageError
from toolcell.support.text import size

PURPOSE: dict[str, str] = {
    "user": "its own user ids: root inside is nobody outside",
    "pid": "sees and signals no process but its own",
    "mount": "a small read-only file system of its own",
    "net": "an empty network: nothing to connect to",
    "ipc": "no shared memory or message queue of others",
    "uts": "a host name of its own",
    "cgroup_ns": "does not see where in the machine's groups it runs",
    "landlock": "file access bounded a second time, by path",
    "seccomp": "system calls outside a list are refused",
    "capabilities": "no privilege left, none to be had again",
    "no_new_privs": "set-uid programs give nothing",
    "rlimits": "memory, processes, files and CPU bounded per process",
    "cgroup": "memory, processes and processors bounded for the whole tree",
}
"""Layer to what it does for a script's sandbox."""

EPILOG = (
    f"Exit status: {exits.OK} every required layer is live and a script runs, {exits.UNAVAILABLE} a layer is missing "
    "or no script runs."
)


def doctor(
    require: Annotated[
        str | None, typer.Option(metavar="LAYER,...", help="Layers that must be live, instead of the default set.")
    ] = None,
    profile: Annotated[Profile, typer.Option("--profile", help="The profile that must run.")] = "full",
    fix: Annotated[
        bool, typer.Option("--fix", help="Write the AppArmor profile that gives this interpreter user namespaces.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON document.")] = False,
) -> None:
    """Show which isolation layers work here, why others do not, and how to get them."""
    if fix:
        told = doctor_apparmor.write()
        output({"ok": True, "done": told}, as_json, lambda: stdout().print(safe(told)))
        return
    from toolcell.sandbox.process import probe_all
    from toolcell_bridge.entry.immortal_heap import why_mortal

    required = required_layers(require, profile)
    layers = [describe(probe, required) for probe in probe_all()]
    machine = {
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "heap": f"mortal: {why}" if (why := why_mortal()) else "immortal: sandboxes copy fewer pages",
        "bytecode": bytecode(),
        "user": f"uid {os.geteuid()}" if hasattr(os, "geteuid") else "no user ids",
        "memory": memory(),
    }
    docker = doctor_docker.examine()
    missing = [layer["name"] for layer in layers if layer["required"] and layer["live"] is False]
    profiles = doctor_profiles.examine({**PROFILES, profile: required})
    problem = next(each["problem"] for each in profiles if each["name"] == profile)
    document = {"ok": not problem, "missing": missing, "problem": problem}
    document |= {"profiles": profiles, "layers": layers, "machine": machine, "docker": docker}
    said = f"{problem}; no script runs in the profile {profile}" if problem else ""
    output(document, as_json, lambda: _show(layers, machine, docker, profiles, said))
    raise typer.Exit(exits.UNAVAILABLE if problem else exits.OK)


def memory() -> str:
    """Say how much memory there is for sandboxes, and what each of them may take."""
    import psutil

    found, most = psutil.virtual_memory(), Limits().memory_bytes
    return f"{size(found.available)} of {size(found.total)} available; a sandbox may take {size(most)}"


def bytecode() -> str:
    """Say whether toolcell's modules are compiled once, or by each process that imports them.

    They are compiled each time where Python may not write beside them, or is told not to.
    """
    if Path(cache_from_source(__file__)).exists():  # of this module, which was imported
        return "kept"
    folders = " ".join((FOLDER, *toolcell_bridge.__path__))
    return f"missing: each start compiles modules, half a second; write it with python -m compileall -q {folders}"


def required_layers(given: str | None, profile: Profile = "full") -> frozenset[str]:
    """Read `--require`; without it, what a Policy of this profile requires by default.

    Raises:
        UsageError: there is no such layer; names those there are.
    """
    if given is None:
        return frozenset(PROFILES[profile])
    names = frozenset(filter(None, (name.strip() for name in given.split(","))))
    if unknown := names - set(get_args(Layer)):
        raise UsageError(f"no such layer: {', '.join(sorted(unknown))}; there are {', '.join(get_args(Layer))}")
    return names


def describe(probe: Any, required: frozenset[str]) -> dict[str, Any]:
    """Return the result of one probe together with the layer's purpose."""
    return {
        "name": probe.name,
        "live": probe.live,
        "required": probe.name in required,
        "purpose": PURPOSE.get(probe.name, ""),
        "detail": probe.detail,
        "fix": probe.fix if not probe.live else "",
    }


def _show(
    layers: list[dict[str, Any]],
    machine: dict[str, str],
    docker: dict[str, Any],
    profiles: list[dict[str, Any]],
    problem: str,
) -> None:
    console = stdout()
    for name, value in machine.items():
        console.print(Text(f"{name:<14}", "bold"), safe(value))
    console.print()
    for layer in layers:
        word, style = _state(layer)
        line = Text.assemble((f"{layer['name']:<14}", "bold"), (f"{word:<9}", style), safe(layer["purpose"]))
        if layer["detail"]:
            line.append_text(safe(f"  ({layer['detail']})", "dim"))
        console.print(line)
        if layer["fix"]:
            console.print(safe(f"{'':<14}to get it: {layer['fix']}", "yellow"))
    console.print()
    for heading, text in doctor_docker.lines(docker):
        console.print(Text(f"{heading:<14}", "bold"), safe(text))
    for lack in docker["missing"]:
        remedy = f"; to get it: {lack['fix']}" if lack["fix"] else ""
        console.print(safe(f"{'':<14}{lack['what']}{remedy}", "yellow"))
    console.print()
    for each in profiles:
        word, style = ("runs", "green") if each["runs"] else ("does not run", "yellow")
        about = each["problem"] or doctor_profiles.CHOOSE[each["name"]]
        console.print(
            Text.assemble("profile ", (f"{each['name']:<11}", "bold"), (word, style)), safe(f"({about})", "dim")
        )
        for fix in each["fixes"]:
            console.print(safe(f"{'':<14}to get it: {fix}", "yellow"))
    console.print()
    if problem:
        console.print(safe(problem, "bold red"))
    else:
        console.print(Text("every required layer is live, and a script has run", "bold green"))


def _state(layer: dict[str, Any]) -> tuple[str, str]:
    if layer["live"]:
        return "live", "green"
    if layer["live"] is None:
        return "unknown", "yellow"
    return ("MISSING", "bold red") if layer["required"] else ("absent", "yellow")


register = command(doctor, epilog=EPILOG)
