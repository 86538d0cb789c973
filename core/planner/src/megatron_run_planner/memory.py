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
from dataclasses import astuple, dataclass, replace

from megatron_run.pipeline.plan import Plan, activations
from megatron_run_planner.workload import Model, Split

#: Bytes of a 16-bit value, and of an fp32 one.
_HALF, _FULL = 2, 4
#: Bytes of a token in a microbatch: itself, its label and its weight in the loss.
_FIELDS = 8 + 8 + 4
#: What the CUDA context, the communicators and the workspaces of libraries take, and the allocator's share.
RESERVED, SLACK = 1.5 * 2**30, 0.03


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank of one stage when a step holds most; ``temporaries`` are those of the running backward."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    communication: float

    @property
    def total(self) -> float:
        """Bytes of all tensors."""
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


def head_activations(model: Model, split: Split) -> float:
    """Bytes that the last stage keeps of one microbatch behind its layers: the final norm's input and output, logits.

    Further predicted tokens have a layer and logits each. A loss in chunks keeps no logits.
    """
    found = 2 * _HALF * _stream(model, split)
    if model.logits and model.loss_chunks == 1:
        found += _logits(model, split)
    if model.predictors:
        block = replace(model.predictor, predictors=0)
        found += model.predictors * (layer_activations(block, split) + head_activations(block, split))
    return found


def _stream(model: Model, split: Split) -> float:
    """Values of the residual stream on a rank."""
    return split.micro_batch * model.sequence * model.hidden / (split.tensor if split.sequence_parallel else 1)


def _logits(model: Model, split: Split) -> float:
    """Bytes of a microbatch's logits, over which the fused loss writes their gradient."""
    return _HALF * split.micro_batch * model.sequence * model.rows_of_words(split.tensor) / split.tensor


def stage_memory(model: Model, split: Split, plan: Plan) -> list[RankMemory]:
    """The memory of a rank of each stage while ``plan`` runs.

    Each stage holds the layers of all (microbatch, chunk) pairs that the plan has in flight there, and what the
    backward of one of them takes for itself.
    """
    places = [[place for place in plan.layout if place.stage == stage] for stage in range(plan.stages)]
    ends = plan.layout[0].stage, plan.layout[-1].stage
    halves = any(action.op == "I" for action in plan.lists[0])
    found = []
    for stage, mine in enumerate(places):
        part = model.part(layer for place in mine for layer in place.layers)
        count = sum(len(place.layers) for place in mine)
        memory = rank_memory(part, split, count, [stage == end for end in ends], 0)
        works = [_Work(0.0, 0.0)] * len(mine)
        for place in mine:
            layers, last = model.part(place.layers), place == plan.layout[-1]
            works[place.chunk] = _work(layers, split, len(place.layers), last=last, halves=halves)
        fields = memory.activations
        kept, taken = _peak(plan, stage, works)
        found.append(replace(memory, activations=fields + kept, temporaries=taken))
    return found


@dataclass(frozen=True)
class _Work:
    """Bytes of one microbatch at a place: ``kept`` until its backward, and ``taken`` by that besides."""

    kept: float
    taken: float


def _work(model: Model, split: Split, layers: float, *, last: bool, halves: bool = False) -> _Work:
    """That of a place with so many ``layers`` like those of ``model``, the ``last`` one or not."""
    kept = layers * layer_activations(model, split)
    kept += head_activations(model, split) if last else 0.0
    return _Work(kept, temporaries(model, split, last=last, halves=halves))


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


def least_memory(model: Model, split: Split) -> RankMemory:
    """No schedule that runs ``split`` needs less on its first stage than this: 1F1B's, one chunk a stage."""
    in_flight = min(split.pipeline, split.microbatches)
    return rank_memory(model, split, model.layers / split.pipeline, [True, split.pipeline == 1], in_flight)


