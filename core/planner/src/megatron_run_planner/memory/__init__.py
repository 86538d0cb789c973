"""Bytes of one rank's memory by role, by closed form: state, activations in flight, temporaries, messages.

It counts what ``--dry-run`` counts in the layers themselves: the most bytes of tensors that live at once, which is what
``torch.cuda.max_memory_allocated`` tells, on a GPU, in 16 bits, with the fused loss. The
device must hold a reserve beside them (:func:`with_reserve`).

Legend: ``s`` sequence, ``b`` micro batch, ``h`` hidden, ``t`` tensor-parallel size. Activations are those of
Korthikanti et al. 2022, section 4, spelt out by tensor so that grouped heads, gates and attention without stored scores
are covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_run.contracts.costs import (
    AttentionCosts,
    FeedForwardCosts,
    LayerCosts,
    LayerKinds,
    ModelCosts,
    Part,
    SegmentCosts,
)
from megatron_run.pipeline.plan import Plan, activations
from megatron_run_planner import split_samples
from megatron_run_planner.memory.lent import lent
from megatron_run_planner.workload import ModelSplit, rows_of_words, tables

#: Bytes of a 16-bit value, and of an fp32 one.
_HALF, _FULL = 2, 4
#: Bytes of a token in a microbatch: itself, its label and its weight in the loss.
_FIELDS = 8 + 8 + 4
#: What the CUDA context, the communicators and the workspaces of libraries take, and the allocator's share.
RESERVED, SLACK = 1.5 * 2**30, 0.03


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank of one stage when a step holds most; ``temporaries`` are those of the running backward.

    ``lent`` are weights and gradients that are whole only while a segment needs them.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    communication: float
    lent: float = 0.0

    @property
    def state(self) -> float:
        """Bytes that each weight adds, whatever runs."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Bytes of all tensors."""
        return float(sum(vars(self).values()))

    def needed(self) -> float:
        """Bytes of device memory with which a run of it goes."""
        return with_reserve(self.total)


def with_reserve(counted: float) -> float:
    """Bytes of device memory for tensors of ``counted`` bytes."""
    return counted * (1 + SLACK) + RESERVED


def available(memory: float) -> float:
    """Bytes for tensors in a device's ``memory``: the inverse of :func:`with_reserve`."""
    return (memory - RESERVED) / (1 + SLACK)


def layer_activations(layer: LayerCosts, split: ModelSplit) -> float:
    """Bytes that one layer keeps of one microbatch until its backward.

    With full recomputation only the layer's input is kept.
    """
    t, tokens = split.tensor, split.rows(layer.tokens)
    whole = tokens * layer.hidden / (t if split.sequence_parallel else 1)
    if split.recompute == "full":
        return _HALF * whole
    # Of each part, the inputs of its norm and of its products, and the mask of a dropout, a byte each.
    mask = 1 if layer.dropout else 0
    kept = len(layer.parts) * (2 * _HALF + mask) * whole
    for part in layer.parts:
        if isinstance(part, FeedForwardCosts) and split.recompute == "mlp":
            kept -= (_HALF + mask) * whole  # of that part its input alone
            continue
        kept += _HALF * split.rows(part.saved(layer.hidden, layer.tokens)) / t
        if isinstance(part, FeedForwardCosts):
            kept += _HALF * split.rows(part.copied(layer.hidden, layer.tokens))
        if isinstance(part, AttentionCosts) and not (part.flash or part.across) and split.recompute != "core":
            kept += 5 * tokens * part.heads * layer.tokens / t  # scores, their dropout and its mask
    return kept + split_samples.kept(layer, split)


def head_activations(model: ModelCosts, split: ModelSplit) -> float:
    """Bytes that the last stage keeps of one microbatch behind its layers: the final norm's input and output, logits.

    Further predicted tokens have a layer and logits each. A loss in chunks keeps no logits.
    """
    head = 2 * _HALF * _stream(model, split)
    if model.logits and model.loss_chunks == 1:
        head += _logits(model, split)
    return head + model.predictors * (layer_activations(model.layers[-1], split) + head)


def _stream(model: ModelCosts, split: ModelSplit) -> float:
    """Values of the residual stream on a rank."""
    return split.rows(model.sequence) * model.hidden / (split.tensor if split.sequence_parallel else 1)


