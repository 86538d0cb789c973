"""A run on indexed data reads the same samples in the same order in every topology, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_run.config.request import Request
from megatron_run.contracts import Observer, StepMetrics
from megatron_run.errors import ExitCode
from megatron_run_data_indexed.samples import Samples
from megatron_run_engine.runtime.world import StopRequest
from tests.plugins.data.indexed.corpora import corpus
from tests.support.training import Seen, train, train_in_process, train_many

pytestmark = pytest.mark.multiproc

SPLITS = {
    "data": ((), ("parallel.data=2",)),
    "tensor": (("parallel-layer=tensor",), ("parallel.tensor=2",)),
    "pipeline": (("schedule=1f1b",), ("parallel.pipeline=2",)),
}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The keys of a run on a blend of two datasets."""
    folder = tmp_path_factory.mktemp("corpora")
    return {
        "data.use": "indexed",
        "data.paths": ",".join(corpus(folder / name, seed, 300) for seed, name in enumerate("ab")),
        "data.weights": "3,1",
        "data.order": "megatron",
        "data.cache": str(folder),
        "data.split": "8,1,1",
        "data.vocab_size": "20",
        "data.end_of_document": "0",
        "data.mask_end": "true",
        "data.reset_positions": "true",
        "data.reset_attention": "true",
        "model.num_layers": "2",
        "train.steps": "4",
        "eval.interval": "2",
        "eval.batches": "1",
    }


def sets_of(values: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in values.items())


@pytest.fixture(scope="module")
def by_split(values: dict[str, str]) -> dict[str, Seen]:
    sets = sets_of(values)
    requests = [Request(("preset:tiny",), sets=sets + more, plugins=names, nproc=2) for names, more in SPLITS.values()]
    return {split: ranks[0] for split, ranks in zip(SPLITS, train_many(2, requests), strict=True)}


@pytest.fixture(scope="module")
def alone(values: dict[str, str]) -> Seen:
    (seen,) = train(1, sets=sets_of(values))
    return seen


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_gives_the_losses_of_the_single_process(split: str, alone: Seen, by_split: dict[str, Seen]) -> None:
    assert len(alone.losses) == 4
    np.testing.assert_allclose(by_split[split].losses, alone.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(by_split[split].validation, alone.validation, rtol=0, atol=1e-5)


class StopAfter(Observer):
    """Asks the run to stop after a step."""

    def __init__(self, step: int, stop: StopRequest) -> None:
        self._step, self._stop = step, stop

    def on_step_end(self, metrics: StepMetrics) -> None:
        if metrics.step == self._step:
            self._stop.stop(ExitCode.SIGTERM)


def samples_read(values: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch, *stops: int) -> list[int]:
    """The indices of the stream that steps read, by a run that is stopped after ``stops`` and resumed each time."""
    read, stepping = list[int](), list[bool]()
    item = Samples.__getitem__

    def recorded(self: Samples, index: int) -> Any:
        if stepping:
            read.append(index)
        return item(self, index)

    monkeypatch.setattr(Samples, "__getitem__", recorded)
    request = Request(("preset:tiny",), sets=sets_of({**values, "run.folder": str(folder)}))
    for number, last in enumerate((*stops, 99), start=1):
        stop = StopRequest()
        stepping.clear()

        def started(_: int, last: int = last, stop: StopRequest = stop) -> list[Any]:
            stepping.append(True)
            return [StopAfter(last, stop)]

        train_in_process(
            request, 0, 1, folder, built=lambda run, assembly: None, started=started, stop=stop, number=number
        )
    monkeypatch.setattr(Samples, "__getitem__", item)
    return read


@pytest.mark.parametrize("order", ["megatron", "permuted"])
def test_a_resumed_run_with_a_growing_batch_reads_every_sample_once(
    order: str, values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = {"train.ramp_up.start": "2", "train.ramp_up.increment": "2", "train.ramp_up.samples": "20"}
    values = {**values, **growing, "train.steps": "8", "data.split": "1,0,0", "eval.interval": "0"}
    if order == "permuted":
        values = {key: value for key, value in values.items() if key not in ("data.order", "data.cache")}
    read = samples_read(values, tmp_path, monkeypatch, 2, 5)
    assert read == list(range(len(read)))
    assert 16 < len(read) < 64  # the batch grew
