"""The commands that a notebook's `!` may begin: a few that look at files, in Python. A sandbox has no shell."""

from __future__ import annotations

import glob
import os
import platform
import shlex
import stat
import time
from collections.abc import Callable
from itertools import groupby, islice
from typing import Final

LINES: Final = 10
"""What `head` and `tail` show."""

STDIN_WIDTH: Final = 7
"""Of the numbers of `wc`, where it cannot know them before it has read everything."""


class NotKnown(Exception):
    """A command or an option that only a shell would know."""


class Failed(Exception):
    """What a command says in place of what it would have printed, as `(text, exit code)`."""


def run(line: str) -> tuple[str, int]:
    """Return what a line prints, and its exit code.

    Raises:
        NotKnown: it is not made of these commands and their usual options.
    """
    reader = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    reader.whitespace_split = True
    try:
        words = list(reader)
    except ValueError as exc:  # a quotation mark that is not closed
        raise NotKnown from exc
    text: str | None = None
    for is_pipe, part in groupby(words or [""], key="|".__eq__):
        if is_pipe:
            continue
        name, *rest = part
        if name not in COMMANDS or any(set(each) & set("$`;<>&()") for each in rest):
            raise NotKnown
        options = [each for each in rest if each.startswith("-") and len(each) > 1]
        names = [each for each in rest if each not in options]
        try:
            text = COMMANDS[name](options, names, text)
        except Failed as exc:
            return exc.args
        except OSError as exc:
            return f"{name}: {exc.filename}: {exc.strerror}\n", 1
    if text is None or words[-1] == "|":
        raise NotKnown
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), 0


def _letters(options: list[str], known: str) -> str:
    letters = "".join(each.lstrip("-") for each in options if not each.startswith("--color"))
    if set(letters) - set(known) or any(each.startswith("--") and not each.startswith("--color") for each in options):
        raise NotKnown
    return letters


def _paths(names: list[str]) -> list[str]:
    """Expand patterns as a shell does: one that matches nothing stays."""
    return [path for name in names for path in (sorted(glob.glob(name)) if glob.has_magic(name) else []) or [name]]


def _texts(names: list[str], given: str | None, most: int | None = None) -> list[tuple[str, str]]:
    """Read files, of each at most so many lines, or take what the command before has printed. Returns the name and the
    text of each."""
    found = []
    for path in _paths(names):
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            found.append((path, "".join(islice(file, most))))
    return found if names else [("", given or "")]


def _ls(options: list[str], names: list[str], _given: str | None) -> str:
    letters = _letters(options, "aAlhoF1Rtr")
    paths = _paths(names) or ["."]
    for path in paths:
        if not os.path.lexists(path):
            raise Failed(f"ls: cannot access {path!r}: No such file or directory\n", 2)
    folders = [path for path in paths if os.path.isdir(path)]
    parts = [_listed([path for path in paths if path not in folders], "", letters)]
    if "R" in letters:
        folders = [at for path in folders for at, below, _ in os.walk(path) if below.sort() is None]
    for folder in folders:
        shown = [each for each in os.listdir(folder) if not each.startswith(".") or {"a", "A"} & set(letters)]
        dots = [".", ".."] if "a" in letters else []
        header = f"{folder}:\n" if len(paths) > 1 or "R" in letters else ""
        parts.append(header + _listed([*dots, *shown], folder, letters))
    return "\n".join(filter(None, parts))


def _listed(names: list[str], folder: str, letters: str) -> str:
    found = [(name, os.lstat(os.path.join(folder, name))) for name in sorted(names)]
    if "t" in letters:
        found.sort(key=lambda each: -each[1].st_mtime)
    if "r" in letters:
        found.reverse()
    is_long = bool({"l", "o"} & set(letters))
    total = f"total {sum(status.st_blocks for _, status in found) // 2}\n" if is_long and folder else ""
    return total + "".join(
        (_details(status, "h" in letters) if is_long else "")
        + name
        + ("/" if "F" in letters and stat.S_ISDIR(status.st_mode) else "")
        + "\n"
        for name, status in found
    )


def _details(status: os.stat_result, is_human: bool) -> str:
    size, unit = float(status.st_size), ""
    while is_human and size >= 1024 and unit != "T":
        size, unit = size / 1024, "KMGT"["KMGT".find(unit or "-") + 1]
    shown = f"{size:.1f}{unit}" if unit and size < 10 else f"{size:.0f}{unit}"
    when = time.strftime("%b %e %H:%M", time.localtime(status.st_mtime))
    return f"{stat.filemode(status.st_mode)} {status.st_nlink} {status.st_uid} {shown:>9} {when} "


