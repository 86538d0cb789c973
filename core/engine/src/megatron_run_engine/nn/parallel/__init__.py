"""Tensor-parallel layers: the parts from which every factory of split layers is built.

Reading order: ``tensor_split`` (which rank holds which piece), ``mappings`` (f, g, their sequence-parallel
counterparts, and the product whose backward overlaps with communication), ``vocabulary`` (embedding and output layer),
``split_layers`` (the factory's common base, and linear layers of experts).
"""

from megatron_run_engine.nn.parallel.mappings import column_linear, f, g, gather_sequence, scatter_sequence
from megatron_run_engine.nn.parallel.split_layers import (
    ExpertColumnLinear,
    ExpertRowLinear,
    ReplicatedDropout,
    SplitLayers,
)
from megatron_run_engine.nn.parallel.tensor_split import Split
from megatron_run_engine.nn.parallel.vocabulary import OutputLayer, VocabEmbedding, rows_of_a_rank, vocabulary_spec

__all__ = [
    "ExpertColumnLinear",
    "ExpertRowLinear",
    "OutputLayer",
    "ReplicatedDropout",
    "Split",
    "SplitLayers",
    "VocabEmbedding",
    "column_linear",
    "f",
    "g",
    "gather_sequence",
    "rows_of_a_rank",
    "scatter_sequence",
    "vocabulary_spec",
]
