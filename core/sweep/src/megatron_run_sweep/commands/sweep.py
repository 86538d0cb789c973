"""``megatron-run sweep``: what is typed, and what is answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Any

import click

from megatron_run.errors import InputError
from megatron_run_cli.command_groups import example
from megatron_run_cli.completion import words as places
from megatron_run_cli.grammar import json_option, run_options
from megatron_run_cli.output import print_json, print_table, show_piece, tell

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run_sweep.metric import Metric
    from megatron_run_sweep.outcomes import Outcome
    from megatron_run_sweep.record import Sweep

#: The seed of a sampler unless ``--seed`` says otherwise.
_SEED = 1234


@click.command(epilog=example("sweep preset:tiny --over train.lr=1e-4..1e-2:log,5 --over train.weight_decay=0,0.1"))
@run_options
@click.option(
    "--over",
    multiple=True,
    metavar="KEY=VALUES",
    shell_complete=places.setting,
    help="Train with each value: A,B,C (of lists A,B;C,D), or LOW..HIGH,N, LOW..HIGH:log,N; repeatable.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where the runs lie, and the sweep goes on [default: runs/sweep].",
)
@click.option(
    "--metric",
    default="eval.loss",
    metavar="NAME",
    help="What runs are compared by: the last number NAME of an evaluation, as eval.perplexity, or of a step, as "
    "train.loss [default: eval.loss].",
)
@click.option("--maximize", is_flag=True, help="The highest metric is the best.")
@click.option(
    "--sampler",
    type=click.Choice(["grid", "optuna"]),
    default="grid",
    help="grid: every combination; optuna: draw values, by what earlier runs came to [default: grid].",
)
@click.option("--runs", type=click.IntRange(min=1), metavar="N", help="With --sampler optuna: how many [default: 20].")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="With --sampler optuna [default: 1234].")
@click.option("--table", is_flag=True, help="Print the table of the sweep in --folder, also while it runs.")
@click.option("--print-commands", is_flag=True, help="Train nothing; print a command a run, as for a Slurm array.")
@json_option
def sweep(  # noqa: PLR0913  # one argument an option: so click calls it
    request: Request,
    over: tuple[str, ...],
    *,
    folder: Path | None,
    metric: str,
    maximize: bool,
    sampler: str,
    runs: int | None,
    seed: int | None,
    table: bool,
    print_commands: bool,
    as_json: bool,
) -> int:
    """Train with several values of some keys, and compare the runs.

    The same command goes on where it was stopped: finished runs are left alone, others resume.
    """
    from megatron_run_sweep.metric import read_metric
    from megatron_run_sweep.record import FOLDER, read_sweep

    home, compared = folder or FOLDER, read_metric(metric)
    if table:
        there = read_sweep(home)
        if there is None:
            raise InputError(f"{home} holds no sweep", fix="name its folder: --folder FOLDER")
        _show(there, home, compared, maximize=maximize, as_json=as_json)
        return 0
    _check_words(request, over, sampler, drawn=runs is not None or seed is not None, print_commands=print_commands)
    asked = _as_sweep(request, over, sampler, _SEED if seed is None else seed, str(compared), maximize)
    if compared.doubt:  # only a run tells: a plugin may add a number of that name
        tell(compared.doubt)
    from megatron_run_sweep.commands.starting import begin

    with begin(asked, request, home, 20 if runs is None else runs) as started:
        if print_commands:
            for index in range(len(started.sweep.runs)):
                show_piece(join(["megatron-run", *started.words(index)]) + "\n")
            return 0
        code = started.train(compared, maximize=maximize)
    _show(started.sweep, home, compared, maximize=maximize, as_json=as_json)
    return code


def _check_words(request: Request, over: Sequence[str], sampler: str, *, drawn: bool, print_commands: bool) -> None:
    """Raise :class:`InputError` for words that do not go together."""
    if not over:
        raise InputError("there is nothing to sweep", fix="add --over, as --over train.lr=1e-4..1e-2:log,5")
    if "-" in request.configs:
        raise InputError("standard input is read once", why="a sweep goes on by the same command", fix="name a file")
    if sampler == "grid" and drawn:
        raise InputError("--runs and --seed are of a sampler", fix="add --sampler optuna")
    if sampler != "grid" and print_commands:
        raise InputError(
            "a sampler draws values when earlier runs have ended", fix="leave --print-commands or --sampler out"
        )
    given = {setting.partition("=")[0] for setting in request.sets}
    if twice := [key for text in over if (key := text.partition("=")[0].strip()) in given]:
        raise InputError(f"{twice[0]} is set and swept", origin=f"--set {twice[0]}", fix="leave one out")
    if "run.folder" in given:
        fix = "name the folder of all: --folder FOLDER"
        raise InputError("each run of a sweep has a folder of its own", origin="--set run.folder", fix=fix)


def _as_sweep(request: Request, over: tuple[str, ...], *others: Any) -> Sweep:
    from megatron_run_sweep.record import Sweep

    sampler, seed, metric, maximize = others
    return Sweep(
        configs=tuple(map(str, request.configs)),
        sets=request.sets,
        plugins=request.plugins,
        nproc=request.nproc,
        over=over,
        sampler=sampler,
        seed=seed,
        metric=metric,
        maximize=maximize,
    )


def _show(shown: Sweep, home: Path, metric: Metric, *, maximize: bool, as_json: bool) -> None:
    """Print the table, best first, and draw the picture beside the runs. Raises :class:`InputError` for no metric."""
    from megatron_run.files.safe_folder import SafeFolder
    from megatron_run_sweep.outcomes import outcomes, ranked
    from megatron_run_sweep.picture import drawing

    found = ranked(outcomes(shown, home, metric), maximize=maximize)
    picture = home / "sweep.svg"
    try:
        SafeFolder(home).replace(picture.name, drawing(found, str(metric), maximize=maximize).encode())
    except OSError as error:
        tell(f"{picture} is not drawn: {error.strerror}")
    if as_json:
        keys = ("run", "values", "state", "step", "metric", "rate", "exit_code", "message")
        rows = [{key: getattr(each, key) for key in keys} for each in found]
        print_json({"folder": str(home), "metric": str(metric), "picture": str(picture), "runs": rows})
    else:
        _print_rows(found, metric)
        _tell_faults(found, home)
        tell(f"drawn in {picture}")
    _check_compared(found, metric, drawn=shown.sampler != "grid")


def _print_rows(found: Sequence[Outcome], metric: Metric) -> None:
    keys = list(found[0].values) if found else []
    rows = [
        (
            each.run,
            *(each.values.get(key, "") for key in keys),
            each.state,
            str(each.step),
            "-" if each.metric is None else f"{each.metric:.5g}",
            "-" if each.rate is None else f"{each.rate:,.0f}",
        )
        for each in found
    ]
    print_table([("run", *keys, "state", "step", str(metric), "tokens/s"), *rows])


def _tell_faults(found: Sequence[Outcome], home: Path) -> None:
    """A line for each run that failed."""
    for each in found:
        if each.state == "failed":
            log = quote(str(home / "logs" / f"{each.run}.log"))
            tell(
                f"{each.run} failed with exit code {each.exit_code}: {each.message or 'no message'}; its output: {log}"
            )


def _check_compared(found: Sequence[Outcome], metric: Metric, *, drawn: bool) -> None:
    """Raise :class:`InputError` where no run has the metric, but has another or has ended."""
    from megatron_run_sweep.metric import without

    names = tuple(dict.fromkeys(name for each in found for name in each.names))
    is_known = any(each.state == "finished" for each in found) or (names and metric.name not in names)
    if is_known and all(each.metric is None for each in found):
        raise without(metric, "no run has", names, drawn=drawn)
