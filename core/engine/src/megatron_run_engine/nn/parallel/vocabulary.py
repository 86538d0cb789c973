"""Embedding and output layer, split along the vocabulary.

Legend: s sequence, b micro batch, h hidden, v vocabulary, p padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_run.contracts import ParameterSpec, Part
from megatron_run_engine.nn.embedding import embed
from megatron_run_engine.nn.parallel.mappings import column_linear, g, scatter_sequence
from megatron_run_engine.nn.parameter import empty_parameter, owned
from megatron_run_engine.runtime.comm import ALONE

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Init
    from megatron_run_engine.nn.parallel.tensor_split import Split
    from megatron_run_engine.runtime.comm import ParallelGroup
    from megatron_run_engine.runtime.context import BuildContext

#: The number of rows of a rank is a multiple of this, as in Megatron-LM: a matrix product over 50304 columns is much
#: faster than over 50257. Padding rows start at zero, are not classes of the cross entropy, and so stay at zero.
#: Names, initial values, checkpoints and parameter counts cover the unpadded rows only.
ROWS_MULTIPLE = 128


class VocabEmbedding(nn.Module):
    """Each rank looks up the tokens whose rows it holds and takes zeros for the others; the sum is complete."""

    def __init__(self, context: BuildContext, split: Split, vocab: int, hidden: int, init: Init) -> None:
        super().__init__()
        self.gradients, self.split = context.gradients, split
        rows = rows_of_a_rank(vocab, split.peers)
        self.first, self.stop = split.peers.index * rows, split.peers.size * rows
        self.weight = empty_parameter(context, rows, hidden)
        self.parameter_specs = {"weight": vocabulary_spec(vocab, hidden, init, split.peers)}

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [s, b, h] or [s/t, b, h]."""
        row, mine = owned(tokens.t(), self.first, len(self.weight), self.stop)  # [s, b]
        found = embed(row, self.weight, self.gradients)  # [s, b, h]
        partial = found.masked_fill(~mine[..., None], 0.0)
        leave = scatter_sequence if self.split.sequence else g
        return leave(partial, self.split.peers)


class OutputLayer(nn.Module):
    """Logits for this rank's part of the padded vocabulary; ``weight`` [p/t, h] is its own or the embedding's."""

    def __init__(
        self,
        context: BuildContext,
        split: Split,
        vocab: int,
        hidden: int,
        init: Init,
        weight: Parameter | None = None,
    ) -> None:
        super().__init__()
        self.gradients, self.split = context.gradients, split
        rows = rows_of_a_rank(vocab, split.peers)
        self.weight = empty_parameter(context, rows, hidden) if weight is None else weight
        self.parameter_specs = {"weight": vocabulary_spec(vocab, hidden, init, split.peers)}

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] or [s/t, b, h] -> [s, b, p/t]."""
        return column_linear(x, self.weight, None, self.gradients, self.split)


def rows_of_a_rank(vocab: int, peers: ParallelGroup = ALONE) -> int:
    """Rows of one rank, p/t: a multiple of :data:`ROWS_MULTIPLE`. 50257 over 8 ranks is padded to 51200 in all."""
    return -(-vocab // (ROWS_MULTIPLE * peers.size)) * ROWS_MULTIPLE


def vocabulary_spec(vocab: int, hidden: int, init: Init, peers: ParallelGroup = ALONE) -> ParameterSpec:
    """Spec of a ``weight`` [p/t, hidden]: it covers this rank's unpadded rows, which may be none."""
    rows = rows_of_a_rank(vocab, peers)
    first = min(peers.index * rows, vocab)
    real = min(rows, vocab - first)
    return ParameterSpec(init, (Part("weight", (vocab, hidden), range(real), start=first),))
