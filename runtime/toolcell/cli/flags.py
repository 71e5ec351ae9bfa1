"""How commands are added, and groups of flags that a command takes as one argument: the limits, or a dataclass whose
fields are options.

typer reads a function's signature. So a command's parameter for a group is replaced there by the group's flags.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from toolcell.cli.arguments import LIMITS_FILE, described_limits, limit_flags, make_limits
from toolcell.cli.conversion import Command, Group
from toolcell.cli.terminal import reporting
from toolcell.config import Limits

AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON document.")]

Register = Callable[[typer.Typer, str], None]
"""Adds what a module has to the command line, under a name."""


class NamingCommand(Command):
    """A command whose usage errors show the wrong value, as in `--wall-s abc`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help. What the limits mean is looked up only here."""
        about = described_limits()
        for each in self.params:
            if each.name in about:
                each.help = about[each.name]  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line. typer leaves the value out of pydantic's error, so it is added here."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as exc:
            from pydantic import ValidationError  # takes a tenth of a second

            value = repr(exc.__cause__.errors()[0]["input"]) if isinstance(exc.__cause__, ValidationError) else ""
            if value not in exc.message:
                exc.message = f"{value}: {exc.message}"
            raise


def command(function: Callable[..., None], **options: Any) -> Register:
    """Return what adds one command. `options` are typer's."""

    def register(app: typer.Typer, name: str) -> None:
        app.command(name, cls=NamingCommand, **options)(reporting(with_flags(function)))

    return register


def group(
    summary: str,
    commands: Mapping[str, Callable[..., None]],
    *,
    hidden: Collection[str] = (),
    cls: type[Group] = Group,
    **options: Any,
) -> Register:
    """Return what adds a command with commands of its own. `options` of each of them are typer's."""

    def register(app: typer.Typer, name: str) -> None:
        made = typer.Typer(no_args_is_help=True, help=summary, cls=cls)
        for each, function in commands.items():
            command(function, hidden=each in hidden, **options)(made, each)
        app.add_typer(made, name=name)

    return register


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Several flags, and the function that makes one value of theirs."""

    parameters: tuple[inspect.Parameter, ...]
    make: Callable[[dict[str, Any]], Any]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that stands for a group by the group's flags."""
    groups: dict[str, FlagGroup] = {}
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command, eval_str=True).parameters.values():
        if (group := _group_of(each.annotation)) is None:
            parameters.append(each)
        else:
            groups[each.name] = group
            parameters += group.parameters

    def flagged(**given: Any) -> None:
        made = {
            name: group.make({each.name: given.pop(each.name) for each in group.parameters})
            for name, group in groups.items()
        }
        command(**given, **made)

    by_keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    flagged.__name__, flagged.__doc__ = command.__name__, command.__doc__
    flagged.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
    flagged.__annotations__ = {each.name: each.annotation for each in by_keyword}
    return flagged


def _group_of(kind: Any) -> FlagGroup | None:
    if kind is Limits:
        return FlagGroup(limit_flags(), lambda given: make_limits(given.pop(LIMITS_FILE), given))
    if not (inspect.isclass(kind) and dataclasses.is_dataclass(kind)):
        return None
    options = get_type_hints(kind, include_extras=True)
    parameters = tuple(
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=options[each.name]
        )
        for each in dataclasses.fields(kind)
    )
    return FlagGroup(parameters, lambda given: kind(**given))
