"""The grammar of the command line: the first word decides, and everything that is no command is ``train``.

Options that several commands share stand here too, and the request that they make.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce, wraps
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

import click

from megatron_run.errors import InputError, PluginError, RunError
from megatron_run.errors.wording import did_you_mean, near_path
from megatron_run_cli import RANK_VARIABLES
from megatron_run_cli.command_groups import DefaultGroup
from megatron_run_cli.completion import words
from megatron_run_cli.output import tell
from megatron_run_cli.termination import ending_in_order

_CONFIG_ENDINGS = (".yaml", ".yml", ".json")
#: The commands that torchrun and Slurm start as ranks. Until the handlers of a run stand, a signal ends a rank at once:
#: it may wait for the others.
_OF_RANKS = frozenset({"train", "finetune"})


def is_config(argument: str) -> bool:
    """Whether ``argument`` names a configuration: a file, a path, ``-`` or ``preset:NAME``."""
    return argument == "-" or "/" in argument or argument.endswith(_CONFIG_ENDINGS) or argument.startswith("preset:")


@contextmanager
def naming(typed: Mapping[str, str]) -> Iterator[None]:
    """Within: an error that comes from a key of a training is told as from the word ``typed`` for it here."""
    try:
        yield
    except RunError as error:
        error.origin = typed.get(error.origin, error.origin)
        raise


class Program(DefaultGroup):
    """``megatron-run tiny.yaml`` is ``megatron-run train tiny.yaml``."""

    default = "train"

    def has(self, ctx: click.Context, name: str) -> bool:
        """Whether ``name`` is a command. What is a configuration or an option needs no scan of what is installed."""
        return bool(name) and not (name.startswith("-") or is_config(name)) and super().has(ctx, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that ``args`` name, which a signal ends in order unless this process is a rank."""
        name, command, rest = super().resolve_command(ctx, args)
        is_rank = name in _OF_RANKS and not RANK_VARIABLES.isdisjoint(os.environ)
        if not (is_rank or ctx.resilient_parsing):
            ctx.with_resource(ending_in_order())
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raises :class:`PluginError` where something in it calls ``sys.exit``: nothing of ours does.

        click itself leaves a command by an exception of its own.
        """
        try:
            return super().invoke(ctx)
        except SystemExit as error:
            from megatron_run.registry.hooks import in_one_line

            raise PluginError(
                "a plugin ended the command",
                why=in_one_line(error, where=True),
                fix="let it raise an exception, or see the whole cause with --debug",
            ) from error


class ConfigWord(click.ParamType[str]):
    """A CONFIG of the command line; any other word is taken for a misspelt command."""

    name = "config"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word itself. Raises :class:`InputError` for one that names no configuration."""
        if is_config(value):
            return value
        root = ctx.find_root() if ctx else None
        commands = root.command.list_commands(root) if root and isinstance(root.command, click.Group) else []
        if value in commands:
            raise InputError(f"the command {value!r} comes first", fix=f"type: megatron-run {value} ...")
        raise InputError(
            f"{value!r} is neither a command nor a configuration",
            fix=_preset_meant(value)
            or _plugin_meant(value)
            or did_you_mean(value, commands)
            or (near_path(Path(value)) if Path(value).suffix else "")
            or f"commands are {', '.join(commands)}; a configuration is a .yaml or .json file, or preset:NAME",
        )


def _preset_meant(name: str) -> str:
    """``type preset:tiny`` for the name of a preset, else an empty string."""
    from megatron_run.config.presets import presets

    return f"type preset:{name}" if name in presets() else ""


def _plugin_meant(name: str) -> str:
    """``type --plugin schedule=1f1b`` for the name of an installed plugin, else an empty string."""
    from megatron_run.contracts.plugin import RUN_KINDS
    from megatron_run.registry.discover import scan

    names = dict.fromkeys(
        f"--plugin {entry}" for entry in scan().entries if entry.name == name and entry.kind in RUN_KINDS
    )
    return f"type {' or '.join(names)}" if names else ""


def option_meant(option: str) -> str:
    """``type --set train.lr=VALUE`` for ``--lr``, and the like for a kind of plugin; else an empty string."""
    from megatron_run.contracts.plugin import RUN_KINDS
    from megatron_run_cli.reports.keys import kernel_keys

    name = option.lstrip("-").replace("_", "-")
    if name in RUN_KINDS:
        return f"type --plugin {name}=NAME"
    keys = [info.name for info in kernel_keys() if not info.name.endswith(".use")]
    meant = [key for key in keys if name in (short := key.replace("_", "-"), short.rpartition(".")[2])]
    return f"type {' or '.join(f'--set {key}=VALUE' for key in meant)}" if meant else ""


#: Options that take a name, ``=`` and a value, and such a name.
_OF_PAIRS, _PAIRED = ("--set", "--plugin", "--what-if"), re.compile(r"[\w-]+(\.[\w-]+)*")


