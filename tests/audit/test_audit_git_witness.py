"""Commits of a git repository as a witness: on this machine, or pushed to a remote."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from audit.ledger import Ledger
from toolcell.audit.git_witness import BRANCH, GitWitness
from toolcell.audit.signatures import default_heads_dir
from toolcell.audit.witness import Witness, WitnessFailed
from toolcell.audit.witness_places import witness_of
from toolcell.errors import UsageError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
SLOW = {"checkpoint_s": 3600}


def git(*arguments: object) -> str:
    return subprocess.run(["git", *map(str, arguments)], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no name, no settings of the user


@pytest.fixture(params=["bare", "with files", "remote"])
def witness(request: pytest.FixtureRequest, tmp_path: Path) -> Witness:
    bare, local = tmp_path / "bare.git", tmp_path / "local"
    git("init", "--bare", bare)
    git("init", local)
    if request.param == "remote":
        git("-C", local, "remote", "add", "origin", bare)
    places = {"bare": f"git:{bare}", "with files": f"git:{local}", "remote": f"git:{local}#origin"}
    return witness_of(places[request.param], tmp_path)


def test_each_head_is_a_commit_and_finds_a_log_that_was_put_back(
    ledger: Ledger, witness: Witness, tmp_path: Path
) -> None:
    ledger.fill(1, witnesses=[witness], settings=SLOW)
    assert ledger.verify(witnesses=[witness], strict=True).ok
    before = len([*witness.heads(ledger.verify().log)])
    shutil.copytree(ledger.directory, tmp_path / "old")
    ledger.fill(1, witnesses=[witness], settings=SLOW)
    assert len([*witness.heads(ledger.verify().log)]) > before > 0
    assert [*witness.heads("another log")] == []
    shutil.rmtree(ledger.directory)
    shutil.copytree(tmp_path / "old", ledger.directory)
    shutil.rmtree(default_heads_dir())

    assert ledger.verify().ok
    assert [each.kind for each in ledger.verify(witnesses=[witness]).findings] == ["cut_off"]


def test_commits_of_two_writers_follow_each_other(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git("init", "--bare", tmp_path / "bare.git")
    first, second = GitWitness(tmp_path / "bare.git"), GitWitness(tmp_path / "bare.git")
    with ledger.opened(settings=SLOW) as recorder:
        heads = [recorder.log.checkpoint() for _ in range(3)]
    newest = first._newest
    first.push(heads[0])

    def late() -> str:
        before = newest()
        monkeypatch.setattr(first, "_newest", newest)
        second.push(heads[1])  # between our look at the branch and our commit
        return before

    monkeypatch.setattr(first, "_newest", late)
    first.push(heads[2])
    assert {head.seq for head in first.heads(heads[0].log)} == {head.seq for head in heads}
    assert git("-C", tmp_path / "bare.git", "rev-list", "--count", BRANCH) == "3"


def test_commits_that_somebody_adds_without_end_are_read_line_by_line(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git("init", "--bare", tmp_path / "bare.git")
    witness = GitWitness(tmp_path / "bare.git")
    ledger.fill(1, witnesses=[witness], settings=SLOW)
    log = ledger.verify().log
    tree = git("-C", tmp_path / "bare.git", "mktree")
    (tmp_path / "message").write_text("x" * 100_000 + "\n{}\n[]\n")
    author = ("-c", "user.name=x", "-c", "user.email=x")
    parent = git("-C", tmp_path / "bare.git", "rev-parse", BRANCH)
    added = git(*author, "-C", tmp_path / "bare.git", "commit-tree", "-p", parent, "-F", tmp_path / "message", tree)
    git("-C", tmp_path / "bare.git", "update-ref", BRANCH, added)

    assert len([*witness.heads(log)]) > 0
    assert ledger.verify(witnesses=[witness]).ok
    next(iter(witness.heads(log)))  # a reader that stops leaves no process
    (tmp_path / "bare.git" / BRANCH).write_text(f"{'1' * 40}\n")  # a commit that is not there
    with pytest.raises(WitnessFailed, match="git"):
        [*witness.heads(log)]


def test_the_branch_goes_only_forward_and_nothing_of_a_repository_runs(ledger: Ledger, tmp_path: Path) -> None:
    bare, local = tmp_path / "bare.git", tmp_path / "local"
    git("init", "--bare", bare)
    git("init", local)
    git("-C", local, "remote", "add", "origin", bare)
    for name in ("pre-push", "reference-transaction", "post-commit", "pre-commit"):
        hook = local / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
        hook.chmod(0o755)
    ledger.fill(1, witnesses=[f"git:{local}#origin"], settings=SLOW)
    before = git("-C", bare, "rev-parse", BRANCH)
    ledger.fill(1, witnesses=[f"git:{local}#origin"], settings=SLOW)

    assert before in git("-C", bare, "rev-list", BRANCH).split()[1:]
    assert not (tmp_path / "hooked").exists()


def test_a_place_that_is_no_repository_fails_and_says_so(ledger: Ledger, tmp_path: Path) -> None:
    git("init", tmp_path)  # a repository around it is not meant
    (tmp_path / "folder").mkdir()
    with ledger.opened(settings=SLOW) as recorder:
        head = recorder.log.checkpoint()
    for place in (tmp_path / "folder", tmp_path / "nowhere"):
        with pytest.raises(WitnessFailed, match="git"):
            GitWitness(place).push(head)
    (tmp_path / "local").mkdir()
    git("init", tmp_path / "local")
    for remote in ("origin", str(tmp_path / "nowhere")):
        with pytest.raises(WitnessFailed, match="git ls-remote"):
            GitWitness(tmp_path / "local", remote=remote).push(head)
    with pytest.raises(UsageError, match="no name of a git remote"):
        GitWitness(tmp_path, remote="--upload-pack=touch x")
    os.environ["PATH"], path = str(tmp_path), os.environ["PATH"]
    try:
        with pytest.raises(WitnessFailed, match="git is not installed"):
            GitWitness(tmp_path).push(head)
    finally:
        os.environ["PATH"] = path