def _logits(model: ModelCosts, split: ModelSplit) -> float:
    """Bytes of a microbatch's logits, over which the fused loss writes their gradient."""
    return _HALF * split.rows(model.sequence) * rows_of_words(model.vocabulary, split.tensor) / split.tensor


def stage_memory(model: ModelCosts, split: ModelSplit, plan: Plan) -> list[RankMemory]:
    """The memory of a rank of each stage while ``plan`` runs.

    Each stage holds the layers of all (microbatch, chunk) pairs that the plan has in flight there, and what the
    backward of one of them takes for itself.
    """
    places = [[place for place in plan.layout if place.stage == stage] for stage in range(plan.stages)]
    ends = plan.layout[0].stage, plan.layout[-1].stage
    halves = any(action.op == "I" for action in plan.lists[0])
    found = []
    for stage, held in enumerate(places):
        layers = model.part(*(place.layers for place in held))
        memory = rank_memory(model, split, layers, [stage == end for end in ends], 0)
        works = [_Work(0.0, 0.0)] * len(held)
        for place in held:
            last = place == plan.layout[-1]
            works[place.chunk] = _work(model, split, model.part(place.layers), last=last, halves=halves)
        fields = memory.activations
        kept, taken = _peak(plan, stage, works)
        found.append(replace(memory, activations=fields + kept, temporaries=taken))
    return found


@dataclass(frozen=True)
class _Work:
    """Bytes of one microbatch at a place: ``kept`` until its backward, and ``taken`` by that besides."""

    kept: float
    taken: float


def _work(model: ModelCosts, split: ModelSplit, layers: LayerKinds, *, last: bool, halves: bool = False) -> _Work:
    """That of a place with these ``layers`` of ``model``, the ``last`` one or not."""
    kept = layers.sum(partial(layer_activations, split=split))
    kept += head_activations(model, split) if last else 0.0
    return _Work(kept, temporaries(model, split, layers, last=last, halves=halves))


def _peak(plan: Plan, stage: int, works: Sequence[_Work]) -> tuple[float, float]:
    """Bytes kept and taken at the peak of ``stage``: when a backward begins."""
    if len(works) == 1:
        return plan.peak_held[stage] * works[0].kept, works[0].taken
    actions, held = plan.lists[stage], 0.0
    best = 0.0, 0.0
    for action, change in zip(actions, activations(actions, "BW"), strict=True):
        work = works[action.chunk]
        if action.op in "BI":
            best = max(best, (held, work.taken), key=sum)
        held += change * work.kept
    return best


def least_memory(model: ModelCosts, split: ModelSplit) -> RankMemory:
    """No schedule that runs ``split`` needs less on its first stage than this: 1F1B's, one chunk a stage."""
    in_flight = min(split.pipeline, split.microbatches)
    return rank_memory(model, split, model.kinds.over(split.pipeline), [True, split.pipeline == 1], in_flight)


def rank_memory(
    model: ModelCosts, split: ModelSplit, layers: LayerKinds, ends: Sequence[bool], in_flight: float
) -> RankMemory:
    """The memory of a rank with these ``layers`` of ``model``; ``ends`` say whether it has the embedding, and the head.

    What is lent but whole until the update counts among parameters and gradients, beside the rank's share.
    ``in_flight`` counts the microbatches between forward and backward; with none the rank still holds the fields of
    those that it loads.
    """
    dense = layers.weights / split.tensor + tables(model, split.tensor, first=ends[0], last=ends[1])
    experts = layers.expert_weights / split.tensor / split.expert
    if ends[1] and model.predictors:
        dense += model.predictors * model.predictor_weights / split.tensor
        experts += model.predictors * model.layers[-1].expert_weights / split.tensor / split.expert
    own = dense / split.replicas + experts * split.expert / split.replicas if split.shards else dense + experts
    work, loan = _work(model, split, layers, last=ends[1]), lent(model, split, layers, ends)
    fields = _FIELDS * split.rows(model.tokens) * split.microbatches if any(ends) else 0.0
    return RankMemory(
        parameters=_HALF * (dense + experts) - loan.parameters,
        gradients=_FULL * (dense + experts) - loan.gradients,
        optimizer=0.0 if split.on_host else 3 * _FULL * own,
        activations=fields + work.kept * in_flight,
        temporaries=work.taken,
        communication=communication(model, split, layers, ends),
        lent=loan.passing,
    )


