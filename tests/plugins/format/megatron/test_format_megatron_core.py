"""Checkpoints of megatron-core are imported, and our model computes its logits."""

from __future__ import annotations

import random
import signal
from argparse import Namespace
from collections.abc import Iterator, Mapping
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from benchmarks.support.megatron import installed
from megatron_run.contracts import Weights
from megatron_run.registry.choose_format import format_to_read
from megatron_run_engine.formats.gpt_tensors import gpt_options
from tests.support import small_models
from tests.support.megatron_checkpoints import (
    GPT,
    LENGTH,
    LLAMA,
    MIXTURE,
    MODERN,
    VOCAB,
    logits,
    megatron_core,
    network,
    random_state,
    save_sharded,
)

pytestmark = [
    pytest.mark.skipif(not installed(), reason="megatron-core is the oracle"),
    pytest.mark.filterwarnings("ignore"),  # it warns of its own defaults
]
FAMILIES = {"gpt": GPT, "llama": LLAMA, "mixture": MIXTURE, "modern": MODERN}
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
    built = small_models.network(options)
    small_models.fill(built, {name: read() for name, read in weights.tensors.items()})
    return small_models.logits_of(built, TOKENS, VOCAB)


@pytest.mark.parametrize(
    ("ranks", "stages", "chunks"),
    [(1, 1, 1), pytest.param(2, 1, 1, marks=pytest.mark.nightly), (1, 2, 1), (2, 2, 2)],  # the last splits both ways
)
def test_files_of_ranks(family: Family, ranks: int, stages: int, chunks: int, tmp_path: Path) -> None:
    """Experts, where there are any, are shared by as many ranks as layers are."""
    given, model, expected = family
    given = {**given, "tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": stages}
    given |= {"expert_model_parallel_size": ranks} if "num_experts" in given else {}
    save_sharded(model.state_dict(), given, tmp_path, 10, chunks)
    chosen = format_to_read(tmp_path)
    name, weights = chosen.name, chosen.read(tmp_path)
    assert (name, weights.step, weights.sequence_length) == ("megatron", 10, LENGTH)
    torch.testing.assert_close(our_logits(weights), expected, atol=1e-5, rtol=1e-5)


def test_what_a_real_file_holds_besides_weights_is_no_obstacle(tmp_path: Path) -> None:
    """Enumerations and other objects of Megatron, generators' states, buffers of FP8: all inert."""
    enums, rerun = (import_module(f"megatron.core.{name}") for name in ("transformer.enums", "rerun_state_machine"))
    config = import_module("megatron.core.optimizer").OptimizerConfig
    arguments = {
        "attention_backend": enums.AttnBackend.auto,
        "cuda_graph_scope": [enums.CudaGraphScope.attn],
        "model_type": enums.ModelType.encoder_or_decoder,
        "rerun_mode": rerun.RerunMode.DISABLED,
        "exit_signal": signal.SIGTERM,
        "save": Path("/somewhere"),
        "config": config(lr=1e-3),
        "started": numpy.float64(3.5),
    }
    generators = {"numpy": numpy.random.get_state(), "python": random.getstate(), "torch": torch.get_rng_state()}
    state = random_state(GPT)
    extra = {f"{name.removesuffix('weight')}_extra_state": BytesIO(b"amax") for name in state if "linear" in name}
    save_sharded({**state, **extra}, {**GPT, **arguments}, tmp_path, 2, rng_state=[generators])
    found = format_to_read(tmp_path).read(tmp_path)
    save_sharded(state, GPT, tmp_path / "plain", 2)
    plain = format_to_read(tmp_path / "plain").read(tmp_path / "plain")
    assert found.config == plain.config
    assert found.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(found.tensors[name](), plain.tensors[name]()) for name in plain.tensors)


def save_distributed(model: Any, given: Mapping[str, Any], folder: Path, step: int, **options: Any) -> None:
    """As Megatron-LM's ``torch_dist``: one step in ``folder``, written by megatron-core itself."""
    home = folder / f"iter_{step:07d}"
    home.mkdir(parents=True)
    state = {"args": Namespace(**given), "checkpoint_version": 3.0, "iteration": step}
    state |= model.sharded_state_dict(metadata=options)
    import_module("megatron.core.dist_checkpointing").save(state, str(home))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


@pytest.mark.parametrize("alone", [False, True])
def test_distributed_checkpoints(family: Family, alone: bool, tmp_path: Path) -> None:
    given, model, expected = family
    save_distributed(model, given, tmp_path, 20, singleton_local_shards=alone)
    chosen = format_to_read(tmp_path)
    name, weights = chosen.name, chosen.read(tmp_path)
    assert (name, weights.step, weights.sequence_length) == ("megatron", 20, LENGTH)
    torch.testing.assert_close(our_logits(weights), expected, atol=1e-5, rtol=1e-5)
