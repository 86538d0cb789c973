"""A device trains what one process trains on a CPU in fp32: models, precisions, optimizers, splits, graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron_run.registry.discover import scan
from tests.gpu.runs import APART, CPU, CUDA, losses, steps
from tests.plugins.optional_library import skip_without

GPT: tuple[str, ...] = ()
EXPERTS = ("model.experts.count=4", "model.experts.top_k=2")
#: What a model is -> the settings that make it.
MODELS = {
    "gpt": GPT,
    "experts": EXPERTS,
    "padded experts": (*EXPERTS, "model.experts.capacity_factor=1.25", "model.experts.pad_to_capacity=true"),
}


class Case(NamedTuple):
    """A run that learns what ``model`` learns on one rank."""

    model: str
    sets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    ranks: int = 1
    precision: str = "fp32"


ALONE = {
    "gpt": Case("gpt"),
    "experts": Case("experts"),
    "padded experts": Case("padded experts"),
    "gpt in bf16": Case("gpt", precision="bf16"),
    "experts in bf16": Case("experts", precision="bf16"),
    "gpt in fp16": Case("gpt", ("scaler.loss_scale=1024",), ("scaler=constant",), precision="fp16"),
    "zero1": Case("gpt", plugins=("optimizer=zero1",)),
    "recompute": Case("gpt", ("train.recompute=full",)),
}
#: On one GPU by gloo, on as many GPUs as ranks by NCCL.
SPLITS = {
    "two stages": Case("gpt", ("parallel.pipeline=2",), ("schedule=1f1b",), 2),
    "two stages of experts": Case("experts", ("parallel.pipeline=2",), ("schedule=1f1b",), 2),
    "four stages": Case("gpt", ("parallel.pipeline=4",), ("schedule=zero-bubble",), 4),
    "two stages of two chunks": Case("gpt", ("parallel.pipeline=2", "parallel.chunks=2"), ("schedule=interleaved",), 2),
    "tensor": Case("gpt", ("parallel.tensor=2",), ("parallel-layer=tensor",), 2),
    "sequence": Case("gpt", ("parallel.tensor=2", "parallel.sequence=true"), ("parallel-layer=tensor",), 2),
    "data": Case("gpt", ("parallel.data=2",), (), 2),
    "data, zero1": Case("gpt", ("parallel.data=2",), ("optimizer=zero1",), 2),
    "expert": Case("experts", ("parallel.data=2", "parallel.expert=2"), ("optimizer=zero1",), 2),
    "tensor and stages": Case(
        "gpt",
        ("parallel.tensor=2", "parallel.pipeline=2", "parallel.scatter_messages=true"),
        ("parallel-layer=tensor", "schedule=1f1b"),
        4,
    ),
}
#: The splits that are tried on one GPU: they start processes, and minutes are few.
SHARED = ("two stages", "two stages of experts", "four stages", "sequence", "data, zero1", "expert")

Reference = Callable[[str], list[float]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The losses of a model on one CPU rank, in fp32."""
    return cache(lambda model: losses(tmp_path_factory.mktemp(model) / "run", "cpu", *MODELS[model]))


def expect_same(case: Case, found: list[float], expected: list[float]) -> None:
    assert len(found) == 6
    assert found == pytest.approx(expected, rel=APART[case.precision])


@pytest.mark.timeout(90)
@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("name", ALONE)
def test_one_process_learns_what_fp32_on_a_cpu_learns(
    name: str, device: str, tmp_path: Path, reference: Reference
) -> None:
    case = ALONE[name]
    sets = (*MODELS[case.model], *case.sets, f"train.precision={case.precision}")
    expect_same(case, losses(tmp_path / "run", device, *sets, plugins=case.plugins), reference(case.model))


