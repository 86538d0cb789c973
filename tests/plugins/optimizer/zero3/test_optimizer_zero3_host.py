"""State in host memory with everything lent: the device keeps shares of parameters and gradients; no bit changes."""

from __future__ import annotations

import pytest

from megatron_run.config.request import Request
from tests.support.training import train_many

LITTLE = (
    "train.steps=4",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.sequence_length=8",
    "train.clip_norm=0.5",
    "model.num_layers=2",
    "eval.interval=2",
    "eval.batches=1",
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("train.precision=bf16",),
    "16-bit gradients": ("train.precision=bf16", "optimizer.grad_dtype=param"),
    "fp16, overflows": ("train.precision=fp16", "scaler.initial_loss_scale=4294967296"),
    "whole matrices": ("optimizer.rule=muon",),
    "rows that shrink": ("model.attention.qk_clip=0.01",),
    "once a step": ("optimizer.reduce=step", "optimizer.segments_held=0"),
}


def asked(*sets: str) -> Request:
    plugins = ("optimizer=zero3,whole_below=0",)
    return Request(configs=("preset:tiny",), sets=(*LITTLE, *sets), plugins=plugins, nproc=2)


@pytest.mark.multiproc
def test_it_changes_no_bit_of_a_run() -> None:
    places = ((), ("optimizer.state_on_host=true",))
    found = train_many(2, [asked(*sets, *more) for sets in VARIANTS.values() for more in places])
    for index, variant in enumerate(VARIANTS):
        (plain, *_), (hosted, *_) = found[2 * index : 2 * index + 2]
        assert hosted.losses == plain.losses, variant
        assert repr(hosted.norms) == repr(plain.norms), variant  # with a NaN where a step was skipped
        assert (hosted.validation, hosted.weights) == (plain.validation, plain.weights), variant
        assert ("nan" in repr(plain.norms)) == variant.startswith("fp16"), variant
