"""Adapters in runs: equal on every split, saved alone, resumed elsewhere, read merged, refused where they differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_run import load
from megatron_run.config.request import Request
from megatron_run.errors import RunError
from megatron_run.planning import load_config
from megatron_run_engine import train
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_testing.conformance import check
from tests.support.training import train_many

LORA = "lora,rank=4,alpha=8,targets=all"
DROPPING = f"{LORA},adapter_dropout=0.4"
SETS = (
    "model.num_layers=2",
    "train.steps=3",
    "train.lr=0.02",
    "train.lr_shape=constant",
    "train.sequence_length=8",
    "train.global_batch_size=4",
    "eval.interval=0",
    "eval.batches=1",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights are adapted; of another seed than the adapters, which begin with others if left alone."""
    folder = tmp_path_factory.mktemp("weights") / "base"
    train(load_config("preset:tiny", sets=values(folder, {"train.steps": 1, "train.seed": 7})))
    return folder


def values(folder: Path, more: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(each.split("=") for each in SETS), "run.folder": str(folder), "run.threads": 1, **more}


def adapt(folder: Path, source: Path | None, layers: str = f"dense+{LORA}", **more: Any) -> list[float]:
    """Losses of a run of adapters in ``folder``."""
    start = {} if source is None else {"run.init_from": str(source)}
    options = {key.replace("__", "."): value for key, value in more.items()}
    run = load_config("preset:tiny", sets=values(folder, {**start, **options}), plugins=[f"parallel-layer={layers}"])
    return [float(loss) for loss in train(run, extend=(folder / "checkpoints").is_dir()).losses]


def validation(folder: Path) -> float:
    """The last validation loss of a run."""
    return float(json.loads((folder / "eval.jsonl").read_text().splitlines()[-1])["loss"])


DENSE, SPLIT = f"parallel-layer=dense+{LORA}", f"parallel-layer=tensor+{LORA}"
SEQUENCE = ("parallel.tensor=2", "parallel.sequence=true")
#: Plugins and settings.
Asked = tuple[tuple[str, ...], tuple[str, ...]]
#: By name what is asked; adapters drop where the name says so. The order shares the work between the two
#: processes of train_many.
ALONE: dict[str, Asked] = {
    "one rank": ((DENSE,), ()),
    "dropout": ((f"parallel-layer=dense+{DROPPING}",), ()),
    "recorded": ((DENSE, "graph-capture=partial,scope=attn,mlp"), ()),
    "dropout, recomputed": ((f"parallel-layer=dense+{DROPPING}",), ("train.recompute=full",)),
    "dropout, recorded": ((f"parallel-layer=dense+{DROPPING}", "graph-capture=partial,scope=attn,mlp"), ()),
}
TWO: dict[str, Asked] = {
    "tensor": ((SPLIT,), ("parallel.tensor=2",)),
    "sequence": ((SPLIT,), SEQUENCE),
    "dropout, split backward": ((f"parallel-layer=dense+{DROPPING}", "schedule=zero-bubble"), ("parallel.pipeline=2",)),
    "dropout, chunks": (
        (f"parallel-layer=dense+{DROPPING}", "schedule=interleaved"),
        ("parallel.pipeline=2", "parallel.layers=0,1,1,0"),
    ),
    "embedding alone": ((DENSE, "schedule=1f1b"), ("parallel.layers=0,2",)),
    "dropout, shards": ((f"parallel-layer=dense+{DROPPING}", "optimizer=zero1"), ("parallel.data=2",)),
}
#: Tensor-parallel ranks draw masks of their own, and are compared with each other.
DRAWING: list[Asked] = [
    ((f"parallel-layer=tensor+{DROPPING}",), (*sets, "guard.replica_interval=1"))
    for sets in (("parallel.tensor=2",), SEQUENCE)
]


