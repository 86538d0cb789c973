"""The runs of a sweep: checked before the first, then started one after the other, each as a process of the command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megatron_run.errors import ExitCode, Findings, Problems, RunError
from megatron_run.files.safe_folder import SafeFolder
from megatron_run.planning import resolve
from megatron_run_cli.output import tell
from megatron_run_sweep.axes import Axis, check_runs, corners, grid, read_axes, settings
from megatron_run_sweep.commands.alone import alone, check_trains
from megatron_run_sweep.metric import Metric, without
from megatron_run_sweep.outcomes import EXCLUSIVE, Outcome, is_held, outcomes
from megatron_run_sweep.record import Run, Sweep, run_name, same_sweep, write_sweep

if TYPE_CHECKING:
    from megatron_run.config.request import Request

#: Seconds between two looks at a run that another process still trains.
_LOOK = 0.2
#: The bytes of a run's output in which its last line is looked for.
_TAIL = 1 << 13
_OURS = "megatron-run: "


@contextmanager
def begin(asked: Sweep, request: Request, home: Path, count: int) -> Iterator[Started]:
    """The sweep ``asked`` in the folder ``home``, new or gone on with; ``count`` is how many runs a sampler draws.

    All is checked before anything is made: axes, every value, what the folder holds. Within, no other sweep uses the
    folder. Raises :class:`RunError`.
    """
    check_trains()
    drawn = asked.sampler != "grid"
    axes = read_axes(asked.over, ranges=drawn)
    points = corners(axes) if drawn else grid(axes)
    check_runs(count if drawn else len(points))
    if drawn:
        from megatron_run_sweep.sampler import check_optuna

        check_optuna()
    check_points(request, points)
    same_sweep(asked, home)  # now too, so that what is refused leaves no lock there
    with alone(home):
        sweep = same_sweep(asked, home)
        if not drawn and not sweep.runs:
            sweep = sweep.model_copy(update={"runs": tuple(Run(values=values) for values in points)})
        write_sweep(sweep, home)
        yield Started(sweep, home, axes, count if drawn else len(points))


def check_points(request: Request, points: Sequence[Mapping[str, str]]) -> None:
    """Raise :class:`Problems` with all that is wrong with a run of any of ``points``, each thing once.

    A fault of one key may hide that of another, so what is at fault is then left out, and the rest looked at again.
    """
    findings = Findings()
    for point in points:
        values = dict(point)
        while faulty := _faults(request, values, findings):
            if any(_is_choice(key) for key in faulty):  # without that plugin the others' options mean nothing
                break
            values = {key: value for key, value in values.items() if key not in faulty}
    findings.settle()


def _faults(request: Request, values: Mapping[str, str], findings: Findings) -> set[str]:
    """Add what is wrong with one run; the keys of ``values`` that are at fault."""
    faulty = set()
    try:
        resolve(replace(request, sets=(*request.sets, *settings(values))), plan_only=True)
    except RunError as error:
        for problem in error.problems if isinstance(error, Problems) else (error,):
            for key in values:
                parts = re.split(_set_of(key), problem.origin)
                problem.origin = f"--over {key}".join(parts)
                faulty |= {key} if len(parts) > 1 else set()
            findings.add(problem)
    return faulty


def _set_of(key: str) -> str:
    """A pattern of ``key`` where it was set, and of no longer key that begins with it."""
    return rf"(?<!\S)--set {re.escape(key)}(?![\w.-])"


def _is_choice(key: str) -> bool:
    """Whether ``key`` chooses a plugin, as ``schedule.use`` or ``schedule`` do."""
    return "." not in key or key.endswith(".use")


@dataclass
class Started:
    """A sweep that may train: its record is written. ``count`` is the number of its runs, drawn or not."""

    sweep: Sweep
    home: Path
    axes: tuple[Axis, ...]
    count: int

    def words(self, index: int) -> tuple[str, ...]:
        """The words after ``megatron-run`` that train a run."""
        return self.sweep.words(self.sweep.runs[index].values, self.home / run_name(index))

    def train(self, metric: Metric, *, maximize: bool) -> int:
        """Train what is not finished, one run after the other; the exit code of the first run that failed, else 0.

        A signal ends the run under way, which saves its step, and then the sweep. Raises :class:`InputError` after the
        first run that has no such metric.
        """
        codes = []
        for index in range(self.count):
            if index == len(self.sweep.runs):
                self._draw(metric, maximize=maximize)
            self._wait_for(run_name(index))
            if outcomes(self.sweep, self.home, metric)[index].state != "finished":
                codes.append(self._train(index, metric))
            self._check_metric(outcomes(self.sweep, self.home, metric)[index], metric)
        return next(filter(None, codes), int(ExitCode.DONE))

    def _check_metric(self, outcome: Outcome, metric: Metric) -> None:
        """Raise :class:`InputError` where a run has ended without the number by which all are to be compared."""
        if outcome.state == "finished" and metric.name not in outcome.names:
            raise without(metric, f"{outcome.run} has no", outcome.names, drawn=self.sweep.sampler != "grid")

    def _wait_for(self, name: str) -> None:
        """Wait until no other process trains the run."""
        place = SafeFolder(self.home / name)
        if not is_held(place):
            return
        left = place.path / EXCLUSIVE  # stays when that process is killed
        advice = f"; if that process is gone, delete {left}" if os.path.lexists(left) else ""
        tell(f"{name} is still trained by another process, and waited for{advice}")
        while is_held(place):
            time.sleep(_LOOK)

    def _draw(self, metric: Metric, *, maximize: bool) -> None:
        """Add a run with values that a sampler draws by the earlier ones, and record it."""
        from megatron_run_sweep.sampler import draw

        earlier = [(each.values, each.compared) for each in outcomes(self.sweep, self.home, metric)]
        values = draw(self.axes, self.sweep.seed, earlier, maximize=maximize)
        self._record(len(self.sweep.runs), Run(values=values))

    def _record(self, index: int, run: Run) -> None:
        self.sweep = self.sweep.model_copy(
            update={"runs": (*self.sweep.runs[:index], run, *self.sweep.runs[index + 1 :])}
        )
        write_sweep(self.sweep, self.home)

    def _train(self, index: int, metric: Metric) -> int:
        """Train one run to its end, and tell how it ended; its exit code."""
        run, name = self.sweep.runs[index], run_name(index)
        tell(f"{name}, {index + 1} of {self.count}: {' '.join(settings(run.values))}")
        SafeFolder(self.home).make("logs")
        log = f"logs/{name}.log"
        with SafeFolder(self.home).append(log) as output:
            begun = output.seek(0, os.SEEK_END)
            code = run_process((*self.words(index), "--quiet"), output, f"the same command goes on with {name}")
            message = "" if code == 0 else _last_line(output, begun) or _ended_by(code)
        code = code if code >= 0 else int(ExitCode.RANK_LOST)  # by a signal that it could not answer
        self._record(index, run.model_copy(update={"exit_code": code, "message": message}))
        outcome = outcomes(self.sweep, self.home, metric)[index]
        tell(f"{name} ended with exit code {code}: {message}" if code else f"{name}: {_reached(outcome, metric)}")
        return code


def run_process(words: Sequence[str], output: BinaryIO, advice: str) -> int:
    """Run ``megatron-run`` with ``words`` to its end; its exit code, below 0 the signal that killed it.

    What it says goes to ``output``. It is in a process group of its own, so that Ctrl-C in a terminal reaches it once,
    from here: told to end, it finishes its step and saves; told again, it ends at once. Then the signal's exception is
    raised again, with ``advice``.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "megatron_run_sweep.child", str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    try:
        return process.wait()
    except BaseException as error:
        error.add_note(advice)
        _end(process, error)
        raise


def _end(process: subprocess.Popen[bytes], cause: BaseException) -> None:
    """Tell a run what this process was told, and wait for its end, also when this one is told again meanwhile."""
    process.send_signal(signal.SIGINT if isinstance(cause, KeyboardInterrupt) else signal.SIGTERM)
    try:
        process.wait()
    except BaseException as again:
        _end(process, again)
        raise


def _last_line(output: BinaryIO, begun: int) -> str:
    """The last line of ours in what a process has written since ``begun``; empty where it said nothing."""
    output.flush()
    output.seek(max(begun, output.seek(0, os.SEEK_END) - _TAIL))
    lines = output.read(_TAIL).decode(errors="replace").split("\n")
    return next((line.removeprefix(_OURS) for line in reversed(lines) if line.startswith(_OURS)), "")


def _ended_by(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else "it said nothing"


def _reached(outcome: Outcome, metric: Metric) -> str:
    compared = f"no {metric}" if outcome.metric is None else f"{metric} {outcome.metric:.5g}"
    return f"{compared} after {outcome.step} steps"
