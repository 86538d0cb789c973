"""Checkpoints of megatron-core are imported, and our model computes its logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support.megatron import installed
from megatron_run.interchange.formats import read_source
from megatron_run.interchange.gpt import gpt_options
from megatron_run.interchange.weights import Weights
from tests.support import interchanged
from tests.support.megatron_checkpoints import (
    GPT,
    LENGTH,
    LLAMA,
    VOCAB,
    logits,
    megatron_core,
    network,
    save_distributed,
    save_sharded,
)

pytestmark = [
    pytest.mark.skipif(not installed(), reason="megatron-core is the oracle"),
    pytest.mark.filterwarnings("ignore"),  # it warns of its own defaults
]
FAMILIES = {"gpt": GPT, "llama": LLAMA}
TOKENS = torch.arange(3 * LENGTH).remainder(VOCAB).view(3, LENGTH)
Family = tuple[Mapping[str, Any], Any, Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """Megatron's arguments, its network, and the logits of :data:`TOKENS` without padding."""
    given = FAMILIES[request.param]
    with megatron_core(tmp_path_factory.mktemp("core") / "store"):
        model = network(given)
        yield given, model, logits(model, TOKENS)[..., :VOCAB]


def our_logits(weights: Weights) -> Tensor:
    """What our network makes of :data:`TOKENS` with imported weights."""
    options = gpt_options(weights)
    built = interchanged.network(options)
    interchanged.fill(built, {name: read() for name, read in weights.tensors.items()})
    return interchanged.logits_of(built, TOKENS, VOCAB)


@pytest.mark.parametrize(("ranks", "stages", "chunks"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_files_of_ranks(family: Family, ranks: int, stages: int, chunks: int, tmp_path: Path) -> None:
    given, model, expected = family
    given = {**given, "tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": stages}
    save_sharded(model.state_dict(), given, tmp_path, 10, chunks)
    name, weights = read_source(tmp_path)
    assert (name, weights.step, weights.sequence_length) == ("megatron", 10, LENGTH)
    torch.testing.assert_close(our_logits(weights), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("alone", [False, True])
def test_distributed_checkpoints(family: Family, alone: bool, tmp_path: Path) -> None:
    given, model, expected = family
    save_distributed(model, given, tmp_path, 20, singleton_local_shards=alone)
    name, weights = read_source(tmp_path)
    assert (name, weights.step, weights.sequence_length) == ("megatron", 20, LENGTH)
    torch.testing.assert_close(our_logits(weights), expected, atol=1e-5, rtol=1e-5)
