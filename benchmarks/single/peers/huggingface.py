"""Hugging Face's GPT-2 in the same plain loop, where transformers is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from benchmarks.single.loop import PlainLoop
from benchmarks.single.model import Precision, Weights
from benchmarks.single.peers.nanogpt import gpt2_weights
from benchmarks.support.shape import Shape

#: Matrices that it keeps as [in, out].
TURNED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def huggingface(
    shape: Shape, weights: Weights | None, precision: Precision, device: str = "cpu", *, activation: str
) -> PlainLoop:
    """The network, with attention by PyTorch's fused kernel, which is its default, and no dropout."""
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()  # it has a word for each default that a vocabulary this small breaks
    config = transformers.GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.sequence,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function=activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: Any = transformers.GPT2LMHeadModel(config)
    if weights is not None:
        tensors = {name: x.t() if name.endswith(TURNED) else x for name, x in gpt2_weights(weights).items()}
        model.transformer.load_state_dict(tensors)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        """It would shift labels by one; ours are shifted already."""
        found: Tensor = model(input_ids=tokens, labels=labels, shift_labels=labels).loss
        return found

    return PlainLoop(model.to(device), loss, precision)
