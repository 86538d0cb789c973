"""What runs, models and checks leave in the process of a program: nothing, whether they end well or not.

Garbage is not collected meanwhile, so that nothing depends on when Python looks for it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import pytest
import torch

from megatron_run import load, load_config
from megatron_run.contracts import Observer, StepMetrics
from megatron_run.errors import RunError
from megatron_run_engine import train
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_engine.host.process import rounded_products
from megatron_run_testing.conformance import checks_for
from tests.contracts.conformance import installed_plugins
from tests.support.census import Census
from tests.support.commands import free_port
from tests.support.ranks import start_server

TINY = {
    "train.steps": 3,
    "train.sequence_length": 8,
    "model.num_layers": 1,
    "eval.batches": 1,
    "observer.use": ["console", "jsonl"],
    "checkpoint.interval": 1,
}
#: One process of a world that torchrun has made.
JOINED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


class Raises(Observer):
    """Ends the training at once in its second step."""

    def on_step_end(self, metrics: StepMetrics) -> None:
        if metrics.step == 2:
            raise KeyboardInterrupt


class Presses(Observer):
    """Presses Ctrl-C in the second step, after which it is finished and saved."""

    def on_step_end(self, metrics: StepMetrics) -> None:
        if metrics.step == 2:
            os.kill(os.getpid(), signal.SIGINT)


def run(
    folder: Path, *plugins: Observer, fault: str = "", nproc: int = 1, sets: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Train in ``folder``; that it fails, or is interrupted, is part of it."""
    variables = {"MEGATRON_RUN_FAULT": fault} if fault else {}
    with mock.patch.dict(os.environ, variables), suppress(RunError, KeyboardInterrupt, MemoryError):
        train(load_config("preset:tiny", sets=TINY | {"run.folder": folder, **sets}, plugins=plugins, nproc=nproc))


def run_joined(folder: Path, *plugins: Observer) -> None:
    """Train in ``folder`` as the one rank of a world of torchrun, with a rendezvous, a sidecar and a hub."""
    with mock.patch.dict(os.environ, JOINED | {"MASTER_PORT": str(free_port())}):
        run(folder, *plugins)


def resume(folder: Path) -> None:
    """Train, and go on."""
    run(folder)
    run(folder, sets={"train.steps": 4})


def write(folder: Path) -> None:
    """Train a model, load it, have it write, and train it on."""
    run(folder)
    model = load(folder)
    model.generate([[1, 2, 3]], max_new_tokens=2)
    model.step([[1, 2, 3, 4]])


def plan(folder: Path) -> None:
    """Count what a model needs."""
    model_size(load_config("preset:tiny", sets=TINY | {"run.folder": folder}))


def check(folder: Path) -> None:
    """The whole suite of an optimizer, on one rank and on several."""
    for each in checks_for(dict(installed_plugins())["optimizer=adamw"]):
        each.run()


#: Where a fault strikes.
PHASES = ("data", "backward", "evaluate", "save")
#: By name: what a program does, in a new folder each time.
PROGRAMS: dict[str, Callable[[Path], None]] = {
    "a run": run,
    "a run that saves in the background": partial(run, sets={"checkpoint.async_save": True}),
    "a run that is resumed": resume,
    "a run that is interrupted after its step": lambda folder: run(folder, Presses()),
    "a run that is interrupted at once": lambda folder: run(folder, Raises()),
    **{f"a run without memory in {phase}": partial(run, fault=f"at={phase},kind=oom") for phase in PHASES},
    "a run whose disk is full": partial(run, fault="at=save,kind=enospc"),
    "a run in a world of torchrun": run_joined,
    "a run there that is interrupted at once": lambda folder: run_joined(folder, Raises()),
    "runs on two local ranks": partial(run, nproc=2),
    "a model that is loaded": write,
    "a plan": plan,
    "a suite": check,
}
#: What is tried of them every time: the others end by the same ways.
BY_DAY = (
    "a run that saves in the background",
    "a run that is resumed",
    "a run without memory in backward",
    "a run there that is interrupted at once",
    "a model that is loaded",
    "a plan",
)


@pytest.fixture
def _no_garbage_is_collected() -> Iterator[None]:
    """A training collects its own when it has ended: here it does not."""
    gc.disable()
    try:
        with mock.patch.object(gc, "collect"):
            yield
    finally:
        gc.enable()


def held() -> tuple[Census, list[str], list[str], bytes, int]:
    """What this process holds and has set, more than a file of tests is asked for."""
    filters = [repr(each) for each in warnings.filters]
    loggers = [
        f"{name}: {logger.handlers}"
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and logger.handlers
    ]
    tasks = len([*Path("/proc/self/task").glob("*")])
    return Census.take(), filters, loggers, torch.get_rng_state().numpy().tobytes(), tasks


def leave_nothing(program: Callable[[Path], None], folder: Path, first: int, counted: int) -> None:
    """Assert that ``counted`` runs of ``program`` leave nothing, after ``first`` ones that load libraries."""
    for number in range(first):
        program(folder / f"first-{number}")
    census, *before = held()
    for number in range(counted):
        program(folder / f"counted-{number}")
    now, *after = held()
    assert now.left(census) == []
    assert after == before


@pytest.mark.usefixtures("_no_garbage_is_collected")
@pytest.mark.multiproc
@pytest.mark.parametrize("name", BY_DAY)
def test_a_process_is_as_before(name: str, tmp_path: Path) -> None:
    start_server()
    leave_nothing(PROGRAMS[name], tmp_path, 1, 1)


@pytest.mark.nightly
@pytest.mark.usefixtures("_no_garbage_is_collected")
@pytest.mark.multiproc
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_process_is_as_before_a_hundred_times(name: str, tmp_path: Path) -> None:
    start_server()
    leave_nothing(PROGRAMS[name], tmp_path, 3, 100)


def test_a_loaded_model_rounds_as_it_was_asked_and_leaves_the_program_its_choice(tmp_path: Path) -> None:
    run(tmp_path)
    seen: list[str] = []
    with rounded_products("medium"):
        model = load(tmp_path, sets={"train.matmul_precision": "high"})
        assert torch.get_float32_matmul_precision() == "medium"
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda *_: seen.append(torch.get_float32_matmul_precision())
        )
        with hook:
            model.generate([[1, 2, 3]], max_new_tokens=2)
        assert torch.get_float32_matmul_precision() == "medium"
    assert set(seen) == {"high"}
