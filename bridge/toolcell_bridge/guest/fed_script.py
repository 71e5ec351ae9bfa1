"""Run a script whose text comes in parts: each statement as soon as it is complete, all in one namespace.

`FedScript` is what a run of `Runner` does in place of executing a whole script.
"""

from __future__ import annotations

import ast
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

from toolcell_bridge.guest.calls_ahead import NAMES, CallsAhead, Found
from toolcell_bridge.guest.channel import Channel
from toolcell_bridge.guest.compiling import LAST, WENT_ON, Part
from toolcell_bridge.guest.scripts import SCRIPTS
from toolcell_bridge.guest.statements import Statement, Statements
from toolcell_bridge.guest.values import to_packed
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import CallAhead, Message, PartRetracted, Ran, ScriptPart

if TYPE_CHECKING:
    import asyncio

LATE_FUTURE: Final = "from __future__ imports must occur at the beginning of the file"

USES_LOOP: Final = frozenset({"create_task", "ensure_future", "get_running_loop"})
"""Names of what needs a running event loop."""

COROUTINE: Final = 0x80

Compile = Callable[[str, Part], CodeType]
"""Compiles a statement."""


class FedScript:
    """One script that comes in parts."""

    def __init__(
        self, channel: Channel, ahead: Mapping[str, Any], flush: Callable[[], object], own_names: Mapping[str, Any]
    ) -> None:
        """`flush` sends what was printed. `own_names`: what the sandbox's names mean, unless a script changed it."""
        self._channel, self._flush = channel, flush
        self._statements = Statements()
        self._ready: deque[Statement] = deque()
        """Complete, and not begun."""
        self._ran: list[Statement] = []
        self._ahead = CallsAhead(ahead) if ahead else None
        self._own_names, self._namespace = own_names, dict[str, Any]()
        self._unread: deque[Statement] = deque()
        """Complete, and not looked through for calls."""
        self._problem = ""
        self._is_blocked = False
        """The statement that runs may change something: those after it are not looked through before it has run."""
        self._count = 0
        """Statements that were begun."""
        self._is_running = False
        self._taken = 0
        """Parts that were taken."""
        self._thread = 0
        self._flags = 0
        self._loop: asyncio.Runner | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return self._statements.text

    @property
    def line(self) -> int:
        """Last line of the text that has run."""
        return max((each.line + each.lines for each in self._ran), default=0)

    def run(self, compiled: Compile, namespace: dict[str, Any], show: Callable[[str], object]) -> None:
        """Run the statements as they come. `show` is given the text before each of them.

        Raises:
            BaseException: whatever a statement raises; it is the last one then.
        """
        self._thread = threading.get_ident()
        self._namespace = namespace
        namespace[WENT_ON] = went_on = object()
        self._channel.on_part = self._take
        try:
            while (statement := self._next()) is not None:
                show(self.text)
                self._ran.append(statement)
                self._count += 1
                namespace.pop(LAST, None)
                code = compiled(statement.source, Part(self._flags, self._count == 1, statement.is_last))
                self._check_futures(statement)
                self._flags |= code.co_flags & _FUTURES
                self._is_running = True
                self._evaluate(code, namespace)
                self._is_running = False
                if namespace.get(LAST) is went_on:
                    del namespace[LAST]
                elif WENT_ON in _names_in(code):
                    break  # it has returned
        finally:
            self._channel.on_part = None
            namespace.pop(WENT_ON, None)
            try:
                if self._loop is not None:
                    self._loop.close()
            finally:
                self._channel.send(Ran(self._count, self.line))

    # Text

    def _next(self) -> Statement | None:
        """Return the next statement; None when there is none any more."""
        self._is_blocked = False
        while True:
            self._take()
            if self._ready:
                statement = self._ready.popleft()
                if self._unread and self._unread[0] is statement:
                    self._unread.popleft()
                    self._is_blocked = self._ahead is not None and not self._looked_through(statement)[1]
                self._look_ahead()
                return statement
            if self._problem:
                raise SyntaxError(self._problem, (SCRIPTS.current, self.text.count("\n") + 1, None, None))
            if self._statements.is_whole:
                return None
            self._flush()
            self._channel.send(Ran(self._count, self.line))
            taken = self._taken
            self._channel.read_until(lambda taken=taken: self._take() != taken)  # type: ignore[misc]

    def _take(self) -> int:
        """Take the parts that were received; return how many there were so far. Only the script's own thread does."""
        if threading.get_ident() != self._thread or not (parts := self._channel.take_parts()):
            return self._taken
        self._taken += len(parts)
        for part in parts:
            self._add(part)
        while (statement := self._statements.next()) is not None:
            if self._problem and statement.is_last:
                break  # it would end in what cannot be sent
            self._ready.append(statement)
            self._unread.append(statement)
        if self._is_running:  # else the next statement runs at once
            self._look_ahead()
        return self._taken

    def _add(self, part: ScriptPart) -> None:
        statements = self._statements
        is_retracted = part.start < len(statements.text)
        gone = statements.add(part.start, part.text)
        if is_retracted:
            has_run = [each for each in gone if each in self._ran]
            for queue in (self._ready, self._unread):
                left = [each for each in queue if each not in gone]
                queue.clear()
                queue.extend(left)
            self._ran = [each for each in self._ran if each not in has_run]
            start, end = (has_run[0].start, has_run[-1].end) if has_run else (0, 0)
            self._channel.send(PartRetracted(start, end))
        statements.is_whole = statements.is_whole or part.last
        self._problem = self._problem or part.problem

    # Calls ahead

    def _look_ahead(self) -> None:
        """Name the calls of statements that have not begun, up to one that may change something."""
        if self._ahead is None:
            return
        messages: list[Message] = []
        while self._unread and not self._is_blocked:
            found, goes_on = self._looked_through(self._unread[0])
            if not goes_on:
                break  # those after it wait until it has run
            self._unread.popleft()
            for tool, args, line in found:
                try:
                    messages.append(CallAhead(tool, to_packed(args, f"{tool} arguments"), line))
                except (UnsendableValue, ValueTooLarge, ValueError, TypeError):
                    continue  # the call itself will say so
        for message in messages:
            self._channel.send(message)

    def _looked_through(self, statement: Statement) -> tuple[list[Found], bool]:
        if self._ahead is None or statement.tree is None:
            return [], False
        own, now = self._own_names, self._namespace
        return self._ahead.of(statement.tree, [name for name in NAMES if own.get(name) is not now.get(name)])

    # Execution

    def _check_futures(self, statement: Statement) -> None:
        """Refuse a `__future__` import that comes late, as the compiler would in the whole script."""
        for node in statement.tree.body if statement.tree is not None and len(self._ran) > 1 else ():
            if isinstance(node, ast.ImportFrom) and node.module == "__future__" and not self._is_early:
                line = self.text.split("\n")[node.lineno - 1]
                raise SyntaxError(LATE_FUTURE, (SCRIPTS.current, node.lineno, node.col_offset + 1, line))

    @property
    def _is_early(self) -> bool:
        """Whether nothing but a docstring and `__future__` imports has run before the last statement."""
        before = [node for each in self._ran[:-1] for node in each.tree.body]
        if before and isinstance(before[0], ast.Expr) and isinstance(before[0].value, ast.Constant):
            before = before[1:]
        return all(isinstance(each, ast.ImportFrom) and each.module == "__future__" for each in before)

    def _evaluate(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Execute a statement. From the first that awaits on, all run in one event loop, as in a whole script."""
        is_coroutine = bool(code.co_flags & COROUTINE)
        if self._loop is None and not is_coroutine and not USES_LOOP.intersection(code.co_names):
            eval(code, namespace)  # this is what a sandbox is for
            return
        if self._loop is None:
            import asyncio

            self._loop = asyncio.Runner()

        async def main() -> None:
            value = eval(code, namespace)
            if is_coroutine:
                await value

        self._loop.run(main())


def _futures() -> int:
    import __future__

    return sum(
        getattr(__future__, name).compiler_flag for name in set(__future__.all_feature_names) - {"nested_scopes"}
    )


_FUTURES: Final = _futures()


def _names_in(code: CodeType) -> set[str]:
    """Return the names that a piece of code uses, those of functions in it included."""
    names = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            names |= _names_in(each)
    return names
