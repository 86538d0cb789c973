"""Bytes of one rank's memory by role, by closed form: state, activations in flight, logits, buffers.

Legend: ``s`` sequence, ``b`` micro batch, ``h`` hidden, ``t`` tensor-parallel size. Activations are those of
Korthikanti et al. 2022, section 4, spelt out by tensor so that grouped heads, gates and attention without stored scores
are covered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate

from megatron_run.pipeline.plan import Plan, activations
from megatron_run_planner.workload import Model, Split

#: Bytes of a 16-bit value, and of an fp32 one.
_HALF, _FULL = 2, 4
#: What the CUDA context, the communicators and the workspaces of libraries take, and the allocator's share.
RESERVED, SLACK = 1.5 * 2**30, 0.03


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank of one stage."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    communication: float

    @property
    def total(self) -> float:
        """All of it, without :data:`RESERVED`."""
        roles: tuple[float, ...] = astuple(self)
        return sum(roles)

    def needed(self) -> float:
        """Bytes of device memory with which a run of it goes."""
        return with_reserve(self.total)


def with_reserve(counted: float) -> float:
    """Bytes of device memory for tensors of ``counted`` bytes."""
    return counted * (1 + SLACK) + RESERVED


def available(memory: float) -> float:
    """Bytes for tensors in a device's ``memory``: the inverse of :func:`with_reserve`."""
    return (memory - RESERVED) / (1 + SLACK)


def layer_activations(model: Model, split: Split) -> float:
    """Bytes that one layer keeps of one microbatch until its backward.

    With full recomputation only the layer's input is kept. Of several kinds of layers it is the mean.
    """
    if len(model.kinds) > 1:
        return sum(share * layer_activations(kind, split) for share, kind in model.kinds)
    t, tokens = split.tensor, split.micro_batch * model.sequence
    whole = tokens * model.hidden / (t if split.sequence_parallel else 1)
    if split.recompute == "full":
        return _HALF * whole
    # Inputs of two norms, of attention and feed-forward layer; masks of two dropouts, a byte each.
    mask = 1 if model.dropout else 0
    kept = (4 * _HALF + 2 * mask) * whole
    kept += _HALF * tokens * (model.qkv_width + model.context_width) / t  # queries, keys, values; the context
    if model.across:  # its norm's input and output and its mask; queries and context; the encoder's keys and values
        kept += (2 * _HALF + mask) * whole
        kept += 2 * _HALF * (tokens + split.micro_batch * model.across) * model.context_width / t
    if model.rotary:
        kept += _HALF * tokens * (model.qkv_width - (model.kv_heads or model.heads) * model.head_size) / t
    if split.recompute == "mlp":
        kept -= (_HALF + mask) * whole  # of that half its input alone
    else:
        routed = tokens * max(1, model.top_k) if model.experts else tokens
        kept += (
            _HALF * routed * model.ffn_width * (model.matrices + model.keeps_gate) / t
        )  # what the activation reads and writes
        kept += 2 * _HALF * routed * model.hidden if model.experts else 0  # copies for experts, and what comes back
        kept += _HALF * tokens * model.shared_ffn * model.matrices / t if model.experts else 0
    if not model.flash and split.recompute != "core":
        kept += 5 * split.micro_batch * model.heads * model.sequence**2 / t  # scores, their dropout and its mask
    return kept


def stage_memory(model: Model, split: Split, plan: Plan) -> list[RankMemory]:
    """The memory of a rank of each stage while ``plan`` runs.

    Each stage holds the layers of all (microbatch, chunk) pairs that the plan has in flight there; a backward also
    holds what it recomputes of one layer.
    """
    places = [[place for place in plan.layout if place.stage == stage] for stage in range(plan.stages)]
    ends = plan.layout[0].stage, plan.layout[-1].stage
    found = []
    for stage, mine in enumerate(places):
        part = model.part(layer for place in mine for layer in place.layers)
        count = sum(len(place.layers) for place in mine)
        memory = rank_memory(part, split, count, [stage == end for end in ends], 0)
        kept = _in_flight(plan, stage, {each.chunk: _place_activations(model, split, each.layers) for each in mine})
        found.append(replace(memory, activations=memory.activations + kept))
    return found


def _place_activations(model: Model, split: Split, layers: range) -> float:
    return len(layers) * layer_activations(model.part(layers), split)


def _in_flight(plan: Plan, stage: int, kept: Mapping[int, float]) -> float:
    """The most bytes of all microbatches between forward and backward, of which each chunk has ``kept``."""
    if len({*kept.values()}) == 1:
        return plan.peak_held[stage] * kept[0]
    actions = plan.lists[stage]
    changes = activations(actions, "BW")
    return max(accumulate(change * kept[a.chunk] for change, a in zip(changes, actions, strict=True)))


def least_memory(model: Model, split: Split) -> RankMemory:
    """No schedule that runs ``split`` needs less on its first stage than this: 1F1B's, one chunk a stage."""
    layers = model.layers / split.pipeline
    in_flight = min(split.pipeline, split.microbatches)
    return rank_memory(model, split, layers, [True, split.pipeline == 1], in_flight * layers)


def rank_memory(model: Model, split: Split, layers: float, ends: Sequence[bool], layers_in_flight: float) -> RankMemory:
    """The memory of a rank with ``layers``; ``ends`` say whether it has the embedding, and the head.

    ``layers_in_flight`` counts the layers of all microbatches between forward and backward.
    """
    table = model.vocabulary * model.hidden / split.tensor
    shared = ends[0] and ends[1] and model.tied
    dense = layers * model.dense_parameters / split.tensor + table * (1 if shared else sum(ends))
    experts = layers * model.expert_parameters / split.tensor / split.expert
    if ends[1] and model.predictors:
        block = model.predictor
        dense += model.predictors * (block.dense_parameters + model.predictor_join) / split.tensor
        experts += model.predictors * block.expert_parameters / split.tensor / split.expert
    own = dense / split.data + experts * split.expert / split.data if split.zero1 else dense + experts
    layer = layer_activations(model, split)
    tokens = split.micro_batch * model.sequence
    # Logits, their fp32 copy, and the gradient of the logits.
    logits = (2 * _HALF + _FULL) * tokens * model.vocabulary / split.tensor if ends[1] and model.logits else 0.0
    return RankMemory(
        parameters=_HALF * (dense + experts),
        gradients=_FULL * (dense + experts),
        optimizer=3 * _FULL * own,
        activations=layer * layers_in_flight + recomputed(model, split),
        logits=logits,
        communication=communication(model, split),
    )


def recomputed(model: Model, split: Split) -> float:
    """Bytes that a backward holds of the one layer that it recomputes."""
    if split.recompute not in ("mlp", "full"):
        return 0.0
    return layer_activations(model, replace(split, recompute="none")) - layer_activations(model, split)


def communication(model: Model, split: Split) -> float:
    """Bytes of the buffers in which ranks send and receive.

    Stages: a message received and one being sent, forward and backward. Sequence parallelism: the input of a product
    gathered from the tensor ranks, and the gradient before it is scattered. Experts: tokens that leave and that arrive.
    Gradients and sharded parameters take none: their buckets are parts of the flat buffers, reduced and gathered in
    place.
    """
    whole = _HALF * split.micro_batch * model.tokens * model.hidden
    message = whole / (split.tensor if split.sequence_parallel else 1)
    held = 4 * message if split.pipeline > 1 else 0.0
    held += 2 * whole if split.sequence_parallel and split.tensor > 1 else 0.0
    return held + (2 * whole * model.top_k if split.expert > 1 else 0.0)
