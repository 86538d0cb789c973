"""model=bert: a bidirectional encoder (Devlin et al. 2018), with the order of norms that let Megatron-LM's grow.

Reading order: ``options``, here the cut into chunks, ``encoder`` (embedding and blocks), ``heads`` (losses).

Legend: s tokens of a row, b rows of a microbatch, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.contracts import Boundary, Chunk, Model, PluginInfo
from megatron_run.errors import InputError
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.nn import WORD, attention_fields, tie_to_word
from megatron_run_model_bert.encoder import TOKEN_TYPES, EncoderChunk, EncoderEmbedding, first_fields
from megatron_run_model_bert.heads import (
    ORDER_LOSS,
    SWAPPED,
    Classification,
    Head,
    MaskedTokens,
    Pretraining,
    Span,
    counted,
)
from megatron_run_model_bert.options import OVER_WORDS, BertOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import Microbatch, ParallelLayers
    from megatron_run.contracts.data import Field
    from megatron_run.contracts.schedule import Place
    from megatron_run.contracts.schema import Config
    from megatron_run_engine.runtime import BuildContext

__all__ = ["Bert", "BertOptions"]


class Bert(Model):
    """Builds the chunks of one rank. Rows are padded, or packed, by the field ``documents`` of the data."""

    predicts_next = False

    def __init__(self, context: BuildContext, options: BertOptions) -> None:
        length, choices = context.train.sequence_length, options.choices
        if length % choices:
            raise InputError(
                f"train.sequence_length={length} does not divide into {choices} rows",
                why="a sample holds a row for each choice",
                fix=f"set train.sequence_length to {choices} times the length of a row",
            )
        self._context, self._options = context, options
        self._spec = options.spec(length // choices, context.vocab_size)
        if options.head == "pretraining":
            self.metric_names = ("lm", ORDER_LOSS)
        if options.head == "masked" and TOKEN_TYPES not in context.fields and context.topology.rank == 0:
            context.log.warning(
                "model=bert sees the tokens on both sides of each; a loss on next tokens teaches it to copy. "
                "data=sentence-pairs masks tokens"
            )

    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, Parameter]
    ) -> Chunk:
        """Build the blocks of ``layout[position]``, with the embedding at the first and the head at the last."""
        context, spec, last = self._context, self._spec, len(layout) - 1
        embedding = None
        if position == 0:
            embedding = EncoderEmbedding(context, spec, layers, self._options)
            if self._ties:
                tie_to_word(embedding.word, 0, layout, shared)
        head = self._head(layers, layout, shared) if position == last else None
        return EncoderChunk(context, spec, layers, layout[position].layers, embedding=embedding, head=head)

    def _head(self, layers: ParallelLayers, layout: tuple[Place, ...], shared: dict[str, Parameter]) -> Head:
        context, spec = self._context, self._spec
        if not self._ties:
            return (
                Span(context, spec, layers)
                if self._options.head == "span"
                else Classification(context, spec, layers, self._options)
            )
        made = Pretraining if self._options.head == "pretraining" else MaskedTokens
        head = made(context, spec, layers, shared.get(WORD))
        tie_to_word(head.output, len(layout) - 1, layout, shared)
        return head

    @property
    def _ties(self) -> bool:
        """Whether the head reads the word embedding."""
        return self._options.head in OVER_WORDS

    def fields(self, position: int, layout: tuple[Place, ...]) -> tuple[str | Field, ...]:
        """Return ``tokens`` and what else is embedded for the first position, labels for the last.

        Every position with layers needs ``documents``, where the data has them: no token sees another document's, and
        padding is one.
        """
        first = ("tokens", *first_fields(self._context)) if position == 0 else ()
        layers = attention_fields(self._context, self._spec) if layout[position].layers else ()
        if position < len(layout) - 1:
            return (*first, *layers)
        order = (SWAPPED,) if self._options.head == "pretraining" else ()
        return (*first, *layers, "labels", "loss_mask", *order)

    def counts(self, fields: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The head's count of the mask. The order of sentences is a mean over samples, of which each counts."""
        return {"lm": counted(self._options.head, fields["loss_mask"]).sum()}

    def boundary(self, microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
        """Return the shape of the residual stream, [s, b, h], or [s/t, b, h] with sequence parallelism."""
        rows = self._options.choices
        length = sequence_length // rows // self._context.sequence_shards
        return Boundary((length, rows * micro_batch_size, self._spec.hidden), self._context.dtypes.param)


def check_config(config: Config, options: BertOptions) -> Iterator[str]:
    """Yield nothing. Raises :class:`InputError` for rows that are longer than the model has positions."""
    row = config.train.sequence_length // options.choices
    if options.max_positions is not None and row > options.max_positions:
        raise InputError(
            f"a row of {row} tokens (train.sequence_length) is longer than the model's {options.max_positions} "
            "positions (model.max_positions)",
            fix="lower train.sequence_length, or raise model.max_positions",
        )
    yield from ()


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("model", "bert", options=BertOptions, check_config=check_config)


@hookimpl
def megatron_run_create_model(context: BuildContext, options: BertOptions) -> Model:
    """Make the model; ``options`` come with the vocabulary filled in."""
    return Bert(context, options)
