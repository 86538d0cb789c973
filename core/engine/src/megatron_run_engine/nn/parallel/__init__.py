"""Tensor-parallel layers: the parts from which every factory of split layers is built.

Reading order: ``mappings`` (which rank holds which piece; f, g, their sequence-parallel counterparts, and the product
whose backward overlaps with communication), ``split_layers`` (the factory's common base: embedding and output layer,
and linear layers of experts).
"""

from megatron_run_engine.nn.linear import linear
from megatron_run_engine.nn.parallel.mappings import LayerSplit, column_linear, f, g, gather_sequence, scatter_sequence
from megatron_run_engine.nn.parallel.split_layers import (
    ExpertColumnLinear,
    ExpertRowLinear,
    OutputLayer,
    ReplicatedDropout,
    SplitLayers,
    VocabEmbedding,
    rows_of_a_rank,
    vocabulary_spec,
)

__all__ = [
    "ExpertColumnLinear",
    "ExpertRowLinear",
    "LayerSplit",
    "OutputLayer",
    "ReplicatedDropout",
    "SplitLayers",
    "VocabEmbedding",
    "column_linear",
    "f",
    "g",
    "gather_sequence",
    "linear",
    "rows_of_a_rank",
    "scatter_sequence",
    "vocabulary_spec",
]
