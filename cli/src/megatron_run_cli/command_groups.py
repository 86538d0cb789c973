"""Groups of commands: each has its own, and those that packages add to it."""

from __future__ import annotations

from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from megatron_run.contracts.plugin import COMMAND
from megatron_run.errors import InputError, PluginError
from megatron_run.errors.wording import did_you_mean
from megatron_run.registry.commands import (
    EXAMPLE,
    choose_command,
    known_summary,
    missing_command,
    next_words,
    offered_twice,
    words_of,
)
from megatron_run.registry.discover import Catalog, scan
from megatron_run_cli.output import tell_error

_CATALOG = "megatron_run_cli.catalog"
#: The characters of a summary that a shell gets, which cuts it to the room that it has.
_SUMMARY = 100
#: ``main`` looks for it among the words, since it must hold for every error, those of parsing included.
_DEBUG = click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks of errors.")


def catalog_of(context: click.Context) -> Catalog:
    """The installed packages' commands, from one scan a command line."""
    found: Catalog = context.meta.setdefault(_CATALOG, None) or scan(kind=COMMAND)
    context.meta[_CATALOG] = found
    return found


def place_of(context: click.Context) -> tuple[str, ...]:
    """The words of the command of ``context``, without the program's."""
    words: list[str] = []
    while context.parent is not None:
        words.insert(0, str(context.info_name))
        context = context.parent
    return tuple(words)


def is_own(program: click.Command, place: Sequence[str]) -> bool:
    """Whether the command line itself has a command at ``place``, where no package's would be found."""
    found: click.Command | None = program
    for name in place:
        found = found.commands.get(name) if isinstance(found, click.Group) else None
    return found is not None


def obstacle(program: click.Command, catalog: Catalog, place: Sequence[str]) -> str:
    """Why somebody who types ``place`` does not get the command that a package of ``catalog`` offers there, or empty.

    The commands of packages above it are imported, as when it is typed; our own are known to reach theirs.
    """
    if is_own(program, place):
        return "megatron-run has this command itself"
    if known_summary(catalog, place):
        return ""
    context = click.Context(program, info_name="megatron-run")
    context.meta[_CATALOG] = catalog
    for depth, name in enumerate(place[:-1], 1):
        try:
            above = context.command.find_command(context, name) if isinstance(context.command, Commands) else None
        except PluginError as error:
            return str(error)
        if above is not None and not isinstance(above, Commands):
            kind = "a group without cls=Commands" if isinstance(above, click.Group) else "no group"
            return f"packages add no commands to 'megatron-run {' '.join(place[:depth])}', which is {kind}"
        context = click.Context(above or Commands(name), parent=context, info_name=name)
    if place[-1] not in getattr(context.command, "commands", ()):
        return ""
    *_, group = (entry for depth in range(len(place)) if (entry := choose_command(catalog, place[:depth])))
    return f"{group.source} has this command in its group {words_of(group)!r}: uninstall one"


def example(words: str) -> str:
    """The ``epilog`` of a command that wants an argument or option: a whole command line, which an error quotes too."""
    return f"\b\n{EXAMPLE}megatron-run {words}"


def example_of(command: click.Command) -> str:
    """The command line that the help of ``command`` ends with, empty where there is none."""
    return " ".join((command.epilog or "").partition(EXAMPLE)[2].split())


def with_debug(command: click.Command) -> click.Command:
    """``command``, which has ``--debug`` unless it is a group or has one of its own."""
    if not (isinstance(command, click.Group) or any("--debug" in each.opts for each in command.params)):
        command.params.append(_DEBUG)
    return command