#: By day sequences are split, weight gradients put off, optimizer states sharded and dropping adapters recorded.
REFERENCES = ("one rank", "dropout")
BY_DAY = ("dropout, recorded", "sequence", "dropout, split backward", "dropout, shards")
BY_NIGHT = tuple(name for name in (*ALONE, *TWO) if name not in (*REFERENCES, *BY_DAY))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("names", "drawing"),
    [
        pytest.param(BY_DAY, DRAWING[1:], id="some"),
        pytest.param(BY_NIGHT, DRAWING[:1], id="others", marks=pytest.mark.nightly),
    ],
)
def test_every_split_and_schedule_learns_the_same(base: Path, names: Sequence[str], drawing: Sequence[Asked]) -> None:
    """With the same masks where adapters drop some of their input."""
    alone_names = [name for name in ALONE if name in (*REFERENCES, *names)]
    two_names = [name for name in TWO if name in names]
    found = {}
    for world, cases in (
        (1, [ALONE[name] for name in alone_names]),
        (2, [*(TWO[name] for name in two_names), *drawing]),
    ):
        start = (*SETS, f"run.init_from={base}")
        requests = [
            Request(("preset:tiny",), sets=(*start, *sets), plugins=plugins, nproc=world) for plugins, sets in cases
        ]
        found[world] = [ranks[0] for ranks in train_many(world, requests)]
    alone = dict(zip(alone_names, found[1], strict=True))
    assert alone["one rank"].losses[-1] != alone["one rank"].losses[0]
    assert alone["dropout"].losses != alone["one rank"].losses
    for name, seen in (*alone.items(), *zip(two_names, found[2], strict=False)):
        expected = alone["dropout" if name.startswith("dropout") else "one rank"]
        assert seen.losses == pytest.approx(expected.losses, abs=2e-5), name
        assert seen.norms == pytest.approx(expected.norms, rel=1e-3), name
        assert bool(seen.captured) == ("recorded" in name), name
    assert all(len(seen.losses) == 3 for seen in found[2][len(two_names) :])


@pytest.mark.nightly  # torch's compiler takes seconds to import; test_graph_capture_compile has adapted layers
@pytest.mark.multiproc
def test_a_compiled_run_learns_the_same(base: Path) -> None:
    sets = (*SETS, f"run.init_from={base}")
    plugins = [(DENSE,), (DENSE, "graph-capture=compile,backend=eager")]
    eager, compiled = (ranks[0] for ranks in train_many(1, [Request(("preset:tiny",), sets, each) for each in plugins]))
    assert compiled.losses == pytest.approx(eager.losses, abs=2e-5)
    assert compiled.norms == pytest.approx(eager.norms, rel=1e-3)


@pytest.mark.nightly  # by day it runs on layers of one rank, and the split ones alone on two and four
@pytest.mark.multiproc
def test_the_suite_compares_every_rank_with_merged_matrices() -> None:
    (report,) = check("parallel-layer=tensor+lora")
    assert not [result for result in report.results if not result.passed]
    assert "row linear" in [result.name for result in report.results]


def test_only_adapters_have_gradients_and_optimizer_state() -> None:
    """In fp32, 4 bytes of gradient and 8 of moments beside a parameter's own 4; and Adam counts its steps."""
    run = load_config("preset:tiny", plugins=["parallel-layer=dense+lora,rank=4,targets=query"])
    whole = load_config("preset:tiny")
    (size,), (plain,) = model_size(run).stages, model_size(whole).stages
    adapters = 4 * (4 * 32 + 32 * 4)  # layers: A and B of a square matrix
    assert size.parameters - plain.parameters == adapters
    assert size.memory["frozen"] == 4 * plain.parameters
    counter = 4
    held = [size.memory[role] for role in ("parameters", "gradients", "state")]
    assert held == [4 * adapters, 4 * adapters, 8 * adapters + counter]


def test_a_step_holds_adapters_alone_and_goes_on_from_the_weights_that_it_names(base: Path, tmp_path: Path) -> None:
    straight = adapt(tmp_path / "straight", base, train__steps=5)
    adapt(tmp_path / "half", base)
    manifest = Checkpoints(tmp_path / "half" / "checkpoints").manifest(3)
    assert all(name.endswith((".lora_a.weight", ".lora_b.weight")) for name in manifest.tensors)
    assert len(manifest.tensors) == 2 * 2 * 6  # A and B of six matrices in two layers
    assert manifest.about.adapters is not None
    assert manifest.about.adapters.base == str(base / "checkpoints" / "step1")
    assert adapt(tmp_path / "half", None, train__steps=5) == straight


def test_the_biases_of_adapted_routers_stay_so_that_a_run_goes_on_as_it_was(tmp_path: Path) -> None:
    """Their rate moves them while all weights are trained; steps of adapters do not hold them."""
    experts: dict[str, Any] = {
        "model__num_layers": 2,
        "model__experts__count": 4,
        "model__experts__router__score_function": "sigmoid",
        "model__experts__router__bias_rate": 0.5,
    }
    adapt(tmp_path / "base", None, "dense", train__steps=1, **experts)
    straight = adapt(tmp_path / "straight", tmp_path / "base", train__steps=5, **experts)
    adapt(tmp_path / "half", tmp_path / "base", **experts)
    assert adapt(tmp_path / "half", None, train__steps=5, **experts) == straight


