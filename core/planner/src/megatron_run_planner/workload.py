"""The split of a model over devices, and what of a model's costs follows from it.

Legend: ``s`` sequence, ``b`` micro batch, ``h`` hidden, ``t`` tensor-parallel size, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_run.contracts.costs import AttentionCosts, FeedForwardCosts, LayerCosts, ModelCosts
from megatron_run.contracts.parallel_layer import even_part

#: Rows of the table of words on a rank come in multiples of these.
_ROWS = 128
#: Nothing, the core of the attention, the feed-forward half, or the whole layer: as `train.recompute` has it.
Recompute = Literal["none", "core", "mlp", "full"]
#: How the tokens of a sample meet whose pieces ranks hold: as `parallel-layer.method` has it.
ContextMethod = Literal["ring", "all_gather", "ulysses"]
#: The optimizers between which a split decides, by what data-parallel ranks share out: nothing, state, all.
Optimizer = Literal["adamw", "zero1", "zero3"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)


def gpt2(layers: int, hidden: int, heads: int, sequence: int, vocabulary: int, *, flash: bool = False) -> ModelCosts:
    """The costs of a model of GPT-2's layers, at which layers and tables of steps were measured."""
    attention = AttentionCosts.plain(heads, hidden / heads, flash=flash)
    return ModelCosts((LayerCosts(hidden, sequence, (attention, FeedForwardCosts(4 * hidden))),) * layers, vocabulary)


def gpt2_heads(layer: LayerCosts, *, fused: bool) -> int:
    """The heads of a layer as GPT-2's, 0 of any other; ``fused``: without stored scores."""
    if len(layer.parts) != 2 or not layer.attentions or not layer.feeds:
        return 0
    attention, feed = layer.attentions[0], layer.feeds[0]
    usual = AttentionCosts.plain(attention.heads, attention.head_size, flash=fused, rotary=attention.rotary)
    return attention.heads if attention == usual and feed.matrices == 2 and not feed.experts else 0


def split_over(model: ModelCosts, tensor: int) -> None:
    """Raise :class:`InputError` unless all splits over ``tensor`` ranks, as layers do when they are built."""
    for each in model.divided:
        even_part(each.count, tensor, each.what)


def rows_of_words(vocabulary: int, tensor: int) -> int:
    """Rows of embedding and head over ``tensor`` ranks, padded as layers are built: a multiple of 128 on each."""
    return -(-vocabulary // (_ROWS * tensor)) * _ROWS * tensor


def tables(model: ModelCosts, tensor: int, *, first: bool, last: bool) -> float:
    """Weights of embedding and head on one of ``tensor`` ranks of a stage that is the first, the last or both.

    Rows of words are padded and split; each rank has all learned positions, and whatever else the head has.
    """
    logits = last and model.logits
    copies = 1 if first and logits and model.tied else first + logits
    words = rows_of_words(model.vocabulary, tensor) * model.hidden / tensor * copies
    return words + first * model.positions * model.hidden + last * (model.head_weights + model.other_weights)


@dataclass(frozen=True)
class Lending:
    """The options of ``optimizer=zero3`` that say what is whole for how long."""

    segments_held: int = 2
    reduce: Literal["microbatch", "step"] = "microbatch"
    whole_below: int = 2**16


@dataclass(frozen=True)
class ModelSplit:
    """How a model is split and batched; the names are those of the sections ``parallel`` and ``train``.

    ``method``: how pieces of samples meet. ``scatter_messages``: each tensor rank sends its part of what goes to the
    next stage. ``lending``: options of optimizer ``zero3``. ``on_host``: masters and state are in host memory.
    ``overlap``: gradients are reduced while other backwards still run. ``gradient_bytes``: of a gradient when it is
    reduced. ``one_graph``: the graph capture by which the host launches forwards and backwards of a step at once, empty
    without.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    chunks: int = 1
    data: int = 1
    expert: int = 1
    method: ContextMethod = "ring"
    micro_batch: int = 1
    global_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    scatter_messages: bool = False
    optimizer: Optimizer = "adamw"
    lending: Lending = Lending()
    on_host: bool = False
    overlap: bool = False
    gradient_bytes: int = 2
    one_graph: str = ""

    @property
    def no_graph(self) -> str:
        """The reason why no graph holds a step, empty where one does or none is asked for."""
        if self.one_graph and self.pipeline > 1:
            return "no graph of a step holds a pipeline"
        if self.one_graph == "compile" and self.tensor * self.context > 1:
            return "no graph of a step holds compiled collectives"
        return ""

    @property
    def shards(self) -> bool:
        """Whether each rank updates its share of the weights alone."""
        return self.optimizer != "adamw"

    @property
    def lends(self) -> bool:
        """Whether weights are whole only while a segment needs them."""
        return self.optimizer == "zero3" and self.replicas > 1

    @property
    def ranks(self) -> int:
        """Devices of the run."""
        return self.of_a_stage * self.pipeline

    @property
    def of_a_stage(self) -> int:
        """Devices of a stage, and how far the next one's are from them."""
        return self.tensor * self.context * self.data

    @property
    def replicas(self) -> int:
        """Devices that hold the same weights: those of other samples, and of other pieces of the same."""
        return self.context * self.data

    def expert_stride(self, machine: int) -> int:
        """How far those that hold the same experts would be from each other if each machine had them evenly.

        They are all ranks that share the samples of a copy of the model, and those of every ``expert``-th copy: as many
        are in each ``machine`` of so many devices as there is room for.
        """
        sharing = max(1, min(self.context, machine // self.tensor))
        copies = max(1, machine // (self.tensor * self.context * self.expert))
        return machine // (sharing * copies)

    def rows(self, tokens: float) -> float:
        """The part of a microbatch that a rank has, of so many ``tokens``, or values, of each sample."""
        return self.micro_batch * tokens / self.context

    @property
    def microbatches(self) -> int:
        """Microbatches that one copy of the model runs in a step."""
        return self.global_batch // (self.micro_batch * self.data)


#: A model that is not split.
ONE_RANK = ModelSplit()
