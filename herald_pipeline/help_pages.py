"""Help pages as plain text: options of a command in groups, commands with their whole first sentence."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup


class GroupedCommand(TyperCommand):
    """A command whose help shows its options in :attr:`groups`; what stands in none comes last.

    Typer groups options in its coloured pages alone (``rich_help_panel``), and those load a library at every start.
    """

    groups: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Title -> options in the order shown, each by its first name (``--model``)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the groups."""
        found = {param.opts[0]: param.get_help_record(ctx) for param in self.get_params(ctx)}
        left = {name: record for name, record in found.items() if record is not None}
        for title, names in self.groups.items():
            _write(formatter, title, [left.pop(name) for name in names if name in left])
        _write(formatter, "Options", list(left.values()))


class CommandList(TyperGroup):
    """A program whose help says of each command its whole first sentence, over lines, not what fits into one."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in the order in which they were added."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        _write(formatter, "Commands", [(name, one.get_short_help_str(_SENTENCE)) for name, one in found.items() if one])


def program(name: str | None = None, about: str | None = None) -> typer.Typer:
    """A program of several commands: plain help, no completion, and mistakes are messages, never coloured tracebacks.

    ``about`` is what its help says first; where its callback says that, it is left out.
    """
    # What is given counts for Typer, even if it is None.
    given: dict[str, Any] = {key: value for key, value in (("name", name), ("help", about)) if value is not None}
    return typer.Typer(
        **given,
        cls=CommandList,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


_SENTENCE = 300
"""Characters of a first sentence; longer ones are cut."""


def _write(formatter: Any, title: str, records: Sequence[tuple[str, str]]) -> None:
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def grouped(groups: Mapping[str, str]) -> type[GroupedCommand]:
    """A class of commands with these groups: title -> option names, separated by blanks."""
    return type("Command", (GroupedCommand,), {"groups": {title: names.split() for title, names in groups.items()}})
