"""Compares the saved values that a model's options tell with those that a forward of its layers leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from megatron_run_engine.nn.device import PlannedMode
from megatron_run_testing import CheckFailed

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import Tensor, nn

    from megatron_run.contracts import Microbatch, ModelOptions
    from megatron_run.contracts.schedule import Place
    from megatron_run_testing.model.built import Built

#: Share of the told values that may be found. Statistics of norms and softmax, and scores of capped attention, are much
#: of a small network, and are told by nobody; a mistake by a factor of 2 lies beyond.
_LEAST, _MOST = 0.75, 1.75


class _Held(NamedTuple):
    """The rest of a forward at one place: so many ``values`` of floating-point tensors that are no parameters."""

    place: Place
    values: int


def check_saved(build: Callable[[int], Built], microbatch: Microbatch, options: BaseModel) -> str:
    """Raise :class:`CheckFailed` unless each layer leaves about as many values as ``options`` tell of it.

    ``build`` makes the model of so many stages, which are as many as its layers and one: those between the first and
    the last then hold a layer and nothing else. They run on fake tensors that stand for a GPU's, without dropout.
    Returns why nothing was compared, or an empty text.
    """
    described = cast("ModelOptions", options)
    batch, length = microbatch.fields["tokens"].shape
    costs = described.costs(length, described.vocab_size or 0)
    with PlannedMode(gpu=True):
        fields = {name: torch.zeros(field.shape, dtype=field.dtype) for name, field in microbatch.fields.items()}
        built = build(described.num_layers + 1).train(mode=False)
        try:
            alone = list(_forward(built, replace(microbatch, fields=fields)))
        except DataDependentOutputException as unknown:  # as where a router counts what each expert gets
            return f"its sizes depend on values: {unknown}"
    for held in alone:
        expected = batch * costs.part(held.place.layers).sum(lambda layer: layer.saved)
        if not _LEAST * expected <= held.values <= _MOST * expected:
            raise CheckFailed(
                f"costs tell {expected:,.0f} saved values of layer {held.place.layers[0]} in {batch} samples of "
                f"{length} tokens, and its forward leaves {held.values:,}"
            )
    return "" if alone else "it has no layer between the first and the last"


def _forward(built: Built, microbatch: Microbatch) -> Iterator[_Held]:
    """Run all chunks, and tell of those between the first and the last what they leave."""
    x: Tensor | None = None
    beside: dict[str, Tensor] = {}
    for position, (place, chunk) in enumerate(zip(built.layout, built.chunks, strict=True)):
        found: dict[int, int] = {}
        known = {parameter.untyped_storage()._cdata for parameter in cast("nn.Module", chunk).parameters()}

        def note(tensor: Tensor, found: dict[int, int] = found, known: set[int] = known) -> Tensor:
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage._cdata not in known:
                found[storage._cdata] = storage.nbytes() // tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = chunk(x, built.given(position, microbatch), **beside)
        if position and place.layers and out.x is not None:
            yield _Held(place, sum(found.values()))
        x = None if out.x is None else _as_input(out.x)
        beside = {name: _as_input(tensor) for name, tensor in out.beside.items()}


def _as_input(tensor: Tensor) -> Tensor:
    """``tensor`` as another stage receives it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
