"""One pipeline stage's chunk of a decoder: the embedding, blocks and head that live there.

Legend: s sequence, b micro batch, h hidden, p padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import AttentionCore, ChunkOut, DecodingChunk, Segment
from megatron_run_engine.nn.attention import Attention, SelfAttention
from megatron_run_engine.nn.block import ExpertBlock, attention_fields, make_block, parameters_of
from megatron_run_engine.nn.norm import norm_of
from megatron_run_engine.nn.rotary import rotaries

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from megatron_run.contracts import Microbatch, ParallelLayers
    from megatron_run.contracts.schema import TrainSection
    from megatron_run_engine.nn.block import Block
    from megatron_run_engine.nn.embedding import Embedding
    from megatron_run_engine.nn.moe.layer import RouterReports
    from megatron_run_engine.nn.moe.router import Router
    from megatron_run_engine.nn.rotary import Rotary
    from megatron_run_engine.nn.spec import TransformerSpec
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.runtime.recompute import Environment


#: Makes the attention of a layer of the model, given the table by which it rotates, if it does.
AttentionMaker = Callable[[int, "Rotary | None"], Attention]


class ForwardPass:
    """A re-entrant guard around ``layers.forward_pass()``: a chunk enters it for its forward.

    Segments enter it too, through :meth:`around`, because they also run outside a chunk's forward: when a graph is
    captured, and when a layer is recomputed in the backward. Without the guard they would silently compute something
    else there, such as products without FP8.
    """

    def __init__(self, layers: ParallelLayers, train: TrainSection) -> None:
        self._train = train
        self._enter: Callable[[], AbstractContextManager[object]] = layers.forward_pass
        self._within = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter the layers' context unless it is entered already."""
        if self._within:
            yield
            return
        self._within = True
        try:
            with self._enter():
                yield
        finally:
            self._within = False

    def around(self, segment: Segment) -> Segment:
        """``segment`` wrapped so that it enters the forward pass itself where no chunk has."""

        def run(*tensors: Any, **decoding: Any) -> Any:
            with self():
                return segment.fn(*tensors, **decoding)

        return replace(segment, fn=run)

    def finish(self, segment: Segment) -> Segment:
        """``segment`` as a chunk runs it: :meth:`around`, recomputed or offloaded where ``train`` wants that."""
        recompute, offload = self._train.recomputes(segment.name), self._train.offloads(segment.name)
        return self.around(replace(segment, recompute=recompute, offload=offload))


