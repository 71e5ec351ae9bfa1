"""Make the backend that a name stands for."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from toolcell.config import Policy
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.sandbox.backend import Backend


async def built_in_backend(
    choice: str | Backend,
    policy: Policy,
    python: str | None,
    packages: Sequence[str],
    preload: Sequence[str],
    environment: Callable[[], Awaitable[Any]],
) -> Backend:
    """Return the backend of a name, or the one that was given. `environment` resolves the process backend's packages.

    Raises:
        UsageError: there is no such backend, or it does not go with these settings.
        SandboxUnavailable: it does not work on this platform.
    """
    if not isinstance(choice, str):
        return choice
    if choice == "process" and sys.platform != "linux":
        raise SandboxUnavailable(
            f'the process backend needs Linux namespaces, which {sys.platform} has not; use backend="docker"'
        )
    if choice == "process":
        resolved = await environment()
        if policy.profile == "container":
            if policy.shell:
                raise UsageError(
                    'shell=True needs profile="full" or Docker: a program would see the files of this machine'
                )
            from toolcell.sandbox.process.contained_backend import ContainedBackend

            return ContainedBackend(policy=policy, packages=resolved, preload=preload, python=python)
        from toolcell.sandbox.process.backend import ProcessBackend

        return ProcessBackend(policy=policy, packages=resolved, preload=preload, python=python)
    if choice == "docker":
        if policy.profile != "full":
            raise UsageError('profile="container" is the process backend\'s, inside a container; drop it')
        if python is not None:
            raise UsageError("a container runs its image's interpreter; python= is the process backend's")
        from toolcell.sandbox.docker.backend import DockerBackend

        return DockerBackend(policy=policy, packages=packages, preload=preload)
    raise UsageError(f'backend must be "process", "docker" or a Backend, not {choice!r}')
