"""`Placeholder`: what a script gets in a dry run in place of the result of a call that was collected and not made.

It may be stored, passed on, returned, compared with None, printed and formatted, as `(result of effect-1)`, and its
members are placeholders too. Whatever needs what it stands for ends the dry run there, and so does a call with an
argument that has such text in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NoReturn

from toolcell_bridge.wire.messages import ToolFail, ToolReturn

RESULT_OF: Final = "$result_of"
"""The one key of the dict that stands for a placeholder on the wire. Its value is the effect's id, the path of a member
if it is one, a dot and the key of the dry run, which nobody outside knows: no data of a tool can pass for one."""

_REFERENCE: Final = re.compile(
    r"(effect-[1-9][0-9]{0,9})((?:\.[A-Za-z_][\w-]{0,63}|\[[0-9]{1,6}\]){0,8})\.([^.\[]+)", re.ASCII
)
"""What a reference may say: anything else would be text of a script that is shown as ours."""


def parts_of(reference: str) -> tuple[str, str, str] | None:
    """Shape: ("effect-1", ".items[0].id", key); None for what is not a reference."""
    found = _REFERENCE.fullmatch(reference)
    return None if found is None else (found[1], found[2], found[3])


def member_of(reference: str, step: str) -> str | None:
    """Return the reference to a member; None where there is no such. `step`: `.name` or `[0]`."""
    effect, path, key = parts_of(reference) or ("", "", "")
    made = f"{effect}{path}{step}.{key}"
    return made if parts_of(made) == (effect, path + step, key) else None


def named(effect: str, path: str) -> str:
    """Shape: `result of effect-1`, `items[0].id of the result of effect-1`."""
    return f"{path.lstrip('.')} of the result of {effect}" if path else f"result of {effect}"


DRY_RUN: Final = "<dry_run>"
"""The input that holds the key of the dry run. No source can contain this name."""

ENDS_DRAFT: Final = "dry_run"
"""Code of the answer to a call that a dry run cannot make."""


NOT_LOOKED_INTO: Final = (
    "a script may store it and its members, pass them on to calls that write, print and return them, but not look into "
    "them. The draft ends here, and has the writes until here, which may not be all"
)


class DraftEnded(BaseException):
    """The script needs a result that a dry run does not have. Not an `Exception`: the script must not go on."""


class GuestDryRun:
    """The guest's side of one dry run."""

    is_on: ClassVar[bool] = False
    """The script is a dry run."""

    def __init__(self, key: str) -> None:
        self._end = f".{key}"
        self._ended = ""
        self._shown: dict[str, bytes] = {}
        """Texts that stand for results, each with its bytes."""

    def shown(self, effect: str, path: str) -> str:
        """Return the text that stands for a result."""
        text = f"({named(effect, path)})"
        self._shown[text] = text.encode()
        return text

    def check_arguments(self, packed: bytes) -> None:
        """Check that no text in the arguments of a call stands for a result: it would be sent as it is.

        Raises:
            DraftEnded: one does.
        """
        for text, data in self._shown.items():
            if data in packed:
                self.end(
                    f"an argument has the text {text!r} in it, in place of a result that is not known in a dry run: a "
                    "script may pass the result itself on, but not text made of it"
                )

    def check(self) -> None:
        """Check that the dry run goes on.

        Raises:
            DraftEnded: it has ended.
        """
        if self._ended:
            raise DraftEnded(self._ended)

    def end(self, why: str) -> NoReturn:
        """End it: the script makes no further call.

        Raises:
            DraftEnded: always.
        """
        self._ended = self._ended or why
        raise DraftEnded(why)

    def answer(self, tool: str, answer: ToolReturn | ToolFail) -> Any:
        """Return the answer with placeholders in it.

        Raises:
            DraftEnded: the host cannot make the call in a dry run.
        """
        if isinstance(answer, ToolReturn):
            return ToolReturn(answer.id, self._restored(tool, answer.value))
        if answer.code == ENDS_DRAFT:
            self.end(answer.message)
        return answer

    def _restored(self, tool: str, value: Any) -> Any:
        if type(value) is dict:
            reference = value.get(RESULT_OF) if len(value) == 1 else None
            if type(reference) is str and reference.endswith(self._end) and parts_of(reference):
                return Placeholder(self, tool, reference)
            return {key: self._restored(tool, item) for key, item in value.items()}
        return [self._restored(tool, item) for item in value] if type(value) is list else value


