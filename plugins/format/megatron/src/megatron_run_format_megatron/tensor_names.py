"""From Megatron's tensors to ours: names, and how ours are cut out of their layouts.

Legend: t tensor-parallel ranks of the source, g key-value heads (groups), q queries of a group, d head size, h hidden,
f feed-forward size.

A rank of Megatron holds rows of query, key and value group by group, [g/t, (q + 2) d, h], and for a gated layer its
part of the gate followed by its part of the up projection, [2, f/t, h]. A split tensor comes as one piece a rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from megatron_run.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import ReadTensor

#: The pieces of a tensor on the tensor-parallel ranks, in their order; a single one where it was saved whole.
Pieces = Sequence["ReadTensor"]


@dataclass(frozen=True)
class Network:
    """The causes of layouts. ``vocab``: unpadded; ``gated``: SwiGLU; ``centred``: norm weights are stored minus 1."""

    groups: int
    queries: int
    vocab: int
    gated: bool
    experts: int
    centred: bool


Cut = Callable[[Network, Pieces], "Tensor"]
#: Our tensors that one of Megatron's becomes: the name of each, and how it is cut out.
Counterparts = tuple[tuple[str, Cut], ...]


def whole(_: Network, pieces: Pieces) -> Tensor:
    """Replicated: every rank holds the whole tensor."""
    return pieces[0]().float()


def norm(network: Network, pieces: Pieces) -> Tensor:
    """The weight of a norm, which may be stored minus 1."""
    return whole(network, pieces) + 1 if network.centred else whole(network, pieces)


def rows(_: Network, pieces: Pieces) -> Tensor:
    """[o/t, ...] of each rank -> [o, ...]."""
    return torch.cat([read().float() for read in pieces])


def columns(_: Network, pieces: Pieces) -> Tensor:
    """[o, i/t] of each rank -> [o, i]."""
    return torch.cat([read().float() for read in pieces], dim=1)


def vocabulary(network: Network, pieces: Pieces) -> Tensor:
    """[padded vocabulary / t, h] of each rank -> [vocabulary, h]."""
    return rows(network, pieces)[: network.vocab]


def projection(index: int, network: Network, pieces: Pieces) -> Tensor:
    """Query (0), key (1) or value (2) out of groups: [g/t * (q + 2) * d, ...] of each rank -> [g * q * d, ...]."""
    parts = (network.groups, network.queries + 2, -1)
    grouped: Tensor = rows(network, pieces).unflatten(0, parts)  # [g, q + 2, d, ...]
    first, stop = ((0, network.queries), (network.queries, -1), (-1, None))[index]
    return grouped[:, first:stop].flatten(0, 2)


def half(index: int, _: Network, pieces: Pieces) -> Tensor:
    """The gate (0) or the up projection (1) of a gated layer: [2 * f/t, ...] of each rank -> [f, ...]."""
    return torch.cat([read().float().chunk(2)[index] for read in pieces])


def _feed_forward(prefix: str, into: str, out: str, *, gated: bool) -> dict[str, Counterparts]:
    """The two layers of a feed-forward network: ours are called ``into`` and ``out``."""
    found: dict[str, Counterparts] = {
        f"{prefix}.linear_fc2.weight": ((f"{out}.weight", columns),),
        f"{prefix}.linear_fc2.bias": ((f"{out}.bias", whole),),
    }
    for kind in ("weight", "bias"):
        gate, up = f"{into}.gate.{kind}", f"{into}.up.{kind}"
        halves = ((gate, partial(half, 0)), (up, partial(half, 1)))
        found[f"{prefix}.linear_fc1.{kind}"] = halves if gated else ((up, rows),)
        found |= {f"{prefix}.linear_fc1.{kind}_w": ((gate, rows),), f"{prefix}.linear_fc1.{kind}_v": ((up, rows),)}
    return found


def _layer_table(*, gated: bool, experts: range) -> dict[str, Counterparts]:
    """The tensors of one layer. Norms have names of their own, or those of the layer that they are fused with."""
    attention, mlp = "self_attention.linear_qkv", "moe" if experts else "mlp.input"
    found: dict[str, Counterparts] = {
        "self_attention.linear_proj.weight": (("attention.output.weight", columns),),
        "self_attention.linear_proj.bias": (("attention.output.bias", whole),),
    }
    norms = {"input_layernorm.": "attention.qkv", f"{attention}.layer_norm_": "attention.qkv"}
    norms |= {"pre_mlp_layernorm.": mlp, "mlp.linear_fc1.layer_norm_": mlp}
    for foreign, logical in norms.items():
        found[f"{foreign}weight"] = ((f"{logical}.norm.weight", norm),)
        found[f"{foreign}bias"] = ((f"{logical}.norm.bias", whole),)
    for kind in ("weight", "bias"):
        parts = enumerate(("query", "key", "value"))
        found[f"{attention}.{kind}"] = tuple(
            (f"attention.qkv.{name}.{kind}", partial(projection, index)) for index, name in parts
        )
    for part in ("query", "key"):
        foreign, logical = f"self_attention.{part[0]}_layernorm", f"attention.qk_norm.{part}"
        found |= {f"{foreign}.weight": ((f"{logical}.weight", norm),), f"{foreign}.bias": ((f"{logical}.bias", whole),)}
    if not experts:
        return found | _feed_forward("mlp", "mlp.input", "mlp.output", gated=gated)
    found["mlp.router.weight"] = (("moe.router.weight", whole),)
    found["mlp.router.expert_bias"] = (("moe.router.expert_bias", whole),)
    found["mlp.shared_experts.gate_weight"] = (("moe.shared.gate.weight", whole),)
    found |= _feed_forward("mlp.shared_experts", "moe.shared.mlp.input", "moe.shared.mlp.output", gated=gated)
    for expert in experts:
        into, out = (f"moe.experts.{side}.{expert}" for side in ("input", "output"))
        found |= _feed_forward(f"mlp.experts.{expert}", into, out, gated=gated)
    return found


_OUTSIDE: Mapping[str, Counterparts] = MappingProxyType(
    {
        "embedding.word_embeddings.weight": (("embedding.word.weight", vocabulary),),
        "embedding.position_embeddings.weight": (("embedding.position.weight", whole),),
        "decoder.final_layernorm.weight": (("final_norm.weight", norm),),
        "decoder.final_layernorm.bias": (("final_norm.bias", whole),),
        "output_layer.weight": (("output.weight", vocabulary),),
    }
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
#: No weights: the state of FP8 scaling, and angles, which follow from the configuration.
NO_WEIGHT = re.compile(r".*\._extra_state(\..*)?|.*\.?rotary_pos_emb\.inv_freq|.*\.rotary_emb\.inv_freq")
#: Older names, and those of experts: local modules, or one grouped layer of Transformer Engine with numbered tensors.
_OTHER_NAMES = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"language_model\.", ""),
        (r"^(encoder|transformer)\.", "decoder."),
        (r"\.(self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
        (r"\.final_norm\.", ".final_layernorm."),
        (r"^word_embeddings(_for_head)?\.weight$", "output_layer.weight"),
        (r"\.mlp\.experts\.(?:local_experts|experts)\.(\d+)\.", r".mlp.experts.\1."),
        (r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".mlp.experts.\3.\1.\2"),
    )
)


def common_name(name: str) -> str:
    """megatron-core's name of a tensor that has others too; of an expert ``mlp.experts.3.linear_fc1``."""
    for old, new in _OTHER_NAMES:
        name = old.sub(new, name)
    return name


