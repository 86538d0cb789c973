"""In the place of ``make_graphed_callables`` of Transformer Engine: what it asserts of its arguments, on a CPU.

Its results copy into the sample arguments they were made for and compute there; as with the real one, weight gradients
that layers hand over themselves are added without a word to the accumulator, and warm-up runs leave theirs behind.
Where buffers are reused it too gives the inputs of a backward that is done to the next forward that has inputs alike.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from megatron_run_engine.runtime.gradients import GradientAccumulator


class StandIn:
    """One ``make_graphed_callables``; ``given`` are the arguments of its last call.

    One that ``accumulates`` warms up and records as later releases do: with a backward that leaves the gradients of
    parameters in ``.grad``. Those that are gone from there when it looks, it takes for none.
    """

    def __init__(self, gradients: GradientAccumulator, *, accumulates: bool = False) -> None:
        self.gradients, self.accumulates = gradients, accumulates
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
        self.given["sample_args"] = [*sample_args]  # as they were, before their tensors are shared
        if sample_kwargs is None:
            sample_kwargs = tuple({} for _ in sample_args)  # up to 2.10, and then it is assigned to
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
            _reuse(sample_args, sample_kwargs, _order, _num_layers_per_chunk)
        owners = _owners(modules, _num_layers_per_chunk, microbatches)
        for module, args in zip(owners, sample_args, strict=True):
            for _ in range(num_warmup_iters):
                self._warm_up(module, args)
        return tuple(self._graphed(module, args) for module, args in zip(owners, sample_args, strict=True))

    def _warm_up(self, module: nn.Module, args: Sequence[Tensor]) -> None:
        outputs = [output for output in module(*args) if output.requires_grad]
        wanted = [x for x in (*args, *module.parameters()) if x.requires_grad]
        _gradients(outputs, [torch.ones_like(output) for output in outputs], wanted, accumulates=self.accumulates)

    def _graphed(self, module: nn.Module, sample: Sequence[Tensor]) -> Callable[..., Any]:
        def run(*tensors: Tensor) -> Any:
            return _Graphed.apply(self, module, sample, *tensors, *module.parameters())  # type: ignore[no-untyped-call]  # torch's

        return run


def _owners(modules: Sequence[nn.Module], layers: Sequence[int], microbatches: int) -> list[nn.Module]:
    """Whose each of the sample arguments is: chunk by chunk, in each microbatch by microbatch."""
    found, first = list[nn.Module](), 0
    for count in layers:
        found += [*modules[first : first + count]] * microbatches
        first += count
    return found


def _reuse(args: list[Any], kwargs: Any, order: Sequence[int], layers: Sequence[int]) -> None:
    """Each forward takes the inputs of the first one that is done, if there is one whose shapes and types are its own.

    Forwards are numbered as in :func:`_owners`; a chunk's backwards come in the order of its forwards.
    """
    microbatches = len(order) // len(layers) // 2
    first = [microbatches * before for before in accumulate([0, *layers[:-1]])]
    begun, ended = [0] * len(layers), [0] * len(layers)
    free: dict[object, deque[int]] = defaultdict(deque)
    kinds = [tuple((x.shape, x.dtype, x.layout) for x in each) for each in args]
    for signed in order:
        chunk, seen = abs(signed) - 1, begun if signed > 0 else ended
        start = first[chunk] + seen[chunk] * layers[chunk]
        seen[chunk] += 1
        for number in range(start, start + layers[chunk]):
            if signed < 0:
                free[kinds[number]].append(number)
            elif free[kinds[number]]:
                other = free[kinds[number]].popleft()
                args[number], kwargs[number] = args[other], kwargs[other]


def _gradients(
    outputs: Sequence[Tensor], given: Sequence[Tensor], wanted: Sequence[Tensor], *, accumulates: bool
) -> list[Tensor | None]:
    """Of ``wanted``; ``accumulates`` brings them by way of ``.grad``, where hooks see them first."""
    if not accumulates:
        return list(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
    torch.autograd.backward(outputs, given)
    found = [x.grad for x in wanted]
    for x in wanted:
        x.grad = None
    return found


class _Graphed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maker: StandIn, module: nn.Module, sample: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        for place, tensor in zip(sample, tensors, strict=False):
            place.detach().copy_(tensor)
        with torch.enable_grad():
            ctx.leaves = [place.detach().requires_grad_(place.requires_grad) for place in sample]
            ctx.outputs = module(*ctx.leaves)
        ctx.module, ctx.maker = module, maker
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
        with ctx.maker.gradients.recording():
            found = iter(_gradients(roots, given, wanted, accumulates=ctx.maker.accumulates))
        return (None, None, None, *(next(found) if x.requires_grad else None for x in inputs))
