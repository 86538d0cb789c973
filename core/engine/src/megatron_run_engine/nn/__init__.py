"""Transformer layers built from a factory of parallel layers, and the tensor operations that such factories share.

Reading order: ``spec`` (the sizes), ``block`` (attention and MLP between norms), ``chunk`` (one stage's part of a
model), ``linear`` (the backward that a schedule may split), ``parallel`` (layers split over ranks), ``moe`` (mixtures
of experts).

Imports: contracts, errors, runtime.
"""

from megatron_run_engine.nn.attention import Attention, CoreAttention, SelfAttention
from megatron_run_engine.nn.block import (
    ExpertBlock,
    TransformerBlock,
    attention_fields,
    drops,
    follow_recompute,
    make_block,
    parameters_of,
)
from megatron_run_engine.nn.chunk import DecoderChunk, ForwardPass
from megatron_run_engine.nn.cross_entropy import CrossEntropy, LinearCrossEntropy, cross_entropy
from megatron_run_engine.nn.dropout import Dropout
from megatron_run_engine.nn.embedding import WORD, Embedding, Positions, embed, embedding_fields, tie_to_word
from megatron_run_engine.nn.fused import split_heads, triton_lack
from megatron_run_engine.nn.gelu import Activation
from megatron_run_engine.nn.linear import (
    PLAIN,
    LinearLayer,
    Operand,
    Products,
    ReplicatedLinear,
    linear,
    submit_gradients,
)
from megatron_run_engine.nn.mlp import Mlp, activation
from megatron_run_engine.nn.moe.layer import RouterReports
from megatron_run_engine.nn.norm import LayerNorm, RmsNorm, make_norm, norm_of
from megatron_run_engine.nn.packed_attention import cumulative_lengths
from megatron_run_engine.nn.parameter import build_device, empty_parameter
from megatron_run_engine.nn.rotary import Rotary
from megatron_run_engine.nn.spec import ExpertSpec, TransformerSpec, check_heads

__all__ = [
    "PLAIN",
    "WORD",
    "Activation",
    "Attention",
    "CoreAttention",
    "CrossEntropy",
    "DecoderChunk",
    "Dropout",
    "Embedding",
    "ExpertBlock",
    "ExpertSpec",
    "ForwardPass",
    "LayerNorm",
    "LinearCrossEntropy",
    "LinearLayer",
    "Mlp",
    "Operand",
    "Positions",
    "Products",
    "ReplicatedLinear",
    "RmsNorm",
    "Rotary",
    "RouterReports",
    "SelfAttention",
    "TransformerBlock",
    "TransformerSpec",
    "activation",
    "attention_fields",
    "build_device",
    "check_heads",
    "cross_entropy",
    "cumulative_lengths",
    "drops",
    "embed",
    "embedding_fields",
    "empty_parameter",
    "follow_recompute",
    "linear",
    "make_block",
    "make_norm",
    "norm_of",
    "parameters_of",
    "split_heads",
    "submit_gradients",
    "tie_to_word",
    "triton_lack",
]
