"""The same samples get the same loss by all who score: a training, its tasks, the harness's windows and ``load``."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.training import enter_new_world
from tests.support.training_bench import Bench

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

SETS = (
    "train.steps=1",
    "train.sequence_length=96",
    "train.micro_batch_size=1",
    "train.global_batch_size=1",
    "data.split=50,50,0",
    "eval.batches=1000",
    "model.init_std=0.3",
)
#: What the models differ in that may see other documents of a row: positions, and experts that drop tokens.
MODELS = {
    "learned": ("model.position=learned",),
    "rotary": ("model.position=rope", "model.num_kv_heads=2"),
    "experts": ("model.experts.count=4", "model.experts.capacity_factor=0.5"),
}
DATA = ("instruct", "text")
PACKING = ("documents", "none")


@dataclass(frozen=True)
class Split:
    """A topology: configuration keys and plugins."""

    world: int
    sets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


SPLITS = (
    Split(2, ("parallel.tensor=2",), ("parallel-layer=tensor",)),
    Split(2, ("parallel.pipeline=2",), ("schedule=1f1b",)),
    Split(2, ("parallel.data=2",)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations and texts of unequal lengths, where :func:`trained` puts runs."""
    made, drawn = tmp_path_factory.mktemp("scoring"), random.Random(1)
    lines = [
        {"prompt": f"say {number}", "response": f"word{number} " * drawn.choice([1, 2, 5, 9])} for number in range(40)
    ]
    (made / "instruct").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (made / "text").mkdir()
    for number in range(30):
        (made / "text" / f"{number}.txt").write_text(f"text {number} " * drawn.choice([1, 3, 7]))
    return made


def cases() -> list[tuple[str, str, str]]:
    """Model, data and packing. Without packing, texts of the data run into each other: there is nothing to compare."""
    packed = [(model, data, "documents") for model in MODELS for data in DATA]
    return packed + [(model, "instruct", "none") for model in MODELS]


def trained(folder: Path, name: str) -> tuple[float, int]:
    """The loss and the tokens of the evaluation of the run ``name``, which is made if it is not there."""
    run, (model, data, packing) = folder / name, name.split("-")
    if not run.exists():
        run.mkdir()
        own = (f"data.use={data}", f"data.paths={folder / data}", f"data.packing={packing}")
        bench = Bench(run, *SETS, *MODELS[model], *own, again=True)
        bench.train()
        (last,) = bench.watch.evaluations
        (run / "seen.json").write_text(json.dumps([last.loss, last.tokens]))
    loss, tokens = json.loads((run / "seen.json").read_text())
    return loss, tokens


def ways(rank: int, world: int, folder: str, names: Sequence[str], sets: Any, plugins: Any) -> list[Any]:
    """By run: its task on the validation split, and its documents each alone, as the harness scores continuations."""
    from megatron_run.config.request import Request
    from megatron_run_engine.runtime.generation import score
    from megatron_run_engine.runtime.world import World
    from megatron_run_inference import LoadedModel
    from megatron_run_inference.network import plan
    from megatron_run_inference.source import find_source

    found = []
    with found_once():
        for name in names:
            if world > 1:
                enter_new_world(rank, world, f"{folder}/store-{'-'.join(sets)}-{name}")
            source = find_source(Path(folder, name))
            run = plan(source, Request(sets=sets, plugins=plugins, nproc=world))
            model = LoadedModel(run, source, World(rank, world))
            (task,) = model.evaluate("perplexity=validation", batch=3)
            scores = score(model.network, windows_of(model), batch=5)
            tokens = sum(each.targets for each in scores)
            found.append(((task.loss, task.tokens), (-sum(each.logprob for each in scores) / tokens, tokens)))
    return found


def windows_of(model: Any) -> list[Any]:
    """A window for each run of targets in each document of the validation split."""
    from megatron_run_engine.runtime.generation import Window

    dataset, found = model.data.dataset("validation", model.positions, 1234), []
    for sample in (dataset[number] for number in range(len(dataset))):
        bounds = sample.get("documents", [0, model.positions])
        for first, stop in pairwise(bounds):
            tokens = [*sample["tokens"][first:stop], *sample["labels"][stop - 1 : stop]]
            counts = [False, *(sample["loss_mask"][first:stop] > 0)]
            for place, count in enumerate(counts):
                if count and not (place + 1 < len(counts) and counts[place + 1]):
                    size = next(size for size in range(1, place + 1) if not counts[place - size])
                    found.append(Window.ending([int(t) for t in tokens[: place + 1]], size, model.positions))
    return found


#: What is scored every time, in one process and by every topology: each model, each kind of data, and each packing.
BY_DAY = ("learned-instruct-none", "rotary-text-documents", "experts-instruct-documents")
BY_NIGHT = [name for name in map("-".join, cases()) if name not in BY_DAY]
at_night = pytest.mark.nightly


@pytest.mark.parametrize("name", [*BY_DAY, *(pytest.param(name, marks=at_night) for name in BY_NIGHT)])
def test_one_process_scores_alike_by_every_way(folder: Path, name: str) -> None:
    loss, tokens = trained(folder, name)
    for found in ways(0, 1, str(folder), [name], (), ())[0]:
        assert found == (pytest.approx(loss, abs=2e-6), tokens)


@pytest.mark.parametrize(  # the test above compares packed rows with their documents alone too
    "model", [model if model == "experts" else pytest.param(model, marks=at_night) for model in MODELS]
)
def test_conversations_score_alike_packed_and_alone(folder: Path, model: str) -> None:
    """Of one model's weights: the packing is data's, and may be set for an evaluation."""
    name = f"{model}-instruct-documents"
    loss, _ = trained(folder, name)
    packed, alone = (ways(0, 1, str(folder), [name], (f"data.packing={packing}",), ())[0] for packing in PACKING)
    assert packed[0] == (pytest.approx(alone[0][0], abs=2e-6), alone[0][1])
    assert packed[0][0] == pytest.approx(loss, abs=2e-6)


@pytest.mark.parametrize("names", [BY_DAY, pytest.param(BY_NIGHT, marks=at_night)], ids=["some", "others"])
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.sets[0])
def test_every_topology_scores_alike_by_every_way(folder: Path, split: Split, names: Sequence[str]) -> None:
    expected = {name: trained(folder, name) for name in names}
    for by_case in run_ranks(ways, split.world, str(folder), names, split.sets, split.plugins, timeout=250):
        for name, found in zip(names, by_case, strict=True):
            loss, tokens = expected[name]
            assert found == tuple([(pytest.approx(loss, abs=5e-6), tokens)] * 2), name
