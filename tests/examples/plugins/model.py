"""A network that sees one token at a time: embedding, residual feed-forward layers, output."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from megatron_run.contracts import (
    Boundary,
    BuildContext,
    Chunk,
    ChunkOut,
    Init,
    LinearPart,
    LinearSpec,
    Microbatch,
    Model,
    ParallelLayers,
    Place,
    PluginInfo,
    Segment,
)
from megatron_run.contracts.costs import FeedForwardCosts, LayerCosts, ModelCosts
from megatron_run.hookspecs import hookimpl

INIT = Init("normal", 0.02)


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(4, ge=1, description="feed-forward layers")
    hidden_size: int = Field(32, ge=1, description="features of the residual stream")
    vocab_size: int | None = Field(None, ge=1, description="token ids; unset: the data's")

    def costs(self, sequence_length: int, vocab_size: int) -> ModelCosts:
        feed = FeedForwardCosts(4 * self.hidden_size)
        layer = LayerCosts(self.hidden_size, sequence_length, (feed,), dropout=False, biased=False)
        return ModelCosts((layer,) * self.num_layers, vocab_size, tied=False)


class Block(nn.Module):
    def __init__(self, layers: ParallelLayers, hidden: int) -> None:
        super().__init__()
        self.norm = layers.norm("rmsnorm", hidden)
        self.up = layers.column_linear(LinearSpec(hidden, (LinearPart("up", 4 * hidden),), INIT, bias=False))
        self.down = layers.row_linear(LinearSpec(4 * hidden, hidden, INIT, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        added: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


class Piece(nn.Module):
    """The layers ``indices``, behind the embedding at the first position and before the output at the last."""

    def __init__(
        self,
        context: BuildContext,
        options: Options,
        layers: ParallelLayers,
        indices: range,
        *,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        vocab, hidden = options.vocab_size or 0, options.hidden_size
        self._runner, self._vocab = context.segments, vocab
        self.embedding = layers.vocab_embedding(vocab, hidden, init=INIT) if first else None
        self.layers = nn.ModuleDict({str(index): Block(layers, hidden) for index in indices})
        self.output = layers.output_layer(vocab, hidden, init=INIT) if last else None
        self.cross_entropy = layers.cross_entropy(vocab)
        steps = [("embedding", -1, self.embedding, "tokens", "x")]
        steps += [("mlp", index, self.layers[str(index)], "x", "x") for index in indices]
        steps += [("head", options.num_layers, self.output, "x", "logits")]
        self._segments = tuple(
            Segment(name, layer, 0, module, (source,), (target,), tuple(module.parameters()))
            for name, layer, module, source, target in steps
            if module is not None
        )

    def segments(self) -> Sequence[Segment]:
        return self._segments

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        environment = dict(microbatch.fields) if x is None else {"x": x, **microbatch.fields}
        self._runner.run(self._segments, microbatch, environment)
        if self.output is None:
            return ChunkOut(environment["x"])
        if "labels" not in environment:
            return ChunkOut(None, logits=environment["logits"][..., : self._vocab])
        loss = self.cross_entropy(environment["logits"], environment["labels"])  # [s, b]
        mask = environment["loss_mask"].t()  # [b, s] -> [s, b]
        return ChunkOut(None, losses={"lm": ((loss * mask).sum(), mask.sum())})


class TokenByToken(Model):
    def __init__(self, context: BuildContext, options: Options) -> None:
        self._context, self._options = context, options

    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, Parameter]
    ) -> Chunk:
        first, last = position == 0, position == len(layout) - 1
        return Piece(self._context, self._options, layers, layout[position].layers, first=first, last=last)

    def fields(self, position: int, layout: tuple[Place, ...]) -> tuple[str, ...]:
        first = ("tokens",) if position == 0 else ()
        return first + (("labels", "loss_mask") if position == len(layout) - 1 else ())

    def boundary(self, microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
        length = sequence_length // self._context.sequence_shards  # ranks may split the sequence between layers
        return Boundary((length, micro_batch_size, self._options.hidden_size), self._context.dtypes.param)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("model", "token-by-token", options=Options)


@hookimpl
def megatron_run_create_model(context: BuildContext, options: Options) -> Model:
    return TokenByToken(context, options)
