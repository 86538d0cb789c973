"""What a factory of layers makes says of every parameter how it starts and which logical tensor it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from megatron_run.contracts import AttentionShape, Init, LinearPart, ParallelLayers, StackedLayers
from megatron_run.errors import PluginError
from megatron_run_engine.runtime.parameter_init import unspecified

if TYPE_CHECKING:
    from torch import nn


class CheckedLayers(StackedLayers):
    """Passes on what ``base`` makes, unless a parameter of it has no ``parameter_specs``.

    Such a layer would train: but nothing says how its parameter starts, or that its gradient is one part of a sum where
    ranks split the sequence. ``name`` is what an error calls the factory.
    """

    def __init__(self, base: ParallelLayers, name: str) -> None:
        super().__init__(base)
        self._name = name

    def column_linear(
        self, inputs: int, parts: tuple[LinearPart, ...], *, bias: bool, init: Init, norm: nn.Module | None = None
    ) -> nn.Module:
        """Checked."""
        return self._checked("column_linear", super().column_linear(inputs, parts, bias=bias, init=init, norm=norm))

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """Checked."""
        return self._checked("row_linear", super().row_linear(inputs, outputs, bias=bias, init=init))

    def vocab_embedding(self, vocab: int, hidden: int, *, init: Init) -> nn.Module:
        """Checked."""
        return self._checked("vocab_embedding", super().vocab_embedding(vocab, hidden, init=init))

    def output_layer(self, vocab: int, hidden: int, *, init: Init, weight: nn.Parameter | None = None) -> nn.Module:
        """Checked."""
        return self._checked("output_layer", super().output_layer(vocab, hidden, init=init, weight=weight))

    def norm(self, kind: Literal["layernorm", "rmsnorm"], size: int, eps: float = 1e-5) -> nn.Module:
        """Checked."""
        return self._checked("norm", super().norm(kind, size, eps))

    def dropout(self, p: float) -> nn.Module:
        """Checked."""
        return self._checked("dropout", super().dropout(p))

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """Checked."""
        return self._checked("core_attention", super().core_attention(shape, dropout))

    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        """Checked."""
        return self._checked("cross_entropy", super().cross_entropy(vocab, label_smoothing))

    def expert_column_linear(
        self, experts: range, inputs: int, parts: tuple[LinearPart, ...], *, bias: bool, init: Init
    ) -> nn.Module:
        """Checked."""
        made = super().expert_column_linear(experts, inputs, parts, bias=bias, init=init)
        return self._checked("expert_column_linear", made)

    def expert_row_linear(self, experts: range, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """Checked."""
        made = super().expert_row_linear(experts, inputs, outputs, bias=bias, init=init)
        return self._checked("expert_row_linear", made)

    def _checked(self, method: str, made: nn.Module) -> nn.Module:
        if missing := unspecified(made):
            raise PluginError(
                f"{method} of {self._name} returned {type(made).__name__}, which does not say what {missing} is",
                why="parameter_specs, a dict on the module that owns a parameter, say how it starts, and over which "
                "ranks its gradient is a part of a sum",
                fix=f'set self.parameter_specs = {{"{missing.rpartition(".")[2]}": ParameterSpec(Init(...))}} there',
            )
        return made
