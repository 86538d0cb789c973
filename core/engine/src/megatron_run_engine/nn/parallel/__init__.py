"""Layers that several ranks share: what every factory that splits them is made from.

Reading order: ``tensor_split`` (whose piece is which), ``mappings`` (f, g and their conjugates), ``column`` (the
product whose backward overlaps), ``vocabulary`` (the ends of a model), ``expert_linear``, ``split_layers``.
"""

from megatron_run_engine.nn.parallel.column import column_linear
from megatron_run_engine.nn.parallel.expert_linear import ExpertColumnLinear, ExpertRowLinear
from megatron_run_engine.nn.parallel.mappings import f, g, gather_sequence, scatter_sequence
from megatron_run_engine.nn.parallel.split_layers import ReplicatedDropout, SplitLayers
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
