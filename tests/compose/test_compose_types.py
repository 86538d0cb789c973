"""A second check of what compositions compare: the types of a block's tensors, by how tensor ranks hold them.

``spmd-types`` tracks for each tensor whether ranks hold the same value and the same gradient (invariant), the same
value and terms of its gradient (replicated), or different values (varying). It refuses an operation on an invariant
tensor and another: a sum over the ranks is missing there. Parameters get their type from their specs, so a wrong
``partial_over`` is found without a number being compared.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytest.importorskip("spmd_types")
pytestmark = [pytest.mark.nightly, pytest.mark.multiproc]

BLOCKS: dict[str, dict[str, Any]] = {
    "dense": {"norm.placement": "sandwich"},
    "gated": {"activation": "swiglu", "bias": False, "attention.window": 3, "attention.softcap": 5.0},
    "norms of heads": {"norm.kind": "rmsnorm", "attention.qk_norm": "head"},
    "norms of projections": {"norm.kind": "rmsnorm", "attention.qk_norm": "full"},
    "experts": {"experts.count": 4, "experts.shared.ffn_size": 16, "experts.shared.gate": True},
}


@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequences", "split sequences"])
def test_no_tensor_lacks_a_sum(sequence: bool) -> None:
    kinds = run_ranks(typed_blocks, 2, sequence, BLOCKS, "")[0]
    assert kinds == dict.fromkeys(BLOCKS, "V" if sequence else "I"), "what a block makes is held as what it gets"


@pytest.mark.parametrize(
    ("sequence", "blocks", "forgotten"),
    [
        (False, "norms of heads", "qk_norm"),
        (True, "norms of heads", "qk_norm"),
        (True, "dense", "norm"),
        (True, "gated", "norm"),
        (False, "experts", "router"),
        (True, "experts", "gate"),
    ],
)
def test_a_gradient_that_is_not_said_to_be_partial_is_found(sequence: bool, blocks: str, forgotten: str) -> None:
    (found,) = run_ranks(typed_blocks, 2, sequence, {blocks: BLOCKS[blocks]}, forgotten)[0].values()
    assert found.startswith("SpmdTypeError: ")


def typed_blocks(rank: int, world: int, sequence: bool, blocks: dict[str, dict[str, Any]], forgotten: str) -> Any:
    """By name of a block: how ranks hold what it makes, or the error. What is ``forgotten`` is not partial."""
    import torch
    from spmd_types import SpmdTypeError, set_current_mesh
    from spmd_types.checker import typecheck
    from torch.distributed.device_mesh import init_device_mesh

    from tests.support.tensor_layers import rank_of

    topology, groups = rank_of(rank, world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    axis = mesh.get_group("tensor")
    give_rules(axis, sequence)
    found = {}
    for name, options in blocks.items():
        torch.manual_seed(1)
        block, infos, x = made(topology, groups, sequence, options)
        with set_current_mesh(mesh), typecheck():
            try:
                give_types(axis, infos, forgotten)
                found[name] = run(block, axis, x, sequence)
            except SpmdTypeError as error:
                found[name] = f"SpmdTypeError: {error}"
    return found


def made(topology: Any, groups: Any, sequence: bool, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A block of ``model=gpt``, its described parameters, and an input [s, b, h]."""
    import torch

    from megatron_run_engine.builtin.model.gpt import Gpt
    from megatron_run_engine.nn import SelfAttention, make_block
    from megatron_run_testing.build_contexts import prepare
    from tests.support.tensor_layers import gpt_context, tensor_layers

    context = gpt_context(topology, groups, {"dropout": 0.0, **options}, sequence=sequence)
    layers, spec = tensor_layers(context), Gpt(context, context.model)._spec  # type: ignore[arg-type]  # it is gpt's
    block = make_block(context, layers, spec, SelfAttention(context, layers, spec, 0, None))
    length = context.train.sequence_length // context.sequence_shards
    return block, prepare(context, [block]), torch.randn(length, 2, spec.hidden, dtype=torch.float64)


def give_types(axis: Any, infos: Any, forgotten: str) -> None:
    """Parts vary; a whole parameter is invariant, or replicated where its gradient is partial."""
    from spmd_types import I, R, V, assert_type

    from megatron_run_engine.runtime.parameter_init import _is_whole

    for parameter, info in infos.items():
        said = replace(info, partial_over=None) if forgotten and forgotten in info.name else info
        whole = R if said.partial_over == "tensor" else I
        assert_type(parameter, {axis: whole if _is_whole(parameter, info.parts) else V})


def run(block: Any, axis: Any, x: Any, sequence: bool) -> str:
    """Run the segments of ``block`` on ``x``; the type of what it makes."""
    from spmd_types import I, V, assert_type, get_local_type

    environment = {"x": assert_type(x, {axis: V if sequence else I})}
    for segment in block.segments():
        made = segment.fn(*(environment[name] for name in segment.inputs))
        environment.update(zip(segment.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    (kind,) = get_local_type(environment["x"]).values()
    return str(kind.name)


def give_rules(axis: Any, sequence: bool) -> None:
    """Say of our autograd functions what they do between ranks; the others work on what a rank has."""
    from spmd_types import I, R, SpmdTypeError, V, assert_type, get_local_type, register_local_autograd_function, rules

    def kind(tensor: Any) -> Any:
        (found,) = get_local_type(tensor).values()
        return found

    def from_to(source: Any, target: Any) -> Any:
        def rule(outputs: Any, *, x: Any) -> None:
            if source is not None and kind(x) != source:
                raise SpmdTypeError(f"{kind(x)} where {source} is expected")
            rules.ignore(x)
            assert_type(outputs, {axis: target})

        return staticmethod(rule)

    def leave(outputs: Any, *, x: Any) -> None:
        was = kind(x)  # a term of the sum, which is made in place
        rules.ignore(x)
        from spmd_types import mutate_type

        mutate_type(outputs, axis, src=was, dst=I)

    def column(outputs: Any, *, x: Any, weight: Any, bias: Any) -> None:
        if kind(x) != (V if sequence else I):
            raise SpmdTypeError(f"a column-parallel layer gets {kind(x)}")
        rules.ignore(x, weight, *(() if bias is None else (bias,)))
        assert_type(outputs, {axis: V})

    nn = "megatron_run_engine.nn"
    mappings = import_module(f"{nn}.parallel.mappings")
    mappings._F.spmd_typecheck = from_to(I, R)
    mappings._G.spmd_typecheck = staticmethod(leave)
    mappings._GatherSequence.spmd_typecheck = from_to(V, R)
    mappings._ScatterSequence.spmd_typecheck = from_to(None, V)
    mappings._ColumnLinear.spmd_typecheck = staticmethod(column)
    local = {
        "linear": ["_Linear"],
        "grouped": ["_GroupedLinear"],
        "mlp": ["_Swiglu"],
        "moe.router": ["_Logits"],
        "moe.placement": ["_Copy", "_CopyToSlots", "_Combine", "_Add"],
        "moe.dispatch": ["_Exchange"],  # between expert ranks, of which there is one
    }
    for module, names in local.items():
        for name in names:
            register_local_autograd_function(getattr(import_module(f"{nn}.{module}"), name))
