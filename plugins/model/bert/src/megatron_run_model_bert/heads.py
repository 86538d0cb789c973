"""From the encoder's output to losses: masked tokens, the order of sentences, classes, choices and spans.

The labels of fine-tuning lie where those of tokens do: of a class or choice in the first label of a sample, of a span
in the first two, its first and last token. So the loss mask counts samples, and every loss is the run's ``lm``.

Legend: s tokens of a row, b rows of a microbatch, c choices of a sample, h hidden, p padded vocabulary, t
tensor-parallel size, k classes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import Init, ParameterSpec, Part, Segment
from megatron_run.contracts.data import Field
from megatron_run_engine.nn import ReplicatedLinear, activation, empty_parameter, parameters_of
from megatron_run_engine.nn.parallel import ReplicatedDropout

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import ParallelLayers
    from megatron_run_engine.nn import TransformerSpec
    from megatron_run_engine.runtime import BuildContext
    from megatron_run_model_bert.options import BertOptions

#: 1 where the second sentence of a sample came first in its document; one a sample.
SWAPPED = Field("swapped", shape=())
#: The name under which the sentence-order loss is reported.
ORDER_LOSS = "model/order_loss"

Segments = tuple[Segment, ...]


class _Share(torch.autograd.Function):
    """The identity, whose backward divides by ``ranks``: each of them has the whole gradient, and they are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.ranks, None


class Head(nn.Module):
    """The last layers of a model, run after ``final_norm`` where the blocks have their norms before them.

    ``losses`` names what it reports; each lies in the environment, and beside it ``<name>_weight``.
    """

    losses: tuple[str, ...] = ("lm",)

    def __init__(self, context: BuildContext, spec: TransformerSpec, layers: ParallelLayers) -> None:
        super().__init__()
        self.context, self.spec, self.layers = context, spec, (layers,)  # a tuple: a factory is not a child
        self.final_norm = layers.norm(spec.norm, spec.hidden, spec.norm_eps) if spec.norm_placement == "pre" else None

    @abstractmethod
    def segments(self) -> tuple[Segments, Segments]:
        """The segments from x to ``logits``, and those from x to the losses."""

    def segment(
        self,
        name: str,
        index: int,
        fn: Any,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        *read: nn.Module,
        draws: bool = False,
    ) -> Segment:
        """A segment of this head, the layer after the last; ``read`` are the modules whose parameters it reads."""
        return Segment(name, self.spec.layers, index, fn, inputs, outputs, parameters_of(*read), draws=draws)

    def normalised(self) -> Segments:
        """The segment of ``final_norm``, if there is one."""
        if self.final_norm is None:
            return ()
        return (self.segment("final_norm", 0, self.final_norm, ("x",), ("x",), self.final_norm),)

    def everywhere(self, x: Tensor) -> Tensor:
        """Give every tensor-parallel rank all of x [s/t, *] -> [s, *].

        What the ranks then compute is the same on each, so each has the whole gradient, of x and of parameters.
        """
        shared: Tensor = _Share.apply(self.layers[0].enter_region(x), self.context.topology.sizes.tensor)  # type: ignore[no-untyped-call]  # torch's
        return shared


class MaskedTokens(Head):
    """Logits of all tokens by a transformed x and the word embedding, and the loss of those that were masked.

    ``gelu(dense(x))``, a norm, the tied output layer and a bias per word (Devlin et al. 2018, appendix A).
    """

    def __init__(
        self,
        context: BuildContext,
        spec: TransformerSpec,
        layers: ParallelLayers,
        embedding: Parameter | None,
    ) -> None:
        super().__init__(context, spec, layers)
        self.dense = ReplicatedLinear(context, spec.hidden, spec.hidden, spec.init, bias=True)
        self.activation = activation(spec.activation)
        self.norm = layers.norm(spec.norm, spec.hidden, spec.norm_eps)
        self.output = layers.output_layer(spec.vocab, spec.hidden, init=spec.init, weight=embedding)
        self.bias = WordBias(context, spec.vocab, self.output)
        self.cross_entropy = layers.cross_entropy(spec.vocab)

    def segments(self) -> tuple[Segments, Segments]:
        """The head and the loss, which reads no parameter."""
        read = (self.dense, self.norm, self.output, self.bias)
        head = self.segment("head", 1, self._logits, ("x",), ("logits",), *read)
        loss = self.segment("loss", 2, self._loss, ("logits", "labels", "loss_mask"), ("lm", "lm_weight"))
        first = (*self.normalised(), head)
        return first, (*first, loss)

    def _logits(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, p/t]."""
        logits: Tensor = self.bias(self.output(self.norm(self.activation(self.dense(x)))))
        return logits

    def _loss(self, logits: Tensor, labels: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [s, b, p/t], labels and mask [b, s] -> summed loss, and the number of tokens that count."""
        loss = self.cross_entropy(logits, labels)  # [s, b]
        mask = loss_mask.t().to(loss.dtype)
        return (loss * mask).sum(), mask.sum()


class WordBias(nn.Module):
    """A bias per word, split and padded as the rows of the ``output`` layer."""

    def __init__(self, context: BuildContext, vocab: int, output: Any) -> None:
        super().__init__()
        rows, spec = len(output.weight), output.parameter_specs["weight"]
        self.weight = empty_parameter(context, rows)
        parts = tuple(Part("weight", (vocab,), part.local, start=part.start) for part in spec.parts)
        self.parameter_specs = {"weight": ParameterSpec(Init("zeros"), parts, decay=False)}

    def forward(self, logits: Tensor) -> Tensor:
        """[s, b, p/t] -> [s, b, p/t]."""
        return logits + self.weight


