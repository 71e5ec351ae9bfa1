"""A witness that is a git repository: each head is the message of a commit, on a branch of its own.

A commit names the one before it, so a repository that others fetch, or a server that refuses to rewrite a branch, keeps
what it was shown. With a remote, each commit is pushed there and read from there.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from toolcell.audit.signatures import Head
from toolcell.audit.witness import MAX_LINE_BYTES, WitnessFailed, from_lines, to_line
from toolcell.errors import UsageError

BRANCH: Final = "refs/heads/toolcell-heads"
TIMEOUT_S: Final = 30.0
ATTEMPTS: Final = 5
"""How often a commit is made anew because somebody else's came first."""

_AUTHOR: Final = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "toolcell"), ("EMAIL", "toolcell@localhost"))
}


class GitWitness:
    """A repository on this machine, and with `remote` the repository that it calls so."""

    def __init__(self, repository: str | os.PathLike[str], *, remote: str | None = None) -> None:
        if remote is not None and (not remote or remote.startswith("-")):
            raise UsageError(f"{remote!r} is no name of a git remote")
        self._repository = Path(repository).absolute()
        self._remote = remote
        self.name = f"git:{self._repository}" + (f"#{remote}" if remote is not None else "")

    def push(self, head: Head) -> None:
        """Commit a head, and push the commit.

        Raises:
            WitnessFailed: it was not committed, or the remote did not take it.
        """
        for _ in range(ATTEMPTS):
            before = self._newest()
            parents = ["-p", before] if before else []
            message = f"{to_line(head)}\n"
            tree = self._git("mktree").decode().strip()  # without files
            made = self._git("commit-tree", *parents, tree, text=message).decode().strip()
            if self._move(made, before):
                return
        raise WitnessFailed(f"{self.name}: other commits came first, {ATTEMPTS} times")

    def _newest(self) -> str:
        """Return the newest commit of the branch; empty when there is none."""
        if self._remote is not None:
            listed = self._git("ls-remote", self._remote, BRANCH).split()
            if not listed:
                return ""
            self._git("fetch", "--quiet", "--no-tags", self._remote, f"+{BRANCH}:{self._tracked}")
            return self._git("rev-parse", self._tracked).decode().strip()
        return self._git("for-each-ref", "--format=%(objectname)", BRANCH).decode().strip()

    @property
    def _tracked(self) -> str:
        return f"refs/toolcell/{self._remote}"

    def _move(self, made: str, before: str) -> bool:
        """Let the branch end in a commit; False when it has moved meanwhile."""
        try:
            if self._remote is None:
                self._git("update-ref", BRANCH, made, before or "0" * len(made))
            else:
                self._git("push", "--quiet", "--no-verify", self._remote, f"{made}:{BRANCH}")
        except WitnessFailed:
            if self._newest() == before:
                raise
            return False
        return True

    def heads(self, log: str) -> Iterator[Head]:
        """Yield the heads in the commits of the branch.

        Raises:
            WitnessFailed: they cannot be read.
        """
        newest = self._newest()
        if newest:
            lines = self._lines("log", "--format=%B", newest)
            yield from (head for head in from_lines(lines) if head.log == log)

    def _lines(self, *arguments: str) -> Iterator[bytes]:
        """Yield what git writes line by line: others may have added commits without end."""
        command, environment = self._command(arguments)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
            assert process.stdout is not None
            try:
                while line := process.stdout.readline(MAX_LINE_BYTES + 1):
                    yield line
                if process.wait():
                    raise WitnessFailed(f"{self.name}: git {arguments[0]} failed")
            finally:
                process.kill()

    def _command(self, arguments: Iterable[str]) -> tuple[list[str], dict[str, str]]:
        """Return a command of git and its environment."""
        # No hook, signature, pager or question: of the repository's own settings only remotes are of use here.
        settings = ("-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false", "-c", "core.fsync=committed")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | _AUTHOR
        environment |= {"GIT_TERMINAL_PROMPT": "0", "GIT_CEILING_DIRECTORIES": str(self._repository.parent)}
        return ["git", "-C", str(self._repository), *settings, *arguments], environment

    def _git(self, *arguments: str, text: str = "") -> bytes:
        command, environment = self._command(arguments)
        try:
            done = subprocess.run(command, input=text.encode(), capture_output=True, env=environment, timeout=TIMEOUT_S)
        except FileNotFoundError as exc:
            raise WitnessFailed(f"{self.name}: git is not installed") from exc
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise WitnessFailed(f"{self.name}: {exc}") from exc
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
            raise WitnessFailed(f"{self.name}: git {arguments[0]}: {said[-1]:.200}")
        return done.stdout
