"""`Environment`: where the sandboxes of a runtime come from, and what scripts can import in them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from toolcell.config import AUTO_FLOOR, PROFILES, Limits, Policy, names_of, package_name
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.sandbox.backend import Backend, check_kind_of
from toolcell.sandbox.shortages import IsolationRefused
from toolcell.support import daemon_threads

# Check which backend was chosen, and make the one that a name stands for.

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


_OF_SANDBOXES = ("profile", "require", "shell", "hash_seed", "env", "env_passthrough")
"""Fields of a Policy that a backend holds. The others are held by the runtime, whatever its backend."""

WEAKER: Mapping[str, Mapping[str, Any]] = {
    'Policy(require=DEFAULT_LAYERS - {"landlock"})': {"require": AUTO_FLOOR["full"]},
    'Policy(profile="container")': {"profile": "container", "require": AUTO_FLOOR["container"]},
}
"""What to write instead of the default, strongest first, and the fields of a Policy that it changes."""


class Environment:
    """One backend with its interpreter and packages."""

    def __init__(
        self,
        choice: str | Backend,
        *,
        python: str | None = None,
        packages: Sequence[str] = (),
        preload: Sequence[str] = (),
        allow_unisolated: bool = False,
    ) -> None:
        """
        Raises:
            UsageError: an argument cannot work.
        """
        check_choice(choice, python)
        self._choice, self._python, self._allow_unisolated = choice, python, allow_unisolated
        made_with = (choice.packages, choice.preload) if isinstance(choice, Backend) else ((), ())
        self._names = names_of(packages, "packages") or tuple(made_with[0])
        self._preload = names_of(preload, "preload") or tuple(made_with[1])
        self.packages = tuple(map(package_name, self._names))
        """What scripts may import besides the standard library; with versions once it is open."""
        self.facts: dict[str, Any] = {"packages": self._names, "preload": self._preload}
        """For the audit log."""
        self._backend: Backend | None = None

    @property
    def backend(self) -> Backend:
        """The backend of an environment that was opened."""
        assert self._backend is not None
        return self._backend

    @property
    def is_built_in(self) -> bool:
        """True when the backend is made here, with the policy of the runtime."""
        return isinstance(self._choice, str)

    def check_own(self, policy: Policy) -> None:
        """Check that nothing is asked for that a backend which was made elsewhere would not do.

        Raises:
            UsageError: names the argument, and where it belongs.
        """
        if isinstance(self._choice, str):
            return
        given = {"python": self._python, "packages": self._names, "preload": self._preload}
        made = self._choice
        made_with = {"python": made.python, "packages": tuple(made.packages), "preload": tuple(made.preload)}
        asked = [name for name, value in given.items() if value and value != made_with[name]]
        own_policy = self._choice.policy or Policy()
        changed = [each for each in _OF_SANDBOXES if each in policy.model_fields_set]
        if any(getattr(policy, each) != getattr(own_policy, each) for each in changed):
            asked.append("policy")
        if asked:
            kind = type(self._choice).__name__
            takes = inspect.signature(type(self._choice)).parameters
            cures = (f"write {kind}({each}=...)" if each in takes else f"{kind} takes no {each}=" for each in asked)
            raise UsageError(
                f"backend= is a {kind} that was made without this {'= and '.join(asked)}=, which its sandboxes "
                f'would not have; {", ".join(cures)}, or let the Runtime make it: backend="process", backend="docker"'
            )

    @property
    def isolates(self) -> bool:
        """True when it is open and its sandboxes hold what runs in them."""
        return self._backend is not None and self._backend.isolates

    async def open(self, policy: Policy, limits: Limits, start_s: float, stack: AsyncExitStack) -> None:
        """Open the backend; `stack` closes it. `start_s`: in which a sandbox must start.

        Raises:
            UsageError: it isolates nothing, or cannot hold `limits`.
            SandboxUnavailable: this machine cannot start sandboxes.
        """
        backend = await self._make(policy, limits)
        self._backend = backend
        if not (backend.isolates or self._allow_unisolated):
            raise UsageError(
                f"the backend {backend.name!r} isolates nothing; a test that means it says allow_unisolated=True"
            )
        backend.start_s = start_s
        try:
            await backend.open()
        except IsolationRefused as exc:
            from toolcell.sandbox.process.probes import GVISOR_HAS_NOT, is_under_gvisor  # where it is needed

            if self.is_built_in and is_under_gvisor():
                raise IsolationRefused(GVISOR_HAS_NOT) from None  # which says more than the call that failed first
            raise SandboxUnavailable(f"{exc}; {await self._what_runs(policy, limits)}") from exc
        stack.push_async_callback(backend.close)
        self.check_supported(limits)

    async def _make(self, policy: Policy, limits: Limits) -> Backend:
        return await built_in_backend(
            self._choice,
            policy,
            self._python,
            self._names,
            self._preload,
            self._resolved_packages,
            limits.frame_bytes,
        )

    async def _what_runs(self, policy: Policy, limits: Limits) -> str:
        """Try what a policy could say instead of `full`. Return what runs here, for who reads the refusal."""
        doctor = "`toolcell doctor` says what is missing and how to get it"
        if not self.is_built_in or policy.profile != "full" or policy.require != PROFILES["full"]:
            return doctor
        for line, fields in WEAKER.items():
            with suppress(SandboxUnavailable, UsageError):  # of usage: shell=True in a container
                backend = await self._make(policy.model_copy(update=fields), limits)
                await backend.open()
                await backend.close()
                return f"{line} runs here, with less isolation (docs/containers.md); {doctor}"
        return f"neither runs {' nor '.join(WEAKER)}; {doctor}"

    def check_supported(self, limits: Limits) -> None:
        """Check that the backend can hold these limits.

        Raises:
            SandboxUnavailable: names one that it cannot.
        """
        if limits.cpu_cores is not None and (why := self.backend.unsupported.get("cpu_cores")) is not None:
            raise SandboxUnavailable(f"cpu_cores={limits.cpu_cores:g} cannot be held: {why}")

    async def _resolved_packages(self) -> Any:
        if not self._names:
            return None
        resolved = await prepare_packages(self._names, self._python)
        self.facts["digest"] = resolved.digest
        self.packages = resolved.versions(self._names)
        return resolved.path


async def prepare_packages(names: Sequence[str], python: str | None = None) -> Any:
    """Return the environment with these packages for an interpreter, building it if it is not in the cache.

    Raises:
        PackageError: it cannot be built.
    """
    from toolcell.sandbox.process import packages
    from toolcell.sandbox.process.root_filesystem import interpreter

    return await daemon_threads.run_sync(lambda: packages.resolve(names, python=interpreter(python).executable))