class DecoderChunk(nn.Module, DecodingChunk):
    """Runs ``embedding`` if it has one, the blocks ``indices``, and the head if it has an ``output`` layer.

    ``routers`` collects what expert layers report during training; ``attention`` makes that of a layer, by default
    :class:`SelfAttention`. Blocks are named by their global index, so that
    parameter names do not depend on the layout.
    """

    def __init__(
        self,
        context: BuildContext,
        spec: TransformerSpec,
        layers: ParallelLayers,
        indices: range,
        *,
        embedding: Embedding | None = None,
        output: nn.Module | None = None,
        routers: RouterReports | None = None,
        attention: AttentionMaker | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        rotary = rotaries(context, spec, indices)
        make = attention or partial(SelfAttention, context, layers, spec)
        blocks = {index: make_block(context, layers, spec, make(index, rotary.get(index))) for index in indices}
        self.layers = nn.ModuleDict({str(index): block for index, block in blocks.items()})
        self.final_norm = norm_of(layers, spec) if output is not None else None
        self.output, self.logits_scale, self.logits_softcap = output, spec.logits_scale, spec.logits_softcap
        self.cross_entropy = self._make_loss(layers, spec) if output is not None else None

        self.caches = all(AttentionCore.of(block.attention.core).caches for block in blocks.values())
        scaling = spec.rope_scaling
        self.angle_switch = None if scaling is None else scaling.switch(spec.sequence_length)
        self.runner, self._forward_pass, self._routers = context.segments, ForwardPass(layers, context.train), routers
        self._mixed: list[Router] = []
        self.watch_routers(blocks.values())

        self._reads = attention_fields(context, spec)
        # Built once: graph capture recognises a segment by its identity.
        self._embedding_segments = () if embedding is None else (self.finish(embedding.segment()),)
        self._blocks = tuple((tuple(map(self.finish, block.segments())), block.reports) for block in blocks.values())
        to_logits, to_losses = ((), ()) if output is None else self._make_head_segments(spec)
        self._head, self._losses = tuple(map(self.finish, to_logits)), tuple(map(self.finish, to_losses))

    def watch_routers(self, blocks: Iterable[Block]) -> None:
        """Count the choices of those ``blocks`` that have experts; they report in this order."""
        found = [block.moe.router for block in blocks if isinstance(block, ExpertBlock)]
        self._mixed += found
        if self._routers is not None:
            self._routers.watch(found)

    def finish(self, segment: Segment) -> Segment:
        """``segment`` as the chunk runs it, see :meth:`ForwardPass.finish`."""
        return self._forward_pass.finish(segment)

    def segments(self) -> Sequence[Segment]:
        """Every segment in forward order."""
        blocks = (segment for block, _ in self._blocks for segment in block)
        return (*self._embedding_segments, *blocks, *self._losses)

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        """Run forward: x [s, b, h], or None at the first position -> x for the next, losses, or logits [s, b, p/t].

        The last position gives losses when the microbatch has labels and logits when it has none, while texts are
        generated those of the last column alone.
        """
        with self._forward_pass():
            if self.embedding is not None:
                x = self._run_embedding(microbatch)
            assert x is not None  # only the first position starts from tokens
            reported = list[dict[str, Tensor]]()
            for segments, names in self._blocks:
                x, *values = self._run_block(segments, names, x, microbatch)
                reported += [dict(zip(names, values, strict=True))] if names else []
            out = self.run_head(x, microbatch, reported) if self.output is not None else ChunkOut(x)
            if self._routers is None or not microbatch.train:
                return out
            self._routers.count(reported, self._mixed)
            return replace(out, losses={**out.losses, **self._routers.losses(reported)})

    def _run_embedding(self, microbatch: Microbatch) -> Tensor:
        assert self.embedding is not None
        tokens = microbatch.fields["tokens"]
        environment: Environment = {"tokens": tokens, **_fields(self.embedding.reads, microbatch)}
        self.runner.run(self._embedding_segments, microbatch, environment)
        return environment["x"]

    def _run_block(
        self, segments: Sequence[Segment], names: Sequence[str], x: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor, ...]:
        """Run one block: ``x`` for the next one, then this block's reports under ``names``."""
        environment: Environment = {"x": x, **_fields(self._reads, microbatch)}
        self.runner.run(segments, microbatch, environment)
        return environment["x"], *(environment[name] for name in names)

    def run_head(self, x: Tensor, microbatch: Microbatch, reported: list[dict[str, Tensor]]) -> ChunkOut:
        """The stream after the last block [s, b, h] -> losses, or logits [s, b, p/t] without labels.

        A head with blocks of experts adds what they report to ``reported``, in the order of :meth:`watch_routers`.
        """
        if microbatch.decoding is not None and microbatch.decoding.last_only:
            x = x[-1:]
        environment = {"x": x, **microbatch.fields}
        if "labels" not in microbatch.fields:
            self.runner.run(self._head, microbatch, environment)
            return ChunkOut(None, logits=environment["logits"])
        self.runner.run(self._losses, microbatch, environment)
        return ChunkOut(None, losses={"lm": (environment["lm"], environment["lm_weight"])})

    def _make_loss(self, layers: ParallelLayers, spec: TransformerSpec) -> nn.Module:
        if spec.loss_chunks == 1:
            return layers.cross_entropy(spec.vocab, spec.label_smoothing)
        return layers.linear_cross_entropy(spec.vocab, spec.label_smoothing, spec.loss_chunks)

    def _make_head_segments(self, spec: TransformerSpec) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        """The segments from x to logits, and those from x to losses."""
        assert self.final_norm is not None
        assert self.output is not None
        params, layer, losses = parameters_of(self.final_norm, self.output), spec.layers, ("lm", "lm_weight")
        head = Segment("head", layer, 0, self._logits, ("x",), ("logits",), params)
        if spec.loss_chunks > 1:
            inputs = ("x", "labels", "loss_mask")
            return (head,), (Segment("loss", layer, 1, self._loss_in_chunks, inputs, losses, params),)
        loss = Segment("loss", layer, 1, self._loss, ("logits", "labels", "loss_mask"), losses, ())
        return (head,), (head, loss)

    def _logits(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, p/t]."""
        assert self.final_norm is not None
        return self.logits(self.final_norm(x))

    def logits(self, x: Tensor) -> Tensor:
        """The stream after a norm [s, b, h] -> logits [s, b, p/t], scaled and capped."""
        assert self.output is not None
        logits: Tensor = self.output(self._scaled(x))
        cap = self.logits_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _scaled(self, x: Tensor) -> Tensor:
        """The input of the output layer: logits are linear in it, and it is smaller than they are."""
        return x if self.logits_scale == 1 else x * self.logits_scale

    def _loss(self, logits: Tensor, labels: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [s, b, p/t], labels and mask [b, s] -> (summed loss, number of tokens), scalars.

        A sum, not a mean: the trainer divides by the number of tokens (``LossWeights``).
        """
        assert self.cross_entropy is not None
        return _summed(self.cross_entropy(logits, labels), loss_mask)

    def _loss_in_chunks(self, x: Tensor, labels: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`_loss`, of x [s, b, h]: no tensor holds the logits of all tokens."""
        assert self.final_norm is not None
        assert self.output is not None
        assert self.cross_entropy is not None
        x = self._scaled(self.final_norm(x))
        return _summed(self.cross_entropy(x, self.output.weight, labels), loss_mask)


def _fields(names: Sequence[str], microbatch: Microbatch) -> dict[str, Any]:
    """The fields ``names`` of ``microbatch``; None for those that texts do not have while they are generated."""
    return {name: microbatch.fields.get(name) for name in names}


def _summed(loss: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of losses [s, b] where the mask [b, s] is 1, and the number of such tokens."""
    mask = loss_mask.t().to(loss.dtype)  # [b, s] -> [s, b]
    return (loss * mask).sum(), mask.sum()
