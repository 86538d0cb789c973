"""The conformance suite of kind ``observer``: it survives every kind of run and does not affect the run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf, nan
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from megatron_run.contracts import Action, Place
from megatron_run.contracts.observer import (
    Bar,
    CheckpointMetrics,
    EvalMetrics,
    Observer,
    RunSummary,
    StepMetrics,
    StepTrace,
    Timeline,
)
from megatron_run.errors.wording import did_you_mean
from megatron_run_testing import Check, CheckFailed

#: Creates a new observer, as the plugin's factory does for each attempt at a run.
Make = Callable[[], Observer]

STEPS = 4


def observer_checks(make: Make) -> tuple[Check, ...]:
    """The checks that every observer must pass; ``make`` creates a new one for each run."""
    checks: dict[str, Callable[[Make], str | None]] = {
        "its hooks are those of the contract": _knows_its_hooks,
        "it survives a whole run": _bears_a_run,
        "it survives a run that fails": _bears_a_failure,
        "it survives a run without steps": _bears_no_steps,
        "traced_steps returns step numbers": _asks_for_steps,
        "a second attempt keeps what the first wrote": _keeps_what_was_written,
        "it draws no random numbers": _draws_nothing,
    }
    return tuple(Check(name, partial(check, make)) for name, check in checks.items())


def _knows_its_hooks(make: Make) -> None:
    """A misspelt hook would never be called, and nothing would say so."""
    known = [name for name in vars(Observer) if name.startswith("on_")]
    for name in dir(type(make())):
        if name.startswith("on_") and name not in known:
            raise CheckFailed(
                f"{name} is never called; {did_you_mean(name, known) or 'the hooks are ' + ', '.join(known)}"
            )


def example_timeline(unit: float = 1, message: float = 0) -> Timeline:
    """A step of one microbatch on two stages; a forward takes ``unit``, a message ``message``."""
    u, m = unit, message
    stages = (
        (Bar(Action("F", 0, 0), 0, u), Bar(Action("B", 0, 0), 4 * u + 2 * m, 6 * u + 2 * m)),
        (
            Bar(Action("F", 0, 0), u + m, 2 * u + m),
            Bar(Action("I", 0, 0), 2 * u + m, 3 * u + m),
            Bar(Action("W", 0, 0), 3 * u + m, 4 * u + m),
        ),
    )
    makespan = 6 * u + 2 * m
    return Timeline(stages, makespan, bubble_fraction=1 - 6 * u / (2 * makespan))


def example_run(folder: Path, attempt: int = 1, first_step: int = 1, steps: int = STEPS) -> RunSummary:
    """The summary of a small run of two pipeline stages."""
    return RunSummary(
        folder=folder,
        attempt=attempt,
        first_step=first_step,
        steps=steps,
        parameters=1000,
        world_size=2,
        config="train:\n  steps: 4\n",
        plan="schedule  1f1b\n",
        timeline=example_timeline(),
        baselines={"byte bigram": 2.5},
        run_id="0123456789abcdef",
    )


def example_step(step: int, loss: float | None = 2.25, *, skipped_total: int = 0) -> StepMetrics:
    """The metrics of one step, which was skipped if ``loss`` is None or not finite."""
    skipped = loss is None or not abs(loss) < inf
    return StepMetrics(
        step=step,
        time=1_700_000_000.0 + step,
        samples=8 * step,
        tokens=512 * step,
        loss=loss,
        grad_norm=nan if skipped else 1.5,
        lr=1e-4,
        loss_scale=1.0,
        skipped=skipped,
        skipped_total=skipped_total,
        microbatches=4,
        step_time_s=1.0,
        tokens_per_s=512.0,
        tflops_per_device=0.01,
        mfu=0.25,
        memory_peak_gib=0.5,
        extra={"model/aux": 0.125},
    )


def example_trace(step: int) -> StepTrace:
    """A traced step of :func:`example_run`: forwards of 10 ms, messages of 1 ms."""
    layout = (Place(0, 0, range(1)), Place(1, 0, range(1, 2)))
    return StepTrace(step, layout, ran=example_timeline(0.01, 0.001), planned=example_timeline(0.01), clock_error=1e-4)


def watch(observer: Observer, run: RunSummary) -> None:
    """Call ``observer`` as a whole run does: steps, one of them skipped, traces, evaluations, a save, the end."""
    observer.on_train_start(run)
    traced = frozenset(observer.traced_steps())
    for step in range(run.first_step, run.steps + 1):
        metrics = example_step(step, nan, skipped_total=1) if step == 2 else example_step(step, skipped_total=step > 2)
        observer.on_step_end(metrics)
        if metrics.skipped:
            observer.on_skip(metrics)
        if step in traced:
            observer.on_trace(example_trace(step))
    for split, loss in (("validation", 2.0), ("test", inf)):
        observer.on_eval_end(EvalMetrics(run.steps, split, loss, np.exp(loss).item(), 4096))
    observer.on_checkpoint(CheckpointMetrics(run.steps, run.folder / "checkpoints" / "step4", 9_900_000, 0.25, 1.5))
    observer.on_sample("def f():\n\treturn '\x1b[2J[bold]\N{SNOWMAN}'\n")
    observer.on_train_end("finished")


@contextmanager
def _called(what: str) -> Iterator[Path]:
    """A run folder; any exception of the observer in the block is a broken contract."""
    with TemporaryDirectory() as folder:
        try:
            yield Path(folder)
        except CheckFailed:
            raise
        except (Exception, SystemExit) as error:
            raise CheckFailed(f"{what}: it raised {error!r}") from error


def _bears_a_run(make: Make) -> None:
    with _called("a whole run") as folder:
        watch(make(), example_run(folder))


def _bears_a_failure(make: Make) -> None:
    with _called("a run that fails") as folder:
        observer = make()
        observer.on_train_start(example_run(folder))
        observer.on_step_end(example_step(1, None))
        observer.on_error(RuntimeError("a rank died"))


def _bears_no_steps(make: Make) -> None:
    """A run that is stopped before its first step, and an attempt that finds nothing left to do."""
    for first, reason in ((1, "stopped"), (STEPS + 1, "finished")):
        with _called(f"a run that ends at once, at step {first} of {STEPS}") as folder:
            observer = make()
            observer.on_train_start(example_run(folder, first_step=first))
            list(observer.traced_steps())
            observer.on_train_end(reason)


def _asks_for_steps(make: Make) -> str:
    with _called("traced_steps") as folder:
        observer = make()
        observer.on_train_start(example_run(folder))
        asked, again = list(observer.traced_steps()), list(observer.traced_steps())
        observer.on_train_end("stopped")
        strange = [step for step in asked if not isinstance(step, int) or isinstance(step, bool) or step < 1]
        if strange:
            raise CheckFailed(f"traced_steps gave {strange[0]!r}, and must give whole numbers from 1 on")
        if sorted(again) != sorted(asked):
            raise CheckFailed(f"traced_steps gave {asked}, and then {again} when it was asked again")
    return "" if asked else "it traces no step"


def _keeps_what_was_written(make: Make) -> str:
    """A second attempt in the same folder may append to files, but not change their content."""
    with _called("a resumed run") as folder:
        watch(make(), example_run(folder))
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        watch(make(), example_run(folder, attempt=2, first_step=3, steps=6))
        for path, content in before.items():
            if not path.is_file() or not path.read_bytes().startswith(content):
                raise CheckFailed(f"the second attempt changed what the first wrote to {path.relative_to(folder)}")
    return "" if before else "it writes nothing in the run folder"


def _draws_nothing(make: Make) -> None:
    import torch

    def state() -> tuple[object, str, bytes]:
        return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().numpy().tobytes()

    with _called("a whole run") as folder:
        before = state()
        watch(make(), example_run(folder))
        if state() != before:
            raise CheckFailed("it moved a global random generator: the run would differ without it")
