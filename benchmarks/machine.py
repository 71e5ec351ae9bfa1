"""Describe the machine and the versions that were measured. Figures mean nothing without them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

PACKAGES = ("toolcell", "pydantic-monty", "anyio", "msgpack", "numpy", "pandas", "uvloop")


def describe_machine(event_loop: str) -> dict[str, Any]:
    """Return processor, kernel, interpreter, versions and load as plain data."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "event_loop": event_loop,
        "user": "root" if hasattr(os, "geteuid") and os.geteuid() == 0 else "ordinary user",
        "load_average": load_average(),
        "versions": versions(PACKAGES) | bubblewrap_version(),
    }


def cpu_model() -> str:
    """Return the processor's model name, or the architecture if it has none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load_average() -> list[float]:
    """Return the load of the last 1, 5 and 15 minutes."""
    return [round(load, 2) for load in psutil.getloadavg()]


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def bubblewrap_version() -> dict[str, str]:
    """Return the version of the `bwrap` command, if there is one."""
    bwrap = shutil.which("bwrap")
    if bwrap is None or sys.platform != "linux":
        return {}
    done = subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False)
    return {"bubblewrap": done.stdout.strip().removeprefix("bubblewrap ")}
