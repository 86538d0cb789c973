"""Layers and options of a model whose training differs from its evaluation in nothing that is random or smoothed."""

from __future__ import annotations

from pydantic import BaseModel
from torch import nn

from megatron_run.contracts import AttentionShape, StackedLayers


class WithoutDropout(StackedLayers):
    """Layers that drop nothing and smooth no label, whatever the model asks for."""

    def dropout(self, p: float) -> nn.Module:
        """A layer that keeps all."""
        return super().dropout(0.0)

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """Attention that keeps all probabilities."""
        return super().core_attention(shape, 0.0)

    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        """The loss of the labels as they are."""
        return super().cross_entropy(vocab)

    def linear_cross_entropy(self, vocab: int, label_smoothing: float, chunks: int) -> nn.Module:
        """The loss of the labels as they are."""
        return super().linear_cross_entropy(vocab, 0.0, chunks)


def without_dropout(options: BaseModel) -> BaseModel:
    """``options`` with every dropout at 0: a model may have layers of its own that drop."""
    values = {name: getattr(options, name) for name in type(options).model_fields}
    groups = {name: without_dropout(value) for name, value in values.items() if isinstance(value, BaseModel)}
    return options.model_copy(update=groups | {name: 0.0 for name in values if "dropout" in name})