def test_readers_merge_whatever_the_layers(base: Path, tmp_path: Path) -> None:
    adapt(tmp_path / "run", base)
    tokens = [[1, 2, 3, 4, 5]]
    own, plain = load(tmp_path / "run"), load(tmp_path / "run", sets={"parallel_layer.use": "dense"})
    torch.testing.assert_close(own(tokens), plain(tokens), rtol=0, atol=1e-5)
    assert (own(tokens) - load(base)(tokens)).abs().max() > 1e-3
    # A run that begins with merged weights and hardly changes them ends with the adapters' validation loss.
    for name, layers in (("all", "dense"), ("again", f"dense+{LORA}")):
        adapt(tmp_path / name, tmp_path / "run", layers, train__steps=1, train__lr=1e-12)
        assert validation(tmp_path / name) == pytest.approx(validation(tmp_path / "run"), abs=1e-5)


def test_weights_that_are_gone_or_others_are_named(base: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(base, tmp_path / "base")
    straight = adapt(tmp_path / "straight", base, train__steps=4)
    adapt(tmp_path / "run", tmp_path / "base")
    (tmp_path / "base").rename(moved)
    with pytest.raises(RunError, match=r"the weights that .*run/checkpoints/step3 adapts are not in .*base"):
        adapt(tmp_path / "run", None, train__steps=4)
    with pytest.raises(RunError, match="are not in"):
        load(tmp_path / "run")
    train(load_config("preset:tiny", sets=values(tmp_path / "base", {"train.seed": 9, "train.steps": 1})))
    with pytest.raises(RunError, match="are not in"):
        adapt(tmp_path / "run", None, train__steps=4)
    assert adapt(tmp_path / "run", moved, train__steps=4) == straight


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ("dense", "it trained adapters of lora, and this one trains all weights"),
        ("dense+lora,rank=8,alpha=16,targets=all", "their rank was 4 then, and is 8 now"),
        ("dense+lora,rank=4,alpha=4,targets=all", "their scale was 2.0 then, and is 1.0 now"),
    ],
)
def test_other_adapters_do_not_resume(layers: str, why: str, base: Path, tmp_path: Path) -> None:
    adapt(tmp_path / "run", base, train__steps=1)
    with pytest.raises(RunError, match=why):
        adapt(tmp_path / "run", None, layers, train__steps=2)


def test_a_target_that_no_matrix_is_called_is_refused_with_those_there_are() -> None:
    run = load_config("preset:tiny", plugins=["parallel-layer=dense+lora,targets=q_proj"])
    with pytest.raises(RunError, match=r"names 'q_proj', .*attention.qkv.query, .*mlp.output"):
        model_size(run)


def test_a_target_may_lie_on_another_stage() -> None:
    """And one that lies on none is refused while the run is planned."""
    stages = ["schedule=1f1b", "parallel-layer=dense+lora,targets=layers.0.attention.output"]
    sets = {"parallel.pipeline": 2}
    first, second = model_size(load_config("preset:tiny", sets=sets, plugins=stages, nproc=2)).stages
    whole = first.memory["frozen"] // 4
    assert (first.parameters - whole, second.memory["gradients"]) == (8 * (32 + 32), 0)
    with pytest.raises(RunError, match=r"names 'layers.7.attention.output', .*mlp.output"):
        model_size(
            load_config("preset:tiny", sets=sets, plugins=[each.replace("s.0", "s.7") for each in stages], nproc=2)
        )


@pytest.mark.multiproc
def test_stages_agree_on_targets() -> None:
    """A stage without layers of its own, or with another part of them, trains nothing of a target and refuses none."""
    layers = "parallel-layer=dense+lora,targets=layers.0.attention.output"
    (ranks,) = train_many(
        2, [Request(("preset:tiny",), sets=(*SETS, "parallel.pipeline=2"), plugins=(layers, "schedule=1f1b"), nproc=2)]
    )
    assert len(ranks[0].losses) == 3


def test_adapters_of_random_weights_cannot_be_read_elsewhere(tmp_path: Path) -> None:
    adapt(tmp_path / "run", None, train__steps=1)
    with pytest.raises(RunError, match=r"adapters of random weights.*run.init_from"):
        load(tmp_path / "run")
