"""Check which backend was chosen, and make the one that a name stands for."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from toolcell.config import Policy
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.sandbox.backend import Backend, check_kind_of

BUILT_IN = ("process", "docker")
CLASSES = {"ray": "RayBackend()", "kubernetes": "KubernetesBackend()", "k8s": "KubernetesBackend()"}


def check_choice(backend: object, python: object) -> None:
    """Check the arguments `backend=` and `python=`.

    Raises:
        UsageError: `backend` is neither a name nor a Backend, or `python` is not a path.
    """
    wanted = 'backend must be "process", "docker" or a Backend'
    if isinstance(backend, str):
        if backend not in BUILT_IN:
            made = CLASSES.get(backend.lower())
            raise UsageError(f"{wanted}, not {backend!r}{f'; write {made}' if made else ''}")
    elif isinstance(backend, type):
        raise UsageError(f"backend= takes a backend, not the class {backend.__name__}; write {backend.__name__}()")
    elif not callable(getattr(backend, "start", None)):
        raise UsageError(f"{wanted}, not {type(backend).__name__}")
    else:
        check_kind_of(backend, Backend)
    if not isinstance(python, str | os.PathLike | None):
        raise UsageError(f"python= takes the path of an interpreter, not {type(python).__name__} {python!r:.80}")


NO_SHELL = 'shell=True needs profile="full" or Docker: a program would see the files of this machine'


async def built_in_backend(
    choice: str | Backend,
    policy: Policy,
    python: str | None,
    packages: Sequence[str],
    preload: Sequence[str],
    resolve_packages: Callable[[], Awaitable[Any]],
    frame_bytes: int,
) -> Backend:
    """Return the backend of a checked choice. `resolve_packages`, `frame_bytes`: for the process backend.

    Raises:
        UsageError: it does not go with these settings.
        SandboxUnavailable: it does not work on this platform.
    """
    if not isinstance(choice, str):
        return choice
    if choice == "docker":
        if policy.profile == "container":
            raise UsageError('profile="container" is the process backend\'s, inside a container; drop it')
        if python is not None:
            raise UsageError("a container runs its image's interpreter; python= is the process backend's")
        from toolcell.sandbox.docker.backend import DockerBackend

        return DockerBackend(policy=policy, packages=packages, preload=preload)
    if sys.platform != "linux":
        raise SandboxUnavailable(
            f'the process backend needs Linux namespaces, which {sys.platform} has not; use backend="docker"'
        )
    if policy.profile == "container" and policy.shell:
        raise UsageError(NO_SHELL)
    given: dict[str, Any] = {"packages": await resolve_packages(), "preload": preload, "python": python}
    match policy.profile:
        case "container":
            from toolcell.sandbox.process.contained_backend import ContainedBackend

            return ContainedBackend(policy=policy, **given, frame_bytes=frame_bytes)
        case "auto":
            from toolcell.sandbox.process.auto_backend import AutoBackend

            return AutoBackend(policy=policy, **given, frame_bytes=frame_bytes)
        case "full":
            from toolcell.sandbox.process.backend import ProcessBackend

            return ProcessBackend(policy=policy, **given)
