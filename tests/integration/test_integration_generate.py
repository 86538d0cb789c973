"""The same tokens from every split of a model, with caches and without, greedily and by chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.commands import free_port
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.small_models import saved_network
from tests.support.training import enter_new_world

SIZES = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "ffn_size": 48, "vocab_size": 200}
#: Learned positions; rotary ones with grouped queries; experts that would drop most tokens in a training.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {**SIZES, "tie_embeddings": False},
    "llama": {
        **SIZES,
        "num_kv_heads": 2,
        "position": "rope",
        "norm.kind": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
    },
    "experts": {**SIZES, "experts.count": 4, "experts.capacity_factor": 0.25, "num_kv_heads": 2, "position": "rope"},
}
#: Of unequal lengths, and so long that the 16 positions of the model are outgrown.
PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9], [7], [1, 2, 3, 4, 5]]
WRITINGS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0, "repetition_penalty": 1.5, "max_new_tokens": 8},
    {
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "seed": 5,
        "num": 2,
        "max_new_tokens": 7,
    },
)
TENSOR = "parallel-layer=tensor"


@dataclass(frozen=True)
class Split:
    """A topology: configuration keys without ``parallel.``, plugins, and the models that it is for."""

    world: int
    sets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    models: tuple[str, ...] = tuple(MODELS)


SPLITS = (
    Split(1),
    Split(2, ("tensor=2",), (TENSOR,)),
    Split(2, ("pipeline=2",)),
    Split(2, ("data=2",), models=("experts",)),
    Split(2, ("expert=2",), models=("experts",)),
)
MORE = (
    Split(4, ("tensor=4",), (TENSOR,), models=("gpt2",)),
    Split(4, ("pipeline=4",)),
    Split(4, ("pipeline=2", "layers=1,3"), models=("llama",)),
    Split(4, ("tensor=2", "pipeline=2"), (TENSOR,)),
    Split(4, ("expert=4",), models=("experts",)),
    Split(4, ("tensor=2", "expert=2"), (TENSOR,), models=("experts",)),
    Split(4, ("pipeline=2", "expert=2"), models=("experts",)),
    Split(4, ("tensor=2", "scatter_messages=true", "pipeline=2"), (TENSOR,), models=("llama",)),
)


def written(rank: int, world: int, folder: str, splits: Sequence[Split], cache: bool = True) -> list[Any]:
    """By split and model, the tokens of every text of both writings, as this rank has them."""
    from megatron_run.config.request import Request
    from megatron_run_engine.runtime.world import World
    from megatron_run_inference import LoadedModel, Writing
    from megatron_run_inference.network import plan
    from megatron_run_inference.source import find_source

    found = []
    with found_once():
        for index, split in enumerate(splits):
            for name in split.models:
                if world > 1:
                    enter_new_world(rank, world, f"{folder}/store-{world}-{index}-{name}")
                source = find_source(Path(folder, name))
                sets = tuple(f"parallel.{key}" for key in split.sets)
                run = plan(source, Request(sets=sets, plugins=split.plugins, nproc=world))
                model = LoadedModel(run, source, World(rank, world))
                assert model.network.caches
                writings = [Writing(**writing, cache=cache) for writing in WRITINGS]
                texts = [[text.tokens for text in model.write(PROMPTS, writing)] for writing in writings]
                found.append((split.sets, name, texts))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, sizes in MODELS.items():
        saved_network(folder / name, sizes)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Mapping[str, Any]:
    """What one process writes without caches, each text by itself."""
    return {name: texts for _, name, texts in written(0, 1, str(folder), SPLITS[:1], cache=False)}


def assert_same(folder: Path, alone: Mapping[str, Any], world: int, splits: Sequence[Split]) -> None:
    here = [split for split in splits if split.world == world]
    for found in run_ranks(written, world, str(folder), here):
        assert [(sets, name) for sets, name, _ in found] == [
            (split.sets, name) for split in here for name in split.models
        ]
        for sets, name, texts in found:
            assert texts == alone[name], (sets, name)


def test_models_write_many_different_tokens(alone: Mapping[str, Any]) -> None:
    """Else any cache would do."""
    for name, texts in alone.items():
        assert all(len(set(tokens)) > 4 for writing in texts for tokens in writing), name
        assert texts[1][0] != texts[1][1], "two samples of one prompt"


def test_caches_change_no_token(folder: Path, alone: Mapping[str, Any]) -> None:
    for _, name, texts in written(0, 1, str(folder), SPLITS[:1]):
        assert texts == alone[name], name


def test_a_text_is_the_same_alone_and_in_a_batch(folder: Path, alone: Mapping[str, Any]) -> None:
    from megatron_run import load

    model = load(folder / "experts")
    greedy, sampled = WRITINGS
    for number, prompt in enumerate(PROMPTS):
        assert [text.tokens for text in model.generate([prompt], **greedy)] == [alone["experts"][0][number]]
        texts = [text.tokens for text in model.generate([prompt], **sampled)]
        assert texts == alone["experts"][1][2 * number : 2 * number + 2]


@pytest.mark.multiproc
def test_two_ranks_write_what_one_writes(folder: Path, alone: Mapping[str, Any]) -> None:
    assert_same(folder, alone, 2, SPLITS)


def loaded(rank: int, world: int, folder: str, port: int) -> list[Any]:
    """What a rank of a program that torchrun has started gets from its models, split in three ways."""
    from megatron_run import load

    dist.barrier()  # both have joined
    dist.destroy_process_group()  # that of the test: load makes its own, and finds it the next time
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    torchrun = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ways: tuple[dict[str, object], ...] = (
        {"parallel.tensor": 2, "parallel_layer.use": "tensor"},
        {"parallel.pipeline": 2},
        {},
    )
    with patch.dict("os.environ", {name: str(value) for name, value in torchrun.items()}):
        return [facts(load(Path(folder, "llama"), sets=sets)) for sets in ways]


def facts(model: Any) -> tuple[torch.Size, list[Any], list[tuple[int, ...]]]:
    """Shape and values of a model's logits, and the tokens that it writes."""
    logits = model([[1, 2, 3], [4, 5, 6]])
    texts = [text.tokens for text in model.generate(PROMPTS, **WRITINGS[1])]
    return logits.shape, logits.tolist(), texts


@pytest.mark.multiproc
def test_a_program_that_torchrun_starts_loads_a_model_on_all_ranks(folder: Path) -> None:
    from megatron_run import load

    shape, logits, texts = facts(load(folder / "llama"))
    assert tuple(shape) == (2, 3, MODELS["llama"]["vocab_size"])
    for rank in run_ranks(loaded, 2, str(folder), free_port()):
        assert len(rank) == 3
        for found_shape, found, tokens in rank:
            assert found_shape == shape
            assert torch.allclose(torch.tensor(found), torch.tensor(logits), atol=1e-4)
            assert tokens == texts


@pytest.mark.nightly
@pytest.mark.multiproc
def test_four_ranks_write_what_one_writes(folder: Path, alone: Mapping[str, Any]) -> None:
    assert_same(folder, alone, 4, MORE)
