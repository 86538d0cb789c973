"""Runs whose samples are split over context-parallel ranks: each feature, in every arrangement of up to 8 ranks.

A run and the single process that it must equal have the same microbatches. Half of the labels do not count, another
share in each sample, so that some pieces have few and some none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Protocol, TypeVar

import numpy as np

from tests.integration.pairwise import pairwise
from tests.integration.pieces import Case

DATA = f"data={Path(__file__).with_name('masked_data.py')}"
#: Tokens of a sample, for pieces of 8 or 4, steps of a run, and ranks of most runs and of any.
LENGTH, STEPS, FEW_RANKS, MOST_RANKS = 32, 3, 4, 8
SETS = (
    f"train.steps={STEPS}",
    f"train.sequence_length={LENGTH}",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.lr_shape=constant",
    "train.lr_warmup=0",
    "eval.interval=2",
    "eval.batches=1",
    "model.num_layers=4",
    "model.hidden_size=32",
    "model.num_heads=8",
    "model.init_std=0.2",
)


@dataclass(frozen=True)
class Feature:
    """Settings of a run. Those ``split`` are not of the single process; ``layers`` are stacked below the split ones.

    ``tensor``, ``pipeline``, ``expert`` are the least ranks along these axes that show it; ``even`` whether stages are.
    """

    sets: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    data: str = DATA
    layers: str = ""
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    even: bool = True
    kv_heads: int = 8

    def shown_by(self, tensor: int, pipeline: int, data: int, *, chunks: bool) -> bool:
        """Whether ranks along these axes, on whose stages lie several ``chunks``, show it."""
        enough = tensor >= self.tensor and pipeline >= self.pipeline and data % self.expert == 0
        return enough and (self.even or not chunks)


def _rope(*sets: str) -> Feature:
    return Feature(("model.position=rope", *(f"model.rope.{each}" for each in sets)))


_EXPERTS = ("model.experts.count=4", "model.experts.ffn_size=16", "model.experts.z_loss_coeff=0.01")
#: Stretched rotations: samples are longer than what the model was trained on.
_STRETCHED = ("factor=4", "original_length=8")
FACTORS = ("short_factors=1,1.5", "long_factors=2,4")
TEXTS = "{texts}"

FEATURES: Mapping[str, Feature] = {
    "plain": Feature(),
    "grouped queries": Feature(("model.num_kv_heads=4",), kv_heads=4),
    "one key for all": Feature(("model.num_kv_heads=1",), kv_heads=1),
    "window below a piece": Feature(("model.attention.window=3",)),
    "window of a piece": Feature(("model.attention.window=8",)),
    "window above a piece": Feature(("model.attention.window=11", "model.attention.window_pattern=1,0")),
    "softcap and scale": Feature(("model.attention.softcap=2", "model.attention.scale=0.7")),
    "norm of queries and keys": Feature(("model.attention.qk_norm=full", "model.norm.kind=rmsnorm")),
    "clipped scores": Feature(("model.num_kv_heads=4", "model.attention.qk_clip=0.02"), kv_heads=4),
    "rope": _rope("fraction=0.5"),
    "rope, linear": _rope("scaling=linear", "factor=4"),
    "rope, llama3": _rope("scaling=llama3", *_STRETCHED),
    "rope, yarn": _rope("scaling=yarn", *_STRETCHED),
    "rope, longrope, long": _rope("scaling=longrope", *_STRETCHED, *FACTORS),
    "rope, longrope, short": _rope("scaling=longrope", "factor=4", "original_length=32", *FACTORS),
    "documents": Feature((f"data.paths={TEXTS}", "data.packing=documents"), data="data=text"),
    "documents, rope, window": Feature(
        (f"data.paths={TEXTS}", "data.packing=documents", "model.position=rope", "model.attention.window=5"),
        data="data=text",
    ),
    "sequence parallelism": Feature(split=("parallel.sequence=true",), tensor=2),
    "scattered messages": Feature(split=("parallel.scatter_messages=true",), tensor=2, pipeline=2),
    "recomputed": Feature(split=("train.recompute=full",)),
    "recomputed attention": Feature(split=("train.recompute=core_attn,mlp",)),
    "offloaded": Feature(split=("train.offload=attn,head",)),
    "uneven stages": Feature(split=("parallel.layers=3,1",), pipeline=2, even=False),
    "experts": Feature((*_EXPERTS, "model.experts.layer_pattern=1,0,0,1")),
    "experts on ranks": Feature((*_EXPERTS, "model.experts.layer_pattern=1,0,0,1"), ("parallel.expert=2",), expert=2),
    "experts with biases": Feature(
        (
            *_EXPERTS,
            "model.experts.aux_loss_coeff=0",
            "model.experts.router.bias_rate=0.05",
            "model.experts.router.score_function=sigmoid",
        )
    ),
    "adapters": Feature(layers="lora"),
    "mean over tokens": Feature(("train.loss_mean=token",)),
    "mean over tokens, experts": Feature(("train.loss_mean=token", *_EXPERTS)),
    "untied": Feature(("model.tie_embeddings=false", "model.activation=swiglu")),
    "chunks of the loss, smoothing": Feature(("model.label_smoothing=0.1",), ("model.loss_chunks=2",)),
    "several samples a pass": Feature(("train.micro_batch_size=2",)),
}

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble,variant=h1", "zero-bubble,variant=v")
METHODS = ("ring", "all_gather", "ulysses")


@dataclass(frozen=True)
class Split:
    """One run; ``schedule`` is empty without a pipeline."""

    feature: str
    context: int = 1
    tensor: int = 1
    schedule: str = ""
    data: int = 1
    optimizer: str = "adamw"
    method: str = METHODS[0]
    dtype: str = "float64"

    def __str__(self) -> str:
        ways = [f"c{self.context}", f"t{self.tensor}", f"p{self.pipeline}", f"d{self.data}"]
        return ", ".join([self.feature, "-".join(ways), self.schedule or "-", self.optimizer, self.method, self.dtype])

    @property
    def pipeline(self) -> int:
        return 2 if self.schedule else 1

    @property
    def world(self) -> int:
        return self.context * self.tensor * self.pipeline * self.data

    @property
    def alone(self) -> Split:
        """The single process."""
        return Split(self.feature, dtype=self.dtype)

    @property
    def axes(self) -> Mapping[str, Hashable]:
        """What it chooses."""
        return vars(self)

    @property
    def possible(self) -> bool:
        """Whether it can run, and shows its feature."""
        feature, ways = FEATURES[self.feature], self.tensor * self.context
        return (
            self.world <= MOST_RANKS
            and feature.shown_by(self.tensor, self.pipeline, self.data, chunks=self._chunks)
            and feature.kv_heads % (ways if self.method == "ulysses" else self.tensor) == 0
            and not (self.feature == "several samples a pass" and self.data > 2)
        )

    @property
    def small(self) -> bool:
        """Whether it has few ranks, or its feature needs more."""
        feature = FEATURES[self.feature]
        return self.world <= FEW_RANKS or 2 * feature.tensor * feature.pipeline * feature.expert > FEW_RANKS

    @property
    def _chunks(self) -> bool:
        return self.schedule in ("interleaved", "zero-bubble,variant=v")

    def case(self, texts: Path) -> Case:
        """What a user would type; ``texts`` is the folder of documents."""
        feature, single = FEATURES[self.feature], self.world == 1
        sizes = [f"parallel.{axis}={getattr(self, axis)}" for axis in ("context", "tensor", "pipeline")]
        layers = ["tensor" if self.tensor > 1 else "dense"] + [feature.layers] * bool(feature.layers)
        layers += [f"context,method={self.method}"] * (self.context > 1)
        sets = [*SETS, *feature.sets, *([] if single else [*feature.split, *sizes])]
        sets += ["parallel.chunks=2"] * self._chunks
        plugins = [feature.data, f"optimizer={self.optimizer}", *[f"schedule={self.schedule}"] * bool(self.schedule)]
        plugins += [f"parallel-layer={'+'.join(layers)}"]
        last = {each.partition("=")[0]: each.format(texts=texts) for each in sets}
        return Case(tuple(last.values()), tuple(plugins), self.dtype)


PRODUCT = [
    split
    for split in (
        Split(feature, context, tensor, schedule, data, optimizer, method)
        for feature, context, tensor, schedule, data, optimizer, method in product(
            FEATURES, (2, 4), (1, 2), ("", *SCHEDULES), (1, 2), ("adamw", "zero1"), METHODS
        )
    )
    if split.possible
]
AXES = [*vars(PRODUCT[0])]


def selection(count: int) -> list[Split]:
    """Rows of the product: each pair of two choices on 4 ranks, and others until there are ``count``; some in fp32."""
    few = pairwise([split for split in PRODUCT if split.small], lambda split: split.axes, AXES)
    rest = [split for split in PRODUCT if split not in set(few)]
    more = Random(0).sample(rest, max(0, min(count - len(few), len(rest))))
    chosen = [*few, *more]
    return [replace(each, dtype="float64" if number % 5 else "float32") for number, each in enumerate(chosen)]


def write_texts(folder: Path) -> None:
    """Documents of 2 to 60 bytes: rows have several, and some of them end with a piece."""
    generator = np.random.default_rng(0)
    for number in range(150):
        words = generator.integers(97, 123, generator.integers(2, 60), dtype=np.uint8)
        (folder / f"{number:03}.txt").write_bytes(bytes(words.tolist()))


class OnRanks(Protocol):
    """One run of a grid."""

    @property
    def world(self) -> int:
        """The ranks that it needs."""


Row = TypeVar("Row", bound=OnRanks)


def by_world(splits: Sequence[Row]) -> dict[int, list[Row]]:
    """Splits that run on the same ranks, in order."""
    found: dict[int, list[Row]] = {}
    for split in splits:
        found.setdefault(split.world, []).append(split)
    return dict(sorted(found.items()))