class Commands(click.Group):
    """A group to which packages may add commands, and that tells which it has to whoever names another one.

    The command line's own come first, and are found without a scan of what is installed.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The words that may follow."""
        return sorted({*self.commands, *next_words(catalog_of(ctx), place_of(ctx))})

    def summaries(self, ctx: click.Context, begin: str = "") -> click.Group:
        """The commands that ``begin`` begins, as lists show them: those of our own packages are not imported for it."""
        names = [name for name in self.list_commands(ctx) if name.startswith(begin)]
        found = {name: self._known(ctx, name) or self.get_command(ctx, name) for name in names}
        return click.Group(commands={name: each for name, each in found.items() if each and not each.hidden})

    def _known(self, ctx: click.Context, name: str) -> click.Command | None:
        """A command with its summary alone, where the kernel knows that; else None."""
        summary = "" if name in self.commands else known_summary(catalog_of(ctx), (*place_of(ctx), name))
        return click.Command(name, help=summary) if summary else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in the help."""
        self.summaries(ctx).format_commands(ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """The commands that ``incomplete`` begins, and the options."""
        found = self.summaries(ctx, incomplete).commands
        words = [CompletionItem[str](name, help=each.get_short_help_str(_SUMMARY)) for name, each in found.items()]
        return [*words, *click.Command.shell_complete(self, ctx, incomplete)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command ``cmd_name``, None for an unknown one.

        It is None too, and told in a line unless a shell asks, for one of a package that is broken: others go on.
        """
        try:
            return self.find_command(ctx, cmd_name)
        except PluginError as error:
            if not ctx.resilient_parsing:
                tell_error(str(error))
            return None

    def find_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command ``name``, None for an unknown one.

        Raises :class:`PluginError` for one that several distributions offer, or that cannot be loaded.
        """
        place = (*place_of(ctx), name)
        own, program = self.commands.get(name), ctx.find_root().command
        if own is not None and place[0] in getattr(program, "commands", ()):
            return with_debug(own)
        catalog = catalog_of(ctx)
        entry = choose_command(catalog, place)
        if own is not None and entry is not None:
            group = choose_command(catalog, place[:1])
            raise offered_twice(place, [each.source for each in (group, entry) if each])
        if own is not None:
            return with_debug(own)
        if entry is not None:
            from megatron_run.registry.loaded_command import load_command

            return with_debug(load_command(entry))
        sources = next_words(catalog, place[:-1]).get(name)
        return Commands(name, help=f"Commands of {' and '.join(sources)}.") if sources else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that ``args`` name.

        Raises :class:`InputError` where they name none, and :class:`PluginError` where its package is broken or not
        installed.
        """
        name, *rest = args
        if name.startswith("-"):
            return super().resolve_command(ctx, args)
        if command := self.find_command(ctx, name):
            return name, command, rest
        raise self._unknown(ctx, name)

    def _unknown(self, ctx: click.Context, name: str) -> InputError | PluginError:
        place, catalog, known = (*place_of(ctx), name), catalog_of(ctx), self.list_commands(ctx)
        meant = did_you_mean(name, known)
        missing = missing_command(catalog, place, exact=bool(meant))
        return missing or InputError(
            f"{ctx.command_path} has no command {name!r}", fix=meant or f"its commands are {', '.join(known)}"
        )


class DefaultGroup(Commands):
    """A group whose command ``default`` may be left out."""

    default: str

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the command in front unless the first word is a command or an option of the group.

        A first word that a shell completes, which is not among ``args``, may still become either.
        """
        if ctx.resilient_parsing and not args:
            return super().parse_args(ctx, args)
        first = args[0] if args else ""
        if first not in ("-h", "--help", "--version") and not self.has(ctx, first):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def has(self, ctx: click.Context, name: str) -> bool:
        """Whether ``name`` is a command, be it of a package that is not installed."""
        if name in self.commands:
            return True
        place, catalog = (*place_of(ctx), name), catalog_of(ctx)
        return name in next_words(catalog, place[:-1]) or missing_command(catalog, place, exact=True) is not None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """The commands, and what may be the first word of the one that may be left out."""
        command = self.commands[self.default]
        with command.make_context(self.default, [], parent=ctx, resilient_parsing=True) as inner:
            first = next(each for each in command.params if isinstance(each, click.Argument))
            place = command if incomplete.startswith("-") else first
            return [*super().shell_complete(ctx, incomplete), *place.shell_complete(inner, incomplete)]
