"""Whole models by the kernels of a GPU, in Triton's interpreter, have the losses and gradients of the CPU's code.

Every way from the projection to attention's core is among them: grouped heads, rotary positions, norms of queries and
keys, latent attention, the attention of T5, packed documents and recomputation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from megatron_run.config.values import nested
from megatron_run.contracts import Microbatch
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_model_deepseek import DeepSeek, DeepSeekOptions
from megatron_run_model_t5 import T5, T5Options
from megatron_run_testing.build_contexts import example_microbatch, logical_gradients, single_process_context
from megatron_run_testing.model import build_model
from tests.support.interpreted import interpreted

VOCAB, LENGTH, BATCH = 37, 12, 2
#: One layer has each way; ``gpt`` alone has two, of which each hands its residual to the other.
SIZES = {"num_layers": 1, "hidden_size": 24, "num_heads": 4, "vocab_size": VOCAB, "dropout": 0.0}
LLAMA = {"position": "rope", "norm.kind": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2}
LATENT = {"query_rank": 7, "kv_rank": 12, "rope_head_size": 4, "nope_head_size": 6, "value_head_size": 8}
MODELS: dict[str, tuple[type, type[BaseModel], dict[str, Any]]] = {
    "gpt": (Gpt, GptOptions, {"num_layers": 2}),
    "grouped heads": (Gpt, GptOptions, {"num_kv_heads": 1}),
    "rotary positions": (Gpt, GptOptions, LLAMA),
    "norms of each head": (Gpt, GptOptions, {**LLAMA, "attention.qk_norm": "head"}),
    "norms of all heads": (Gpt, GptOptions, {**LLAMA, "attention.qk_norm": "full"}),
    "norms without rotary positions": (Gpt, GptOptions, {"attention.qk_norm": "head"}),
    "latent attention": (DeepSeek, DeepSeekOptions, {"ffn_size": 40, **LATENT}),
    "t5": (T5, T5Options, {"num_layers": 2, "head_size": 10, "encoder_layers": 1, "encoder_length": LENGTH}),
}
Tried = tuple[str, dict[str, Any], bool]
CASES: list[Tried] = [(name, {}, False) for name in MODELS]
CASES += [("rotary positions", {"recompute": each}, False) for each in ("full", ("core_attn",))]
CASES += [(name, {}, True) for name in ("gpt", "rotary positions")]
#: Each kernel once: heads that are grouped, rotated and normed, latent ones, a bias, documents, a core that runs twice.
BY_DAY: list[Tried] = [
    ("norms of each head", {}, False),
    ("latent attention", {}, False),
    ("t5", {}, False),
    ("rotary positions", {"recompute": ("core_attn",)}, False),
    ("gpt", {}, True),
]
BY_NIGHT = [case for case in CASES if case not in BY_DAY]


def trained(case: Tried) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one microbatch, ``packed`` of two documents a row or not."""
    name, train, packed = case
    kind, described, given = MODELS[name]
    options = described.model_validate(nested({**SIZES, **given}))
    train = {"sequence_length": LENGTH, "micro_batch_size": BATCH, **train}
    context = single_process_context(options, dtype=torch.float32, train=train)
    more = {"encoder_tokens"} if name == "t5" else {"documents", "positions"} if packed else set()
    context = replace(context, fields=context.fields | more)
    built = build_model(lambda context, _: kind(context, options), context, options).train(mode=True)
    losses = built.step(microbatch(name, packed=packed))
    return losses[0].detach(), {key: x.detach().clone() for key, x in logical_gradients(built.infos).items()}


def microbatch(name: str, *, packed: bool) -> Microbatch:
    """Tokens, with those of an encoder, or the bounds of documents."""
    made = example_microbatch(VOCAB, batch=BATCH, length=LENGTH)
    fields = dict(made.fields)
    if name == "t5":
        fields["encoder_tokens"] = fields["tokens"].flip(1)
    if packed:
        fields["documents"] = torch.tensor([[0, 5, LENGTH], [0, 9, LENGTH]])
        fields["positions"] = torch.cat((torch.arange(5), torch.arange(7), torch.arange(9), torch.arange(3))).view(
            2, -1
        )
    return replace(made, fields=fields)


def all_trained(cases: list[Tried]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """By the kernels, where they are interpreted."""
    return [trained(case) for case in cases]


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("cases", [BY_DAY, pytest.param(BY_NIGHT, marks=pytest.mark.nightly)], ids=["some", "others"])
def test_losses_and_gradients_are_those_of_the_cpu(cases: list[Tried]) -> None:
    for case, (loss, gradients) in zip(cases, interpreted(all_trained, cases), strict=True):
        exact, expected = trained(case)
        torch.testing.assert_close(loss, exact, rtol=1e-5, atol=1e-6, msg=str(case))
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            close = torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6)
            assert close, f"{case}: {name} differs by {(gradients[name] - gradient).abs().max()}"