class Placeholder:
    """Stands for a result that is not known yet. What needs to know it raises `DraftEnded`."""

    __slots__ = ("_dry_run", "_reference", "_tool")
    _dry_run: GuestDryRun
    _tool: str
    _reference: str

    def __init__(self, dry_run: GuestDryRun, tool: str, reference: str) -> None:
        for name, value in (("_dry_run", dry_run), ("_tool", tool), ("_reference", reference)):
            object.__setattr__(self, name, value)

    def __copy__(self) -> Placeholder:
        return self

    def __deepcopy__(self, memo: object) -> Placeholder:
        return self

    def _look(self, *_values: object, **_more: object) -> NoReturn:
        effect, _, _ = parts_of(self._reference) or ("", "", "")
        self._dry_run.end(f"the result of {self._tool} ({effect}) is not known in a dry run: {NOT_LOOKED_INTO}")

    def __getitem__(self, key: object) -> Placeholder:
        step = f".{key}" if type(key) is str else f"[{key}]" if type(key) is int else ""
        if not step or (reference := member_of(self._reference, step)) is None:
            self._look()
        return Placeholder(self._dry_run, self._tool, reference)

    def get(self, name: object, default: object = None) -> Placeholder:
        """Return a member, as `p[name]` does. A default would need to know whether there is one."""
        return self[name] if default is None and type(name) is str else self._look()

    def __str__(self) -> str:
        effect, path, _ = parts_of(self._reference) or ("", "", "")
        return self._dry_run.shown(effect, path)

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        try:
            return format(str(self), spec)
        except ValueError:  # of a number
            self._look()

    def __eq__(self, other: object) -> bool:
        return False if other is None else self._look()

    def __ne__(self, other: object) -> bool:
        return True if other is None else self._look()

    __class__ = property(_look)  # isinstance() looks too


def reference_of(value: Placeholder) -> dict[str, Any]:
    """Return what is sent in place of a placeholder."""
    return {RESULT_OF: value._reference}


_LOOKS: Final = """
    abs add aenter aexit aiter and anext await bool bytes call ceil complex contains delattr delitem dir divmod enter
    exit float floor floordiv fspath ge getattr gt hash iadd iand ifloordiv ilshift imatmul imod imul
    index int invert ior ipow irshift isub iter itruediv ixor le len length_hint lshift lt matmul missing mod mul neg
    next or pos pow radd rand rdivmod reduce reduce_ex reversed rfloordiv rlshift rmatmul rmod rmul ror round rpow
    rrshift rshift rsub rtruediv rxor setattr setitem sub truediv trunc xor
"""
"""Special methods, without their underscores. Python looks for them on the class."""
for _name in _LOOKS.split():
    setattr(Placeholder, f"__{_name}__", Placeholder._look)
Mapping.register(Placeholder)  # so that `match` of a module looks into it, too, and does not take another case


# `match` asks a class whether it is a mapping or a sequence, and no class can be both: in a script, each such pattern
# asks `Looks` first.

LOOKS: Final = "<looks>"
"""Its name in a script. No source can contain this name."""


class _LooksAtValue(type):
    def __instancecheck__(cls, value: object) -> bool:
        if type(value) is Placeholder:
            value._look()
        return True


class Looks(str, metaclass=_LooksAtValue):
    """A class pattern that every value fits. It is a `str` because `case str(pattern)` has the value itself matched."""


def with_looks(tree: Any) -> Any:
    """Return the syntax tree of a script whose patterns of sequences and mappings ask `Looks` first."""
    import ast

    class Patterns(ast.NodeTransformer):
        def visit_MatchSequence(self, node: ast.MatchSequence | ast.MatchMapping) -> ast.MatchClass:
            self.generic_visit(node)
            return ast.copy_location(ast.MatchClass(ast.Name(LOOKS, ast.Load()), [node], [], []), node)

        visit_MatchMapping = visit_MatchSequence

    return ast.fix_missing_locations(Patterns().visit(tree))