def joined(typed: Sequence[str]) -> str:
    """The words to type where a space stands in the place of an ``=``, as in ``--set train.steps 5``; else empty."""
    apart = [part for each in typed for part in (each.split("=", 1) if each.startswith(_OF_PAIRS) else [each])]
    for option, name, value in zip(apart, apart[1:], apart[2:], strict=False):
        there = value.startswith(("--", "preset:")) or (is_config(value) and Path(value).is_file())
        if option in _OF_PAIRS and _PAIRED.fullmatch(name) and not there:
            return (
                f"{option} {name} {value}: there is a space where = belongs; type {option} {quote(f'{name}={value}')}"
            )
    return ""


Command = Callable[..., Any]


def with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """``command`` with ``options``, which its help lists in this order."""
    return reduce(lambda decorated, option: option(decorated), reversed(options), command)


overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what is there.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")


def _cores(context: click.Context, _parameter: click.Parameter, workers: int | None) -> int:
    """The number that was typed, else that of the cores of this process; a shell that asks needs neither."""
    if workers or context.resilient_parsing:
        return workers or 1
    from megatron_run_engine.host.rank_environment import available_cores

    return available_cores()


def tokenizer_here(context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    """The tokenizer ``name``; one of another place, as ``hf:ORG/NAME``, by its folder on this machine."""
    if name is None or context.resilient_parsing:
        return name
    from megatron_run.registry.fetching import fetch

    with naming({"": "--tokenizer"}):
        found = fetch(name, "tokenizer", tell)
    return name if found is None else str(found.folder)


def files_here(names: Iterable[str], is_read: Callable[[str], bool]) -> list[str]:
    """``names`` of files, folders and patterns; a dataset of another place by its files on this machine.

    ``is_read`` says of a file's name whether what is in such files can be read.
    """
    from megatron_run.registry.fetching import fetch

    found: list[str] = []
    for name in names:
        fetched = fetch(name, is_read, tell)
        found += [name] if fetched is None else map(str, fetched.files)
    return found


workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    callback=_cores,
    help="Processes [default: one a core].",
)


class RankCount(click.ParamType[int]):
    """A number of ranks, or ``gpus`` for one each."""

    name = "N|gpus"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; counts the GPUs when asked to."""
        if value == "gpus":
            if ctx is not None and ctx.resilient_parsing:  # a shell asks, and has no time for torch
                return 1
            import torch

            return torch.cuda.device_count() or self._refuse("there is no GPU on this machine", param, ctx)
        if str(value).isdecimal() and int(value) > 0:
            return int(value)
        return self._refuse(f"{value!r} is neither a number of ranks nor gpus", param, ctx)

    def _refuse(self, why: str, param: click.Parameter | None, ctx: click.Context | None) -> NoReturn:
        self.fail(why, param, ctx)


class SavedStep(click.ParamType[str]):
    """``auto``, ``never``, or the number of a step."""

    name = "auto|never|STEP"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word itself, ``step300`` without what is not its number."""
        choice = value.removeprefix("step")
        if value not in ("auto", "never") and not choice.isdecimal():
            self.fail(f"{value!r} is neither auto, never, nor the number of a saved step", param, ctx)
        return choice


def step_option(whose: str, otherwise: str = "the newest") -> Callable[[Command], Command]:
    """``--step`` of a command that reads the saved steps of the argument ``whose``."""
    return click.option(
        "--step",
        type=click.IntRange(min=0),
        metavar="N",
        help=f"Number of the step [default: {whose}'s, else {otherwise}].",
        shell_complete=words.step,
    )


_RUN_OPTIONS = (
    click.argument("configs", nargs=-1, type=ConfigWord(), metavar="[CONFIG]...", shell_complete=words.config),
    click.option(
        "--plugin",
        "plugins",
        multiple=True,
        metavar="KIND=NAME[,OPT=VAL...]",
        shell_complete=words.plugin_choice,
        help="Choose a plugin and its options; repeatable.",
    ),
    click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set a configuration key; repeatable.",
        shell_complete=words.setting,
    ),
    click.option(
        "--nproc",
        type=RankCount(),
        metavar="N|gpus",
        shell_complete=words.one_of("gpus"),
        help="Ranks on this machine; gpus: one per GPU [default: tensor x context x pipeline x data].",
    ),
)


def rank_options(command: Command) -> Command:
    """Give ``command`` the options of :func:`run_options`, whose model comes from elsewhere, as ``request``.

    Variables of the environment configure trainings, and are not read.
    """

    @wraps(command)
    def with_request(plugins: tuple[str, ...], sets: tuple[str, ...], nproc: int | None, **others: Any) -> Any:
        from megatron_run.config.request import Request

        return command(request=Request((), sets, plugins, nproc), **others)

    return with_options(with_request, *_RUN_OPTIONS[1:])


def run_options(command: Command) -> Command:
    """Give ``command`` what chooses a run, as one argument ``request``; reads standard input for ``-``."""

    @wraps(command)
    def with_request(
        configs: tuple[str, ...], plugins: tuple[str, ...], sets: tuple[str, ...], nproc: int | None, **others: Any
    ) -> Any:
        from megatron_run.config.request import Request

        stdin = sys.stdin.read() if "-" in configs else None
        return command(request=Request(configs, sets, plugins, nproc, stdin, os.environ), **others)

    return with_options(with_request, *_RUN_OPTIONS)
