"""Transformer layers built from a factory of parallel layers, and the tensor operations that such factories share.

Reading order: ``spec`` (the sizes), ``block`` (attention and MLP between norms), ``chunk`` (one stage's part of a
model), ``linear`` (the backward that a schedule may split), ``parallel`` (layers split over ranks), ``moe`` (mixtures
of experts). Of a module and a function of one name the function is public elsewhere: ``parallel.linear``.

Imports: contracts, errors, lazy, runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.lazy import typed_names

if TYPE_CHECKING:
    from megatron_run_engine.nn.attention import Attention as Attention
    from megatron_run_engine.nn.attention import CoreAttention as CoreAttention
    from megatron_run_engine.nn.attention import SelfAttention as SelfAttention
    from megatron_run_engine.nn.attention_scores import HeadRows as HeadRows
    from megatron_run_engine.nn.attention_scores import largest_scores as largest_scores
    from megatron_run_engine.nn.block import ExpertBlock as ExpertBlock
    from megatron_run_engine.nn.block import TransformerBlock as TransformerBlock
    from megatron_run_engine.nn.block import attention_fields as attention_fields
    from megatron_run_engine.nn.block import drops as drops
    from megatron_run_engine.nn.block import follow_recompute as follow_recompute
    from megatron_run_engine.nn.block import make_block as make_block
    from megatron_run_engine.nn.block import parameters_of as parameters_of
    from megatron_run_engine.nn.chunk import AttentionMaker as AttentionMaker
    from megatron_run_engine.nn.chunk import DecoderChunk as DecoderChunk
    from megatron_run_engine.nn.chunk import ForwardPass as ForwardPass
    from megatron_run_engine.nn.cross_entropy import CrossEntropy as CrossEntropy
    from megatron_run_engine.nn.cross_entropy import LinearCrossEntropy as LinearCrossEntropy
    from megatron_run_engine.nn.device import on_cpu as on_cpu
    from megatron_run_engine.nn.device import on_gpu as on_gpu
    from megatron_run_engine.nn.dropout import Dropout as Dropout
    from megatron_run_engine.nn.embedding import WORD as WORD
    from megatron_run_engine.nn.embedding import Embedding as Embedding
    from megatron_run_engine.nn.embedding import Positions as Positions
    from megatron_run_engine.nn.embedding import embed as embed
    from megatron_run_engine.nn.embedding import embedding_fields as embedding_fields
    from megatron_run_engine.nn.embedding import tie_to_word as tie_to_word
    from megatron_run_engine.nn.fused import split_heads as split_heads
    from megatron_run_engine.nn.fused import triton_lack as triton_lack
    from megatron_run_engine.nn.gelu import Activation as Activation
    from megatron_run_engine.nn.linear import PLAIN as PLAIN
    from megatron_run_engine.nn.linear import LinearLayer as LinearLayer
    from megatron_run_engine.nn.linear import Operand as Operand
    from megatron_run_engine.nn.linear import Products as Products
    from megatron_run_engine.nn.linear import ReplicatedLinear as ReplicatedLinear
    from megatron_run_engine.nn.linear import submit_gradients as submit_gradients
    from megatron_run_engine.nn.mlp import Mlp as Mlp
    from megatron_run_engine.nn.mlp import activation as activation
    from megatron_run_engine.nn.moe.layer import RouterReports as RouterReports
    from megatron_run_engine.nn.norm import LayerNorm as LayerNorm
    from megatron_run_engine.nn.norm import RmsNorm as RmsNorm
    from megatron_run_engine.nn.norm import make_norm as make_norm
    from megatron_run_engine.nn.norm import norm_of as norm_of
    from megatron_run_engine.nn.packed_attention import cumulative_lengths as cumulative_lengths
    from megatron_run_engine.nn.parameter import build_device as build_device
    from megatron_run_engine.nn.parameter import empty_parameter as empty_parameter
    from megatron_run_engine.nn.qk_clip import QkClip as QkClip
    from megatron_run_engine.nn.rotary import Rotary as Rotary
    from megatron_run_engine.nn.spec import ExpertSpec as ExpertSpec
    from megatron_run_engine.nn.spec import TransformerSpec as TransformerSpec
    from megatron_run_engine.nn.spec import check_heads as check_heads

__getattr__, __dir__, __all__ = typed_names(__name__)
