"""``megatron-run plan``: the best way to run a model on given devices, and how far predictions can be trusted."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from megatron_run.errors import InputError, refuse_input, refuse_taken
from megatron_run_cli.command_groups import DefaultGroup, example
from megatron_run_cli.completion import words as places
from megatron_run_cli.editor_schema import schema_line
from megatron_run_cli.grammar import Command, json_option, overwrite_option, run_options, with_options
from megatron_run_cli.output import print_json_line, tell, write_file
from megatron_run_planner.commands.amounts import Bytes, Length, Parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run.config.request import Request
    from megatron_run_planner.accuracy.calibrate import Survey
    from megatron_run_planner.devices import Device
    from megatron_run_planner.search import Candidate
    from megatron_run_planner.task import Task
    from megatron_run_planner.workload import Recompute

_FILE = click.Path(path_type=Path, dir_okay=False)
_DEVICES = click.IntRange(1, 1_000_000)


class Plan(DefaultGroup):
    """``megatron-run plan CONFIG`` is ``megatron-run plan search CONFIG``."""

    default = "search"


@click.group(
    cls=Plan,
    subcommand_metavar="[CONFIG]... --gpus N --device NAME | schedule | goodput | check TABLE | calibrate",
)
def plan() -> None:
    """Find the fastest way to run a model on given devices.

    \b
    megatron-run plan CONFIG --gpus 1024 --device h100   the best splits and schedules
    megatron-run plan search --help                      the options of a search
    megatron-run plan schedule CONFIG --write mine.py    a schedule found for the stages of CONFIG
    megatron-run plan goodput CONFIG --gpus 16384        what a month with failures yields
    megatron-run plan check TABLE.csv --device a100      predictions beside measured steps
    megatron-run plan calibrate --output here.yaml       measures this machine as a device
    """  # noqa: D301  # click wants the character, not its name


def task_options(command: Command) -> Command:
    """Give ``command`` a request, its devices and the memory of one, as ``request``, ``gpus`` and ``machine``.

    What it is to write, as ``write`` and ``timeline``, is none of what it reads, nor there without ``overwrite``.
    """

    @wraps(command)
    def with_machine(
        request: Request, gpus: int | None, device: str, memory: float | None, size: float | None, **others: Any
    ) -> Any:
        from megatron_run.planning.input_files import input_files
        from megatron_run_planner.devices import device_file, read_device
        from megatron_run_planner.task import sized

        machine = read_device(device)
        _refuse_outputs((*input_files(request), device_file(device)), others)
        if memory:
            machine = machine.model_copy(update={"memory": memory})
        if size:
            request = replace(request, configs=(sized(size), *request.configs))
        done = command(request=request, gpus=gpus or request.nproc, machine=machine, **others)
        if click.get_current_context().get_parameter_source("device") is ParameterSource.DEFAULT:
            tell(f"planned for {machine.name}, as no --device is named; plan calibrate describes this machine as one")
        return done

    return with_options(
        with_machine,
        run_options,
        click.option("--gpus", type=_DEVICES, metavar="N", help="Devices [default: those of CONFIG]."),
        click.option(
            "--device",
            default="a100",
            show_default=True,
            metavar="NAME|FILE",
            help="A shipped device, or a YAML file.",
            shell_complete=places.device,
        ),
        click.option("--memory", type=Bytes(), help="Memory of a device [default: the device's]."),
        click.option("--size", type=Parameters(), help="In place of CONFIG: a GPT of so many parameters."),
    )


def _refuse_outputs(inputs: Sequence[Path], others: dict[str, Any]) -> None:
    """Raise :class:`InputError` for a file that may not be written; takes ``overwrite`` out of the options."""
    write, overwrite, timeline = others.get("write"), others.pop("overwrite", False), others.get("timeline")
    if write:
        refuse_taken(write, "--write", overwrite=overwrite, inputs=inputs)
    if timeline:
        refuse_input(timeline, "--timeline", inputs)


def timeline_options(command: Command) -> Command:
    """Give ``command`` a file for the predicted step as ``timeline``, and one of a run that joins it as ``beside``."""
    return with_options(
        command,
        click.option(
            "--timeline", type=_FILE, metavar="FILE", help="Write the predicted step for https://ui.perfetto.dev."
        ),
        click.option(
            "--beside", type=_FILE, metavar="TRACE", help="A step that observer=trace wrote, to join the file."
        ),
    )


def drawn(task: Task, shown: Sequence[Candidate], machine: Device, timeline: Path | None, beside: Path | None) -> str:
    """Write the timeline if there is to be one; returns the line that says so."""
    from megatron_run_planner.commands.plan_timeline import write_timeline

    if timeline is None:
        if beside:
            raise click.UsageError("--beside TRACE joins what --timeline FILE writes: name that file too")
        return ""
    write_timeline(timeline, task, shown, machine, beside)
    return f"\nwritten: {timeline}"


@plan.command()
@task_options
@click.option(
    "--what-if", "changes", multiple=True, metavar="KEY=VALUE", help="Compare CONFIG with a change; repeatable."
)
@click.option("--as-is", is_flag=True, help="Only the split that CONFIG has.")
@click.option(
    "--write", type=_FILE, metavar="FILE", help="Write the best, or the split asked about, as a configuration."
)
@overwrite_option
@timeline_options
@json_option
def search(
    request: Request,
    *,
    gpus: int | None,
    machine: Device,
    changes: tuple[str, ...],
    as_is: bool,
    write: Path | None,
    as_json: bool,
    **traces: Path | None,
) -> None:
    """Rank every split and schedule of a model that fits.

    The fastest by the predicted time of a step comes first.
    """
    from megatron_run_planner.commands import plan_report as report
    from megatron_run_planner.schedules import Schedules
    from megatron_run_planner.task import check_sizes, read_task, to_install, written

    task, schedules = read_task(request, gpus), Schedules()
    if changes or as_is:
        keys = {setting.partition("=")[0] for setting in changes}
        kept = (setting for setting in request.sets if setting.partition("=")[0] not in keys)
        tasks = [task, *([read_task(replace(request, sets=(*kept, *changes)), gpus)] if changes else [])]
        for each in tasks:
            check_sizes(each, gpus)
        shown = [
            each.search(each.split.ranks, machine, schedules).describe(each.split, each.schedule, each.counts)
            for each in tasks
        ]
        text, record = report.own_text(tasks, shown, machine), report.own_record(task, shown, machine)
    else:
        found = task.search(gpus or task.split.ranks, machine, schedules).run()
        shown = [found.best[0]]
        install = to_install(task, found.best[0], schedules.catalog)
        text = report.choice_text(task, found, machine, write, install)
        record = report.choice_record(task, found, machine, install)
        tasks = [task]
    timeline = drawn(task, shown, machine, **traces)  # first: the same command may draw it again
    if write:  # with --what-if the changed split
        write_file(write, schema_line(write.parent) + written(tasks[-1], shown[-1]))
        text += report.written_line(tasks[-1], write)
    text += timeline
    if as_json:
        print_json_line(record)
    else:
        click.echo(text)


@plan.command()
@task_options
@click.option("--write", type=_FILE, metavar="FILE.py", help="Write it as a plugin, for --plugin schedule=./FILE.py.")
@overwrite_option
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search.")
@click.option(
    "--effort", type=click.FloatRange(0, min_open=True), default=1.0, help="Times the usual length of the search."
)
@timeline_options
@json_option
def schedule(
    request: Request,
    *,
    gpus: int | None,
    machine: Device,
    write: Path | None,
    seed: int,
    effort: float,
    as_json: bool,
    **traces: Path | None,
) -> None:
    """Find a schedule for the stages of CONFIG.

    It is the layers of each place, and the order of every stage's actions.
    """
    from megatron_run_planner.commands import plan_report as report
    from megatron_run_planner.schedules import Schedules
    from megatron_run_planner.schedules.for_task import find_for_task
    from megatron_run_planner.schedules.places import EFFORT
    from megatron_run_planner.schedules.plugin_file import write_plugin
    from megatron_run_planner.task import check_one_batch, check_sizes, read_task

    task = read_task(request, gpus)
    check_sizes(task, gpus)
    if write:
        check_one_batch(task)
    answer = find_for_task(task, machine, Schedules(), seed, round(effort * EFFORT))
    timeline = drawn(task, [answer.candidate], machine, **traces)  # first: the same command may draw it again
    if write:
        plan, about = answer.candidate.plan, report.found_line(answer, machine)
        write_plugin(write, plan.layout, plan.lists, plan.microbatches, about)
    files = (f"\nwritten: {write}" if write else "") + timeline
    if as_json:
        print_json_line(report.found_record(task, answer, machine))
    else:
        click.echo(report.found_text(task, answer, machine) + files)


@plan.command()
@task_options
@click.option("--mtbf", type=Length(), default="50000h", show_default=True, help="Between failures of one device.")
@click.option("--stall", type=Length(), default="30s", show_default=True, help="Training waits so long for a save.")
@click.option("--restart", type=Length(), default="10min", show_default=True, help="From a failure to the next step.")
@click.option("--interval", type=Length(), help="Between saves [default: the one that yields most].")
@click.option(
    "--spread", type=click.FloatRange(0, 1), default=0.0, help="Deviation of a machine's step time, a fraction."
)
@click.option(
    "--slow-link", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Share of the network's speed."
)
@click.option("--days", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def goodput(request: Request, *, gpus: int | None, machine: Device, days: float, as_json: bool, **asked: Any) -> None:
    """Tell what the best split yields in a month with failures.

    Saves and stragglers count too.
    """
    from megatron_run_planner.commands import plan_report as report
    from megatron_run_planner.goodput import Conditions, best_interval, simulate_run
    from megatron_run_planner.schedules import Schedules
    from megatron_run_planner.task import read_task

    links = machine.links
    slow = links.model_copy(update={"machine_bandwidth": links.machine_bandwidth * asked["slow_link"]})
    task = read_task(request, gpus)
    ranks = gpus or task.split.ranks
    device = machine.model_copy(update={"links": slow})
    best = task.search(ranks, device, Schedules()).run(1).best[0]
    given = {name: asked[name] for name in ("mtbf", "stall", "restart", "spread")}
    conditions = Conditions(ranks, -(-ranks // links.machine), **given)
    interval = asked["interval"] or best_interval(conditions)
    month = simulate_run(conditions, interval, days * 86400, seed=asked["seed"])
    if as_json:
        print_json_line(report.yield_record(task, best, conditions, month, days))
    else:
        click.echo(report.yield_text(task, best, device, conditions, month, days))


@plan.command(epilog=example("plan check measured.csv --device a100"))
@click.argument("table", type=_FILE)
@click.option(
    "--device",
    required=True,
    metavar="NAME|FILE",
    help="A shipped device, or a YAML file.",
    shell_complete=places.device,
)
@click.option(
    "--recompute",
    type=click.Choice(["auto", "none", "core", "full"]),
    default="auto",
    show_default=True,
    help="What the runs of TABLE recomputed; auto: full from the smallest model on that would not fit without.",
)
@click.option("--vocabulary", type=click.IntRange(min=1), default=51200, show_default=True, metavar="V")
@click.option("--rows", is_flag=True, help="List every row, not the worst ten.")
@json_option
def check(
    table: Path, device: str, *, recompute: Recompute | Literal["auto"], vocabulary: int, rows: bool, as_json: bool
) -> None:
    """Compare predictions with the measured steps of TABLE.

    A row is a run of Megatron-LM or Megatron-DeepSpeed.
    """
    from megatron_run_planner.accuracy import compare, read_table
    from megatron_run_planner.commands.measured_report import accuracy_record, accuracy_text
    from megatron_run_planner.devices import read_device
    from megatron_run_planner.schedules import Schedules

    machine = read_device(device)
    measured = read_table(table, vocabulary, None if recompute == "auto" else recompute, machine.memory)
    found = compare(measured, machine, Schedules())
    if as_json:
        print_json_line(accuracy_record(found, machine))
    else:
        click.echo(accuracy_text(found, machine, every=rows))


@plan.command()
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="This machine's cores, or its first GPU.",
)
@click.option("--device-name", metavar="NAME", help="Name in reports [default: the processor's or the GPU's].")
@click.option("--output", type=_FILE, default="device.yaml", show_default=True, metavar="FILE", help="What to write.")
@overwrite_option
def calibrate(*, device: str, device_name: str | None, output: Path, overwrite: bool) -> None:
    """Measure this machine and describe it as a device for --device.

    Its cores take two minutes, a GPU one. Ranks on cores are taken to have one thread each (run.threads=1) and to
    share them; of a GPU the links to others are taken from an H100's machine. Nothing else should run meanwhile.
    """
    from megatron_run_planner.accuracy.calibrate import device_text
    from megatron_run_planner.commands.measured_report import device_lines, gpu_lines

    if not output.parent.is_dir():
        raise InputError(f"{output} cannot be written", why="its folder does not exist", fix="name another file")
    refuse_taken(output, "--output", overwrite=overwrite, inputs=())
    measured, about, survey = (_measured_gpu if device == "cuda" else _measured_cores)(device_name)
    write_file(output, device_text(measured, f"Measured by megatron-run plan calibrate on {about}."))
    click.echo("\n".join(device_lines(measured, survey) if survey else gpu_lines(measured)))
    click.echo(f"written: {output}; megatron-run plan CONFIG --device {quote(str(output))}")


def _measured_cores(name: str | None) -> tuple[Device, str, Survey | None]:
    """A core of this machine as a device, its processor, and what was measured."""
    from megatron_run_engine.estimate.calibration.survey import survey
    from megatron_run_engine.host.process import processor_name
    from megatron_run_planner.accuracy.calibrate import Survey, describe

    measured = Survey(**survey(_say))
    return (
        describe(measured, name or f"one of {measured.cores} cores of {processor_name()}"),
        processor_name(),
        measured,
    )


def _measured_gpu(name: str | None) -> tuple[Device, str, Survey | None]:
    """The first GPU as a device, and its name."""
    from megatron_run_engine.estimate.calibration.gpu_clock import GpuClock
    from megatron_run_engine.estimate.calibration.gpu_survey import survey_gpu
    from megatron_run_engine.nn.fused import has_kernels
    from megatron_run_planner.accuracy.calibrate_gpu import GpuSurvey, describe_gpu

    measured = GpuSurvey(**survey_gpu(GpuClock(), _say))
    return describe_gpu(measured, name or measured.name, kernels=has_kernels("cuda")), measured.name, None


def _say(what: str) -> None:
    click.echo(f"measuring {what}")
