"""The built-in model in the sizes of a benchmark."""

from __future__ import annotations

from benchmarks.support.shape import Shape
from megatron_run_engine.builtin.model.gpt import GptOptions


def gpt_options(shape: Shape) -> GptOptions:
    """The built-in model of these sizes, untied and without dropout, as the peers' models are."""
    return GptOptions(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        vocab_size=shape.vocab,
        tie_embeddings=False,
        dropout=0.0,
    )


def train_section(shape: Shape, data: int = 1) -> dict[str, int]:
    """The section ``train`` for these sizes, of a run on ``data`` data-parallel ranks."""
    return {
        "sequence_length": shape.sequence,
        "micro_batch_size": shape.micro_batch,
        "global_batch_size": shape.micro_batch * shape.microbatches * data,
    }
