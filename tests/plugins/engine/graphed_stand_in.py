"""In the place of ``make_graphed_callables`` of Transformer Engine where it is not installed.

Its results copy into the sample arguments that they were made for and compute there. As with the real one, weight
gradients that layers hand over themselves are added without a word to the accumulator, warm-up runs leave theirs
behind, and no output is marked as having no gradient. What the real one demands of its arguments, and how it shares
memory, is tried on itself (``test_graph_capture_te_library.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_run_engine.runtime.gradients import GradientAccumulator
from megatron_run_graph_capture_te.library import Engine


class StandIn:
    """One ``make_graphed_callables``; ``given`` are the arguments of its last call, ``states`` the registered streams.

    One that ``accumulates`` warms up and records as later releases do: with a backward that leaves the gradients of
    parameters in ``.grad``. Those that are gone from there when it looks, it takes for none.
    """

    def __init__(self, gradients: GradientAccumulator, *, accumulates: bool = False) -> None:
        self.gradients, self.accumulates = gradients, accumulates
        self.given: dict[str, Any] = {}
        self.states: dict[str, torch.Generator] = {"its own": torch.Generator()}
        self.registered: list[torch.Generator] = []
        self.capture: Any = None

    @property
    def engine(self) -> Engine:
        """The library; its module ``distributed`` is the stand-in too."""
        return Engine(self, self)

    def get_all_rng_states(self) -> dict[str, torch.Generator]:
        return self.states

    def set_all_rng_states(self, states: dict[str, torch.Generator]) -> None:
        self.states = states

    def __call__(
        self, modules: tuple[nn.Module, ...], sample_args: list[tuple[Tensor, ...]], **options: Any
    ) -> tuple[Callable[..., Any], ...]:
        self.given = {"sample_args": [*sample_args], **options}
        self.registered, self.capture = [*self.states.values()], torch.cuda.graph
        copies = len(sample_args) // len(modules)
        owners, first = list[nn.Module](), 0  # chunk by chunk, in each copy by copy
        for count in options["_num_layers_per_chunk"]:
            owners += [*modules[first : first + count]] * copies
            first += count
        for module, args in zip(owners, sample_args, strict=True):
            for _ in range(options["num_warmup_iters"]):
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
        return tuple(output.detach() for output in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inputs = [*ctx.leaves, *ctx.module.parameters()]
        wanted = [x for x in inputs if x.requires_grad]
        pairs = [(out, grad) for out, grad in zip(ctx.outputs, grads, strict=True) if out.requires_grad]
        roots, given = zip(*pairs, strict=True)
        with ctx.maker.gradients.recording():
            found = iter(_gradients(roots, given, wanted, accumulates=ctx.maker.accumulates))
        return (None, None, None, *(next(found) if x.requires_grad else None for x in inputs))