def our_tensors(network: Network, tensors: Mapping[str, Pieces], source: str) -> dict[str, ReadTensor]:
    """Readers of our tensors, in fp32, from those of Megatron under its names of whole models.

    A tied model has the output layer that the last stage repeats. Raises :class:`CheckpointError` naming ``source`` for
    tensors without a counterpart.
    """
    experts = min(network.experts, len(tensors))  # of each there are some tensors, whatever the arguments say
    dense, mixed = (_layer_table(gated=network.gated, experts=range(count)) for count in (0, experts))
    found: dict[str, ReadTensor] = {}
    foreign = []
    for name, pieces in tensors.items():
        layer = _LAYER.fullmatch(name)
        prefix = f"layers.{layer[1]}." if layer else ""
        table = mixed if layer and f"decoder.layers.{layer[1]}.mlp.router.weight" in tensors else dense
        counterparts = table.get(layer[2], ()) if layer else _OUTSIDE.get(name, ())
        foreign += [] if counterparts else [name]
        found |= {f"{prefix}{each}": partial(cut, network, pieces) for each, cut in counterparts}
    if foreign:
        rest = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise CheckpointError(
            f"{source} holds tensors that model=gpt does not have", why=", ".join(sorted(foreign)[:3]) + rest
        )
    return found