class Pooler(nn.Module):
    """``tanh(dense(x))`` of a row's first token (Devlin et al. 2018), then dropout.

    Every tensor-parallel rank computes all of it, also under sequence parallelism, where the dropout of the layers
    draws for each rank's own tokens: here one mask must do for all.
    """

    def __init__(self, head: Head) -> None:
        super().__init__()
        spec, context = head.spec, head.context
        self.everywhere = head.everywhere
        self.dense = ReplicatedLinear(context, spec.hidden, spec.hidden, spec.init, bias=True, on_parts=False)
        split = context.sequence_shards > 1
        self.dropout = ReplicatedDropout(spec.dropout, context.rng) if split else head.layers[0].dropout(spec.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[s/t, b, h] -> [b, h], the same on every tensor-parallel rank."""
        first = self.everywhere(x[:1])[0]  # of each rank's part; row 0 is the first rank's
        pooled: Tensor = self.dropout(torch.tanh(self.dense(first)))
        return pooled


class Pretraining(MaskedTokens):
    """Masked tokens, and which of two sentences came first (Lan et al. 2019, section 3.1)."""

    losses = ("lm", ORDER_LOSS)

    def __init__(
        self, context: BuildContext, spec: TransformerSpec, layers: ParallelLayers, embedding: Parameter | None
    ) -> None:
        super().__init__(context, spec, layers, embedding)
        self.pooler = Pooler(self)
        self.order = ReplicatedLinear(context, spec.hidden, 2, spec.init, bias=True, on_parts=False)

    def segments(self) -> tuple[Segments, Segments]:
        """Those of masked tokens, and one for the order."""
        to_logits, to_losses = super().segments()
        outputs = (ORDER_LOSS, f"{ORDER_LOSS}_weight")
        order = self.segment(
            "order", 3, self._order, ("x", SWAPPED.name), outputs, self.pooler, self.order, draws=self.spec.dropout > 0
        )
        return to_logits, (*to_losses, order)

    def _order(self, x: Tensor, swapped: Tensor) -> tuple[Tensor, Tensor]:
        """X [s, b, h], swapped [b] -> the mean loss of the microbatch's samples, and 1."""
        loss = F.cross_entropy(_wide(self.order(self.pooler(x))), swapped)
        return loss, torch.ones_like(loss)


class Classification(Head):
    """The class of a row, or the choice among a sample's rows, from the pooled first token."""

    def __init__(
        self, context: BuildContext, spec: TransformerSpec, layers: ParallelLayers, options: BertOptions
    ) -> None:
        super().__init__(context, spec, layers)
        self.choices = options.choices
        self.pooler, outputs = Pooler(self), options.classes if options.head == "classification" else 1
        self.classes = ReplicatedLinear(context, spec.hidden, outputs, spec.init, bias=True, on_parts=False)

    def segments(self) -> tuple[Segments, Segments]:
        """The head and its loss."""
        head = self.segment(
            "head", 1, self._logits, ("x",), ("logits",), self.pooler, self.classes, draws=self.spec.dropout > 0
        )
        loss = self.segment("loss", 2, self._loss, ("logits", "labels", "loss_mask"), ("lm", "lm_weight"))
        first = (*self.normalised(), head)
        return first, (*first, loss)

    def _logits(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [1, b, k], or [1, b/c, c] of choices."""
        logits: Tensor = self.classes(self.pooler(x))
        return logits.view(1, -1, self.choices) if self.choices > 1 else logits[None]

    def _loss(self, logits: Tensor, labels: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [1, b, k], labels and mask [b, s] -> summed loss, and the number of samples."""
        loss = F.cross_entropy(_wide(logits[0]), labels[:, 0], reduction="none")
        mask = counted("classification", loss_mask)[:, 0].to(loss.dtype)
        return (loss * mask).sum(), mask.sum()


class Span(Head):
    """The first and the last token of an answer, each a class among the row's tokens (Devlin et al. 2018, 4.2)."""

    def __init__(self, context: BuildContext, spec: TransformerSpec, layers: ParallelLayers) -> None:
        super().__init__(context, spec, layers)
        self.ends = ReplicatedLinear(context, spec.hidden, 2, spec.init, bias=True)

    def segments(self) -> tuple[Segments, Segments]:
        """The head and its loss."""
        head = self.segment("head", 1, self._logits, ("x",), ("logits",), self.ends)
        loss = self.segment("loss", 2, self._loss, ("logits", "labels", "loss_mask"), ("lm", "lm_weight"))
        first = (*self.normalised(), head)
        return first, (*first, loss)

    def _logits(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, 2]."""
        return self.everywhere(self.ends(x))

    def _loss(self, logits: Tensor, labels: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [s, b, 2], labels and mask [b, s] -> loss summed over both ends, and the number of ends."""
        ends = _wide(logits).permute(1, 0, 2)  # [b, s, 2]
        loss = F.cross_entropy(ends, labels[:, :2], reduction="none")  # [b, 2]
        mask = counted("span", loss_mask).to(loss.dtype)
        return (loss * mask).sum(), mask.sum()


def counted(head: str, loss_mask: Tensor) -> Tensor:
    """The mask [b, s] as the loss of ``head`` reads it: a sample's class, both ends of its span, or all tokens."""
    return loss_mask[:, : {"classification": 1, "choice": 1, "span": 2}.get(head)]


def _wide(logits: Tensor) -> Tensor:
    """Logits in at least fp32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