def temporaries(model: ModelCosts, split: ModelSplit, layers: LayerKinds, *, last: bool, halves: bool = False) -> float:
    """Bytes that the backward of a microbatch at a place of ``layers`` holds beyond what was kept, when that is most.

    In a layer it is the gradient between two products of one half, beside what is recomputed and, under sequence
    parallelism, the gathered gradient of the half's result. The last stage begins with the gradient that leaves the
    logits, and has freed them when it comes to its layers. In ``halves`` a backward leaves to its second one what
    products need for their weights.
    """
    gathers = split.sequence_parallel and split.tensor > 1
    gathered = _HALF * split.rows(max((layer.tokens * layer.hidden for layer in layers.layers), default=0))
    whole, stream = _HALF * split.rows(model.sequence * model.hidden), _HALF * _stream(model, split)
    inside = _widest(layers, split, halves=halves) + (gathered if gathers else 0.0) + (stream if last else 0.0)
    held = recomputed(layers, split) + max(inside, stream + _attention(layers, split, halves=halves))
    if not last:
        return held
    freed = 0.0 if halves else head_activations(model, split)
    head = 2 * whole + stream if gathers else whole
    if model.logits and model.loss_chunks > 1:  # a chunk's logits are made while the ones before are still there
        head += 2 * _logits(model, split) / model.loss_chunks
    return max(head, held - freed)


def _widest(layers: LayerKinds, split: ModelSplit, *, halves: bool) -> float:
    """Bytes of the widest gradient inside a layer; of several kinds of layers it is the largest, 0 without any.

    In ``halves`` what the activation made stays until the second one, beside its gradient.
    """

    def width(part: Part) -> float:
        match part:
            case AttentionCosts():
                return 0.0 if part.across else part.columns + part.context
            case FeedForwardCosts():
                return part.routed * part.features * (part.matrices if halves else part.matrices - 1)
            case SegmentCosts():
                return float(max((outputs for _, outputs in part.products), default=0))

    widest = max((layer.tokens * width(part) for layer in layers.layers for part in layer.parts), default=0.0)
    return _HALF * split.rows(widest) / split.tensor


def _attention(layers: LayerKinds, split: ModelSplit, *, halves: bool) -> float:
    """Bytes of the attention to pieces of other ranks, at most, beyond those of the parts behind it, freed by then.

    In ``halves`` as much stays of those for their weights.
    """
    whole = split if split.recompute == "none" else replace(split, recompute="none")

    def beyond(layer: LayerCosts) -> float:
        behind = tuple(part for part in layer.parts if not isinstance(part, AttentionCosts))
        freed = 0.0 if halves else layer_activations(replace(layer, parts=behind), whole)
        return split_samples.taken(layer, split) - freed

    return max(map(beyond, layers.layers), default=0.0)


def recomputed(layers: LayerKinds, split: ModelSplit) -> float:
    """Bytes that a backward holds of the one of ``layers`` that it recomputes, on average."""
    if split.recompute not in ("mlp", "full"):
        return 0.0
    whole = partial(layer_activations, split=replace(split, recompute="none"))
    kept = partial(layer_activations, split=split)
    return layers.mean(whole) - layers.mean(kept)


def communication(
    model: ModelCosts, split: ModelSplit, layers: LayerKinds, ends: Sequence[bool] = (False, False)
) -> float:
    """Bytes of the buffers in which ranks send and receive.

    Stages: a message received and one being sent, forward and backward; the first stage (``ends``) receives nothing
    forward, and the last nothing backward, which then sends at once. A stage of several chunks has one more under way.
    Experts: tokens that leave and that arrive. Gradients and sharded parameters take none: their buckets are parts of
    the flat buffers, reduced and gathered in place.
    """
    whole = _HALF * split.rows(model.tokens * model.hidden)
    message = whole / (split.tensor if split.sequence_parallel else 1)
    held = 0.0
    if split.pipeline > 1:
        held = message * (5 if split.chunks > 1 else 4 - ends[0] - 2 * ends[1])
    return held + (2 * whole * _chosen(layers) if split.expert > 1 else 0.0)


def _chosen(layers: LayerKinds) -> int:
    """Experts that a token chooses."""
    return max((part.top_k for layer in layers.layers for part in layer.feeds), default=0)