@pytest.mark.multiproc
@pytest.mark.timeout(150)
@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_a_gpu_learn_what_one_learns(
    name: str, device: str, tmp_path: Path, reference: Reference
) -> None:
    case = SPLITS[name]
    sets = (*MODELS[case.model], *case.sets)
    found = losses(tmp_path / "run", device, *sets, plugins=case.plugins, ranks=case.ranks, backend="gloo")
    expect_same(case, found, reference(case.model))


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", SPLITS)
def test_ranks_with_a_gpu_each_learn_what_one_learns(name: str, tmp_path: Path, reference: Reference) -> None:
    case = SPLITS[name]
    if torch.cuda.device_count() < case.ranks:
        pytest.skip(f"needs {case.ranks} CUDA devices")
    sets = (*MODELS[case.model], *case.sets)
    found = losses(tmp_path / "run", "cuda", *sets, plugins=case.plugins, ranks=case.ranks, backend="nccl")
    expect_same(case, found, reference(case.model))


@pytest.mark.timeout(90)
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_fp16_skips_the_steps_that_overflow_and_then_learns(device: str, tmp_path: Path) -> None:
    sets = ("train.precision=fp16", "train.steps=20", "scaler.initial_loss_scale=268435456")
    told = steps(tmp_path / "run", device, *sets, plugins=("scaler=dynamic",))
    skipped = [step["skipped"] for step in told]
    assert skipped[0], "gradients times 2^28 are beyond fp16"
    assert not skipped[-1]
    assert skipped.count(False) > 5
    assert told[-1]["loss_scale"] < told[0]["loss_scale"] / 4
    assert [step["grad_norm"] is None for step in told] == skipped
    assert told[-1]["loss"] < told[0]["loss"]


#: The scopes of a captured model, and the model.
SCOPES = {
    "attention": ("gpt", "attn"),
    "feed-forward": ("gpt", "mlp"),
    "everything": ("gpt", "embedding,attn,mlp,head,loss"),
    "around experts": ("experts", "attn,moe_router,moe_preprocess"),
    "experts": ("padded experts", "attn,moe_router,moe_preprocess,moe_dispatch,moe_experts,moe_combine"),
}
CAPTURES = [entry.name for entry in scan().entries if entry.kind == "graph-capture" and entry.name != "none"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("capture", CAPTURES)
def test_replayed_segments_give_what_eager_ones_give(capture: str, scope: str, device: str, tmp_path: Path) -> None:
    """With dropout, which a replay draws anew; bit for bit where kernels are the same ones."""
    if capture == "te":
        skip_without("transformer_engine")
        if device == "cpu":
            pytest.skip("Transformer Engine needs a GPU")
    model, names = SCOPES[scope]
    if capture == "te":
        names = names.removeprefix("embedding,")  # it refuses what is given no gradient
    fixed = (*MODELS[model], "model.dropout=0.1", "run.deterministic=true")
    eager = losses(tmp_path / "eager", device, *fixed)
    told = steps(tmp_path / "captured", device, *fixed, plugins=(f"graph-capture={capture},scope={names}",))
    found = [step["loss"] for step in told]
    assert found == (pytest.approx(eager, rel=1e-4) if capture == "compile" else eager)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize(
    ("model", "precision"), [("gpt", "fp32"), ("gpt", "bf16"), ("experts", "bf16"), ("padded experts", "bf16")]
)
@pytest.mark.parametrize("capture", ["partial", "compile"])
def test_steps_from_one_graph_give_what_eager_ones_give(
    capture: str, model: str, precision: str, device: str, tmp_path: Path
) -> None:
    fixed = (*MODELS[model], "model.dropout=0", "run.deterministic=true", f"train.precision={precision}")
    eager = losses(tmp_path / "eager", device, *fixed)
    operations = ",backend=aot_eager" if capture == "compile" and device == "cpu" else ""
    plugin = f"graph-capture={capture},scope=step{operations}"
    found = losses(tmp_path / "captured", device, *fixed, plugins=(plugin,))
    exact = capture == "partial" or device == "cpu"
    assert found == (eager if exact else pytest.approx(eager, rel=1e-4 if precision == "fp32" else 1e-2))
