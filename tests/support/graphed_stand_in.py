"""In the place of ``make_graphed_callables`` of Transformer Engine: what it asserts of its arguments, on a CPU.

Its results copy into the sample arguments they were made for and compute there; as with the real one, weight gradients
that layers hand over themselves are added without a word to the ledger, and warm-up runs leave theirs behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_run.gradients import Gradients


class StandIn:
    """One ``make_graphed_callables``; ``given`` are the arguments of its last call."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.given: dict[str, Any] = {}

    def __call__(  # the library's own arguments, those of 2.7 to 2.9
        self,
        modules: tuple[nn.Module, ...],
        sample_args: list[tuple[Tensor, ...]],
        num_warmup_iters: int = 3,
        allow_unused_input: bool = False,
        sample_kwargs: Any = None,
        _order: list[int] | None = None,
        _num_layers_per_chunk: list[int] | None = None,
        pool: Any = None,
        retain_graph_in_backward: bool = False,
        _reuse_graph_input_output_buffers: bool = False,
    ) -> tuple[Callable[..., Any], ...]:
        self.given = {name: value for name, value in locals().items() if name != "self"}
        assert _order is not None
        assert _num_layers_per_chunk is not None
        chunks, layers = max(_order), sum(_num_layers_per_chunk)
        microbatches = len(_order) // chunks // 2
        assert chunks * microbatches * 2 == len(_order)
        assert len(_num_layers_per_chunk) == chunks
        assert len(modules) == layers
        assert len(sample_args) == layers * microbatches
        assert isinstance(sample_args, list)
        assert all(isinstance(x, Tensor) for args in sample_args for x in args)
        assert all(module.training and not module._forward_hooks for module in modules)
        if _reuse_graph_input_output_buffers:
            assert len({tuple(tuple(x.shape) for x in args) for args in sample_args}) == 1
        owners = _owners(modules, _num_layers_per_chunk, microbatches)
        for module, args in zip(owners, sample_args, strict=True):
            for _ in range(num_warmup_iters):
                _warm_up(module, args)
        return tuple(self._graphed(module, args) for module, args in zip(owners, sample_args, strict=True))

    def _graphed(self, module: nn.Module, sample: Sequence[Tensor]) -> Callable[..., Any]:
        def run(*tensors: Tensor) -> Any:
            for place, tensor in zip(sample, tensors, strict=True):
                place.detach().copy_(tensor)
            return _Graphed.apply(module, self._gradients, *tensors, *module.parameters())  # type: ignore[no-untyped-call]  # torch's

        return run


def _owners(modules: Sequence[nn.Module], layers: Sequence[int], microbatches: int) -> list[nn.Module]:
    """Whose each of the sample arguments is: chunk by chunk, in each microbatch by microbatch."""
    found, first = list[nn.Module](), 0
    for count in layers:
        found += [*modules[first : first + count]] * microbatches
        first += count
    return found


def _warm_up(module: nn.Module, args: Sequence[Tensor]) -> None:
    outputs = [output for output in module(*args) if output.requires_grad]
    wanted = [x for x in (*args, *module.parameters()) if x.requires_grad]
    torch.autograd.grad(outputs, wanted, [torch.ones_like(output) for output in outputs], allow_unused=True)


class _Graphed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, gradients: Gradients, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(tensors) - len(list(module.parameters()))
        with torch.enable_grad():
            ctx.leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors[:count]]
            ctx.outputs = module(*ctx.leaves)
        ctx.module, ctx.gradients = module, gradients
        outputs = tuple(output.detach() for output in ctx.outputs)
        pairs = zip(outputs, ctx.outputs, strict=True)
        ctx.mark_non_differentiable(*(out for out, made in pairs if not made.requires_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inputs = [*ctx.leaves, *ctx.module.parameters()]
        wanted = [x for x in inputs if x.requires_grad]
        pairs = [(out, grad) for out, grad in zip(ctx.outputs, grads, strict=True) if out.requires_grad]
        roots, given = zip(*pairs, strict=True)
        with ctx.gradients.recording():
            found = iter(torch.autograd.grad(roots, wanted, given, allow_unused=True))
        return (None, None, *(next(found) if x.requires_grad else None for x in inputs))
