"""Split a script's text, which comes in parts, into statements that are certainly complete.

A statement is complete when the next one has begun in the first column, or when the text is whole. The parser decides:
text is cut only where what comes before it is a program of its own. What it refuses waits for more text, so an error
of syntax is found when the text is whole, at the line where it would be found without parts.

Where the text is cut does not depend on the parts in which it comes.
"""

from __future__ import annotations

import ast
from typing import Any, Final

from toolcell_bridge.guest.scripts import SCRIPT
from toolcell_bridge.guest.source import BYTE_ORDER_MARK, plain_source

CONTINUING: Final = frozenset({"elif", "else", "except", "finally"})
"""Words that go on with the statement before."""

NO_BEGINNING: Final = frozenset(" \t\f\r\n#)]}\\")
"""Characters with which no statement begins."""

FREE_ATTEMPTS: Final = 8
"""After so many attempts in vain to cut before a line, lines are passed over: twice as many after each further one."""

IN_TEXT_LINES: Final = 64
"""Inside of what looks like a text in triple quotes, this line is tried all the same, and then twice as many on."""

PARSED: Final = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
QUOTES: Final = ('"""', "'''")


class Statement:
    """A piece of the script that is compiled and executed as one: nearly always one statement, or one line of them."""

    __slots__ = ("end", "is_last", "line", "lines", "source", "start", "tree")

    def __init__(self, start: int, end: int, line: int, source: str, tree: Any, is_last: bool) -> None:
        self.start, self.end = start, end
        """Offsets in characters of the whole text."""
        self.line = line
        """Where it begins."""
        self.lines = _lines_in(source.rstrip())
        """Line ends in it."""
        self.source = "\n" * (line - 1) + source
        """With as many empty lines before it as the script has lines there."""
        self.tree = tree
        """None: it is not Python."""
        self.is_last = is_last


class Statements:
    """The text so far, and how far it was taken."""

    def __init__(self) -> None:
        self.text = ""
        self.is_whole = False
        self.taken: list[Statement] = []
        self._begun, self._line = 0, 1
        """Where the first statement begins that was not taken."""
        self._is_cut: bool | None = None
        """Whether it can be cut at all; None: that is not known yet."""
        self._rescan()

    def add(self, start: int, text: str) -> list[Statement]:
        """Put `text` in place of everything from `start` on; return the taken statements that are gone with it."""
        is_retracted = start < len(self.text)
        self.text = self.text[:start] + text
        if not is_retracted:
            return []
        left = [each for each in self.taken if each.end <= start]
        if left and self._begins_at(left[-1].end) is False:
            left.pop()  # what comes now goes on with it
        gone, self.taken = self.taken[len(left) :], left
        if gone:
            self._begun, self._line = gone[0].start, gone[0].line
        if not left:
            self._begun, self._line, self._is_cut = 0, 1, None
        self._rescan()
        return gone

    def next(self) -> Statement | None:
        """Take the next statement that is complete; None when there is none yet, or none any more."""
        if self._is_cut is None and not self._look_at_beginning():
            return None
        if self._is_cut:
            while (end := self._next_end()) is not None:
                if (tree := self._attempt(end)) is not None and tree.body:
                    return self._take(end, self.text[self._begun : end], tree, is_last=False)
        if not self.is_whole or self._begun >= len(self.text):
            return None
        source = self.text[self._begun :] if self._is_cut else plain_source(self.text)
        tree = parsed(source, self._line)
        if tree is not None and not tree.body:
            self._begun = len(self.text)
            return None
        return self._take(len(self.text), source, tree, is_last=True)

    def _take(self, end: int, source: str, tree: Any, is_last: bool) -> Statement:
        statement = Statement(self._begun, end, line=self._line, source=source, tree=tree, is_last=is_last)
        self._line += _lines_in(source)
        self._begun = end
        self._failed = self._passed = self._in_text = 0
        self._quotes = ""
        self.taken.append(statement)
        return statement

    def _look_at_beginning(self) -> bool:
        """Decide whether the text can be cut. In a fence, or indented as a whole, it is read when it is whole."""
        begun = len(self.text) - len(self.text.removeprefix(BYTE_ORDER_MARK))
        program = self.text[begun:].lstrip()
        if not program and not self.is_whole:
            return False
        before = self.text[begun : len(self.text) - len(program)]
        self._is_cut = not (program.startswith("`") or before.endswith((" ", "\t")))
        self._begun = begun if self._is_cut else 0
        self._rescan()
        return True

    # Where a statement may end

    def _rescan(self) -> None:
        self._at, self._is_looked_at, self._quotes = self._begun, False, ""
        self._failed = self._passed = self._in_text = 0

    def _next_end(self) -> int | None:
        """Return the next line that may begin a statement; None when more text is needed to tell."""
        while True:
            if not self._is_looked_at:
                begins = self._begins_at(self._at)
                if begins is None:
                    return None
                self._is_looked_at = True
                if begins:
                    return self._at
            end = self.text.find("\n", self._at)
            if end < 0:
                return None
            self._note_quotes(self.text[self._at : end])
            self._at, self._is_looked_at = end + 1, False

    def _begins_at(self, at: int) -> bool | None:
        """Whether a statement can begin at this first column; None when more text is needed to tell."""
        text = self.text
        if at >= len(text):
            return None
        if text[at] in NO_BEGINNING:
            return False
        end = at
        while end < len(text) and (text[end].isalnum() or text[end] == "_"):
            end += 1
        if end == len(text) and not self.is_whole and any(each.startswith(text[at:]) for each in CONTINUING):
            return None
        return text[at:end] not in CONTINUING

    def _note_quotes(self, line: str) -> None:
        """Look for triple quotes in a line. Only a hint: they may stand in a comment, or in another text."""
        at = 0
        while True:
            if self._quotes:
                found, closed = line.find(self._quotes, at), ""
            else:
                found, closed = min(
                    ((line.find(each, at), each) for each in QUOTES if each in line[at:]), default=(-1, "")
                )
            if found < 0:
                return
            self._quotes, at = closed, found + 3

    def _attempt(self, end: int) -> Any:
        if self._quotes:
            self._in_text += 1
            if self._in_text < IN_TEXT_LINES or self._in_text.bit_count() > 1:
                return None
            return parsed(self.text[self._begun : end], self._line)
        if self._passed:
            self._passed -= 1
            return None
        tree = parsed(self.text[self._begun : end], self._line)
        if tree is None:
            self._failed += 1
            self._passed = 2 ** (self._failed - FREE_ATTEMPTS) if self._failed > FREE_ATTEMPTS else 0
        return tree


def parsed(source: str, line: int) -> Any:
    """Return the syntax tree of a piece that begins at this line; None when it is not a program of its own."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come when it is compiled
        try:
            return compile("\n" * (line - 1) + source, SCRIPT, "exec", PARSED, dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _lines_in(text: str) -> int:
    """Return the number of line ends, as Python counts them."""
    return text.count("\n") + text.count("\r") - text.count("\r\n")
