"""Read a script as models write it: with a byte order mark, in a markdown fence, after prompts, or indented as a whole.

None of these can begin a Python program, so no program changes its meaning. Lines keep their numbers.
"""

from __future__ import annotations

BYTE_ORDER_MARK = "\ufeff"
FENCES = ("```", "~~~")


def plain_source(source: str) -> str:
    """Return the program in `source`; `source` itself when it is nothing but a program."""
    start = source.removeprefix(BYTE_ORDER_MARK)
    if start.lstrip().startswith(FENCES):
        start = _without_fence(start)
    if start.lstrip().startswith((">>>", "In [")) and _after_prompt(start.lstrip()) is not None:
        start = "\n".join([_after_prompt(line) or "" for line in start.split("\n")])
    if start[: len(start) - len(start.lstrip())].endswith((" ", "\t")):
        import textwrap  # it loads re, which most scripts need not wait for

        start = textwrap.dedent(start)
    return start


def _without_fence(source: str) -> str:
    """Blank the line that opens the fence, and what follows from the last line that closes it."""
    lines = source.split("\n")
    opening = next(index for index, line in enumerate(lines) if line.strip())
    language = lines[opening].strip().lstrip("`~")
    if "`" in language:  # all of it is on this line: no Python
        return source
    fence = lines[opening].strip().removesuffix(language)
    ends = [index for index in range(opening + 1, len(lines)) if lines[index].strip() == fence]
    if not ends and fence[0] == "~":  # an operator of Python
        return source
    end = ends[-1] if ends else len(lines)
    return "\n".join([*[""] * (opening + 1), *lines[opening + 1 : end]])


def _after_prompt(line: str) -> str | None:
    """Return what follows the prompt of Python or IPython; None for a line of output."""
    text = line.lstrip()
    if text.startswith("In ["):
        number, colon, code = text[4:].partition("]:")
        return code.removeprefix(" ") if colon and number.isdecimal() else None
    prompt = next((each for each in (">>>", "...:", "...") if text.startswith(each)), None)
    return None if prompt is None else text[len(prompt) :].removeprefix(" ")
