"""``megatron-run doctor``: what this machine and this environment can do, found out without starting a run."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast

import click

from megatron_run.errors import EngineMissingError, ExitCode
from megatron_run.errors.install_hint import ENGINE, how_to_install
from megatron_run_cli.command_groups import obstacle
from megatron_run_cli.grammar import json_option
from megatron_run_cli.output import print_json, print_table, tell


@click.command()
@json_option
@click.pass_context
def doctor(context: click.Context, *, as_json: bool) -> int:
    """Check this machine, its environment and all plugins."""
    tell("looking at this machine, and importing every plugin in another process: some seconds")
    findings = examine(program=context.find_root().command)
    if as_json:
        print_json(findings)
    else:
        print_table([(each.state, each.topic, each.text) for each in findings])
        click.echo(f"\n{conclusion(findings)}")
    failed = [each.exit_code for each in findings if each.exit_code]
    return int(min(failed, default=ExitCode.DONE))  # what keeps every run from starting before what keeps some


State = Literal["ok", "cannot run", "AMBIGUOUS", "BROKEN", "FAILED"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``FAILED`` keeps every run from starting, ``BROKEN`` those that choose the plugin.

    ``cannot run``: a sound plugin without the library or device that it needs, as on most machines; or CUDA's libraries
    that do not load, which keep no run from the CPU.
    """

    topic: str
    state: State
    text: str

    @property
    def name(self) -> str:
        """The plugin that was looked at, else the topic."""
        return self.text.partition(" ")[0] if self.topic == "plugin" else self.topic

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the finding for a script."""
        return {"FAILED": ExitCode.INPUT, "BROKEN": ExitCode.PLUGIN}.get(self.state, ExitCode.DONE)


#: What a state means for runs, those that are faults first.
_MEANING: Mapping[State, str] = MappingProxyType(
    {
        "FAILED": "no run starts until this is mended",
        "BROKEN": "broken",
        "AMBIGUOUS": "there twice",
        "cannot run": "lacking a library or a device here, which only runs that choose it need",
    }
)


def conclusion(findings: Sequence[Finding]) -> str:
    """The whole in one line: that all is well, or what is not."""
    of_state = {state: list(dict.fromkeys(each.name for each in findings if each.state == state)) for state in _MEANING}
    said = [f"{meaning}: {', '.join(of_state[state])}" for state, meaning in _MEANING.items() if of_state[state]]
    well = [] if any(of_state[state] for state in _MEANING if state != "cannot run") else ["all is well"]
    return "; ".join([*well, *said])


def examine(runs: Path = Path("runs"), program: click.Command | None = None) -> tuple[Finding, ...]:
    """Examine Python, the engine and its torch, the folder of runs, and every installed plugin and command.

    The other topics are examined also when one fails. A child imports the plugins while this process imports torch.
    """
    topics: dict[str, Callable[[], str]] = {
        "python": lambda: f"{platform.python_version()} at {sys.executable}, {platform.platform()}",
        "megatron-run": _kernel,
        **_engine(),
        "runs folder": lambda: _writable(runs),
    }
    with ThreadPoolExecutor(1) as beside:
        plugins = beside.submit(lambda: [*_plugins(program)])
        machine = [*(_look(topic, look) for topic, look in topics.items()), *_cuda_libraries()]
        return (*machine, *plugins.result())


def _engine() -> dict[str, Callable[[], str]]:
    """The topics of the engine; one that fails where it is not installed."""
    if find_spec("megatron_run_engine") is None:
        return {"engine": _no_engine}
    return {"torch": _torch, "devices": _devices, "threads": _threads, "communication": _communication}


def _no_engine() -> str:
    raise EngineMissingError(
        "the engine is not installed", why="plans can be made, training needs it", fix=f"type: {how_to_install(ENGINE)}"
    )


def _look(topic: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(topic, "ok", look())
    except EngineMissingError as error:
        return Finding(topic, "FAILED", str(error))
    except Exception as error:
        return Finding(topic, "FAILED", f"{type(error).__name__}: {error}".splitlines()[0])


def _kernel() -> str:
    from megatron_run import __version__

    return __version__


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads in one process"


def _devices() -> str:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join([*names, "cpu"])


def _threads() -> str:
    from megatron_run_engine.host.rank_environment import available_cores

    return f"{available_cores()} cores for this process"


def _communication() -> str:
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed")
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return ", ".join(name if here else f"no {name}" for name, here in found.items())


def _cuda_libraries() -> Iterator[Finding]:
    """The files of CUDA's libraries that torch and Transformer Engine use. ``AMBIGUOUS``: two of one are loaded."""
    if find_spec("megatron_run_engine") is None:
        return
    try:
        import torch
    except Exception:  # the topic torch says why
        return
    from megatron_run_cli.reports.library_report import report_libraries
    from megatron_run_engine.runtime.cuda_libraries import LIBRARIES

    if torch.version.cuda is None:
        return
    try:
        report = report_libraries()
    except RuntimeError as error:
        yield Finding("cuda", "cannot run", str(error))
        return
    if report.version:
        why = f" cannot be imported: {report.problem}" if report.problem else ""
        yield Finding("transformer-engine", "cannot run" if why else "ok", f"{report.version}{why}")
    for library in LIBRARIES:
        yield Finding(library, "AMBIGUOUS" if report.several(library) else "ok", report.line(library))


def _writable(runs: Path) -> str:
    """Write a file: permissions alone do not tell of a read-only or full file system."""
    folder = next(each for each in (runs.absolute(), *runs.absolute().parents) if each.is_dir())
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    return f"{folder} can be written"


def _plugins(program: click.Command | None) -> Iterator[Finding]:
    from megatron_run_cli.reports.listing import list_plugins, no_obstacle

    listing = list_plugins(check=True, obstacle=partial(obstacle, program) if program else no_obstacle)
    for each in listing.plugins:
        why = each.problem or each.refusal
        source = f"{each.distribution} {each.version}"
        yield Finding(
            "plugin", cast("State", each.state), f"{each.kind}={each.name} ({source}){f': {why}' if why else ''}"
        )
    for notice in listing.notices:
        yield Finding("plugins", "ok", notice)
