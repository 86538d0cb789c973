"""Options that several commands share, and the request that they make."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import click

from megatron_run_cli.grammar import ConfigWord

Command = Callable[..., Any]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
#: ``main`` looks for it among the words, since it must hold for every error, those of parsing included.
debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks of errors.")


class RankCount(click.ParamType[int]):
    """A number of ranks, or ``gpus`` for one each."""

    name = "N|gpus"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; counts the GPUs when asked to."""
        if value == "gpus":
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
        word = value.removeprefix("step")
        if value not in ("auto", "never") and not word.isdecimal():
            self.fail(f"{value!r} is neither auto, never, nor the number of a saved step", param, ctx)
        return word


_RUN_OPTIONS = (
    click.argument("configs", nargs=-1, type=ConfigWord(), metavar="[CONFIG]..."),
    click.option(
        "--plugin",
        "plugins",
        multiple=True,
        metavar="KIND=NAME[,OPT=VAL...]",
        help="Choose a plugin and its options; repeatable.",
    ),
    click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set a configuration key; repeatable."),
    click.option(
        "--nproc",
        type=RankCount(),
        metavar="N|gpus",
        help="Ranks on this machine; gpus: one per GPU [default: tensor x pipeline x data].",
    ),
)


def run_options(command: Command) -> Command:
    """Give ``command`` what chooses a run, as one argument ``request``; reads standard input for ``-``."""

    @wraps(command)
    def with_request(
        configs: tuple[str, ...], plugins: tuple[str, ...], sets: tuple[str, ...], nproc: int | None, **others: Any
    ) -> Any:
        from megatron_run.config.request import Request

        stdin = sys.stdin.read() if "-" in configs else None
        return command(request=Request(configs, sets, plugins, nproc, stdin, os.environ), **others)

    decorated: Command = with_request
    for decorator in reversed(_RUN_OPTIONS):
        decorated = decorator(decorated)
    return decorated