def _cat(options: list[str], names: list[str], given: str | None) -> str:
    _letters(options, "")
    return "".join(text for _, text in _texts(names, given))


def _head(options: list[str], names: list[str], given: str | None) -> str:
    count = _count(options, names)
    return _with_names([(name, _lines(text)[:count]) for name, text in _texts(names, given, count)])


def _tail(options: list[str], names: list[str], given: str | None) -> str:
    count = _count(options, names)
    return _with_names([(name, _lines(text)[-count:] if count else []) for name, text in _texts(names, given)])


def _count(options: list[str], names: list[str]) -> int:
    """Return how many lines are shown: `-n 5`, `-n5` or `-5`."""
    count = str(LINES)
    for option in options:
        count = names.pop(0) if option == "-n" and names else option.removeprefix("-").removeprefix("n")
    if not count.isdecimal():
        raise NotKnown
    return int(count)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _with_names(parts: list[tuple[str, list[str]]]) -> str:
    return "\n".join([(f"==> {name} <==\n" if len(parts) > 1 else "") + "".join(lines) for name, lines in parts])


def _wc(options: list[str], names: list[str], given: str | None) -> str:
    letters = _letters(options, "lwmc") or "lwc"
    rows, total = [], 0
    for name, text in _texts(names, given):
        size = len(text.encode("utf-8", "surrogateescape"))
        total += size
        counts = {"l": text.count("\n"), "w": len(text.split()), "m": len(text), "c": size}
        rows.append(([counts[each] for each in "lwmc" if each in letters], name))
    width = len(str(total)) if names else STDIN_WIDTH
    if len(rows) > 1:
        rows.append(([sum(column) for column in zip(*(counts for counts, _ in rows), strict=True)], "total"))
    elif len(rows[0][0]) == 1:
        width = 1
    return "".join(f"{' '.join(f'{each:{width}}' for each in counts)} {name}".rstrip() + "\n" for counts, name in rows)


def _echo(options: list[str], names: list[str], _given: str | None) -> str:
    return " ".join(_paths(names)) + ("" if _letters(options, "n") else "\n")


def _mkdir(options: list[str], names: list[str], _given: str | None) -> str:
    may_exist = bool(_letters(options, "p"))
    for name in names:
        if may_exist:
            os.makedirs(name, exist_ok=True)
        else:
            os.mkdir(name)
    return ""


def _pwd(_options: list[str], _names: list[str], _given: str | None) -> str:
    return os.getcwd() + "\n"


def _pip(options: list[str], names: list[str], given: str | None) -> str:
    from importlib.metadata import distributions

    asked, *wanted = names or [""]
    if options or given is not None or asked not in ("list", "freeze", "show") or bool(wanted) != (asked == "show"):
        raise NotKnown
    there = dict(sorted(((each.name, each.version) for each in distributions()), key=lambda each: each[0].lower()))
    if asked == "freeze":
        return "".join(f"{name}=={version}\n" for name, version in there.items())
    if asked == "list":
        width = max(map(len, ("Package", *there)))
        rows = [("Package", "Version"), ("-" * width, "-------"), *there.items()]
        return "".join(f"{name:{width}} {version}\n" for name, version in rows)
    names_of = {name.lower().replace("_", "-"): name for name in there}
    found = [names_of.get(name.lower().replace("_", "-")) for name in wanted]
    if None in found:
        raise Failed(f"WARNING: Package(s) not found: {', '.join(wanted)}\n", 1)
    return "---\n".join(f"Name: {name}\nVersion: {there[name or '']}\n" for name in found)


def _python(options: list[str], names: list[str], given: str | None) -> str:
    if options == ["-m"] and names[:1] == ["pip"]:
        return _pip([], names[1:], given)
    if names or options not in (["--version"], ["-V"]):
        raise NotKnown
    return f"Python {platform.python_version()}\n"


COMMANDS: Final[dict[str, Callable[[list[str], list[str], str | None], str]]] = {
    "cat": _cat,
    "echo": _echo,
    "head": _head,
    "ls": _ls,
    "mkdir": _mkdir,
    "pip": _pip,
    "pwd": _pwd,
    "python": _python,
    "tail": _tail,
    "wc": _wc,
}
"""By name: what prints its text from its options, its names, and what the command before it has printed."""