def rank_memory(model: Model, split: Split, layers: float, ends: Sequence[bool], in_flight: float) -> RankMemory:
    """The memory of a rank with ``layers``; ``ends`` say whether it has the embedding, and the head.

    ``in_flight`` counts the microbatches between forward and backward; with none the rank still holds the fields of
    those that it loads.
    """
    dense = layers * model.dense_parameters / split.tensor + model.tables(split.tensor, first=ends[0], last=ends[1])
    experts = layers * model.expert_parameters / split.tensor / split.expert
    if ends[1] and model.predictors:
        block = model.predictor
        dense += model.predictors * (block.dense_parameters + model.predictor_join) / split.tensor
        experts += model.predictors * block.expert_parameters / split.tensor / split.expert
    own = dense / split.data + experts * split.expert / split.data if split.zero1 else dense + experts
    work = _work(model, split, layers, last=ends[1])
    fields = _FIELDS * split.micro_batch * model.tokens * split.microbatches if any(ends) else 0.0
    return RankMemory(
        parameters=_HALF * (dense + experts),
        gradients=_FULL * (dense + experts),
        optimizer=3 * _FULL * own,
        activations=fields + work.kept * in_flight,
        temporaries=work.taken,
        communication=communication(model, split, ends),
    )


def temporaries(model: Model, split: Split, *, last: bool, halves: bool = False) -> float:
    """Bytes that the backward of a microbatch holds beyond what was kept, when that is most.

    In a layer it is the gradient between two products of one half, beside what is recomputed and, under sequence
    parallelism, the gathered gradient of the half's result. The last stage begins with the gradient that leaves the
    logits, and has freed them when it comes to its layers. In ``halves`` a backward leaves to its second one what
    products need for their weights.
    """
    tokens, gathers = split.micro_batch * model.sequence, split.sequence_parallel and split.tensor > 1
    whole = _HALF * tokens * model.hidden
    held = recomputed(model, split) + _widest(model, split, halves=halves) + (whole if gathers else 0.0)
    if not last:
        return held
    stream = _HALF * _stream(model, split)
    freed = 0.0 if halves else head_activations(model, split)
    head = 2 * whole + stream if gathers else whole
    if model.logits and model.loss_chunks > 1:  # a chunk's logits are made while the ones before are still there
        head += 2 * _logits(model, split) / model.loss_chunks
    return max(head, held + stream - freed)


def _widest(model: Model, split: Split, *, halves: bool) -> float:
    """Bytes of the widest gradient inside a layer; of several kinds of layers it is the largest.

    In ``halves`` what the activation made stays until the second one, beside its gradient.
    """
    if len(model.kinds) > 1:
        return max(_widest(kind, split, halves=halves) for _, kind in model.kinds)
    tokens = split.micro_batch * model.sequence
    routed = tokens * max(1, model.top_k) if model.experts else tokens
    feed = routed * model.ffn_width * (model.matrices if halves else model.matrices - 1)
    attention = tokens * (model.qkv_width + model.context_width)
    return _HALF * max(feed, attention) / split.tensor


def recomputed(model: Model, split: Split) -> float:
    """Bytes that a backward holds of the one layer that it recomputes."""
    if split.recompute not in ("mlp", "full"):
        return 0.0
    return layer_activations(model, replace(split, recompute="none")) - layer_activations(model, split)


def communication(model: Model, split: Split, ends: Sequence[bool] = (False, False)) -> float:
    """Bytes of the buffers in which ranks send and receive.

    Stages: a message received and one being sent, forward and backward; the first stage (``ends``) receives nothing
    forward, and the last nothing backward, which then sends at once. A stage of several chunks has one more under way.
    Experts: tokens that leave and that arrive. Gradients and sharded parameters take none: their buckets are parts of
    the flat buffers, reduced and gathered in place.
    """
    whole = _HALF * split.micro_batch * model.tokens * model.hidden
    message = whole / (split.tensor if split.sequence_parallel else 1)
    held = 0.0
    if split.pipeline > 1:
        held = message * (5 if split.chunks > 1 else 4 - ends[0] - 2 * ends[1])
    return held + (2 * whole * model.top_k if split.expert > 1 else 0.0)
