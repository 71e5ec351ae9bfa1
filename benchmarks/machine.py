"""Where and with what was measured: the part of a result without which its numbers mean nothing."""

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
    """Processor, kernel, interpreter, versions and load, as plain data."""
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
    """The processor's own name for itself, or the architecture where it has none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load_average() -> list[float]:
    """Of the last 1, 5 and 15 minutes."""
    return [round(load, 2) for load in psutil.getloadavg()]


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions; what is not installed is left out."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def bubblewrap_version() -> dict[str, str]:
    """Of the `bwrap` command, if there is one."""
    bwrap = shutil.which("bwrap")
    if bwrap is None or sys.platform != "linux":
        return {}
    told = subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False)
    return {"bubblewrap": told.stdout.strip().removeprefix("bubblewrap ")}
