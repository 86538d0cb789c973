"""The accumulator: every weight gradient enters ``main_grad`` here, at once or deferred.

A schedule may split the backward: ``I`` computes the input gradient only, and ``W`` computes the weight gradients
later. A layer that supports this submits its weight-gradient computation; the gradient of any other parameter arrives
through a hook, in ``I`` already. The accumulator also knows which arrival of a step is a parameter's last.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from megatron_run.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import Lender

Compute = Callable[[], None]
#: (microbatch, chunk): whose backward a deferred weight gradient belongs to.
Key = tuple[int, int]
_ATTRIBUTE = "main_grad"  # Megatron-LM's name, which layers of other libraries (Transformer Engine) look for


def main_grad(parameter: Tensor) -> Tensor:
    """The tensor in which the gradient of ``parameter`` is accumulated: in its shape.

    It has the same storage for life, unless an optimizer lends it (:class:`megatron_run.contracts.Lender`).
    """
    grad: Tensor = getattr(parameter, _ATTRIBUTE)
    return grad


def give_main_grad(parameter: Tensor, grad: Tensor) -> None:
    """Accumulate the gradient of ``parameter`` in ``grad``, of the same shape, from now on."""
    setattr(parameter, _ATTRIBUTE, grad)


def take_main_grad(parameter: Tensor) -> None:
    """Accumulate the gradient of ``parameter`` no longer: it is frozen."""
    delattr(parameter, _ATTRIBUTE)


def has_main_grad(parameter: Tensor) -> bool:
    """Whether a gradient of ``parameter`` is accumulated; not if it was frozen from the start."""
    return hasattr(parameter, _ATTRIBUTE)


def own_main_grad(parameter: Tensor) -> None:
    """Give ``parameter`` a ``main_grad`` of its own, in fp32, unless it has one: where no bucket is reduced."""
    if not has_main_grad(parameter):
        give_main_grad(parameter, torch.zeros_like(parameter, dtype=torch.float32))


class GradientAccumulator:
    """Accumulates the gradients of one rank, and announces the last arrival of each in a step.

    The number of arrivals per microbatch is learned in the first step; a tied embedding's gradient, for example,
    arrives twice. Until then nothing is announced, and the executor's gradient-sync points send everything. ``steps``
    counts the steps that have begun, or were recorded whole: parameters change between them only.
    """

    def __init__(self) -> None:
        self._deferred_to: Key | None = None
        self._queues: dict[Key, deque[tuple[Sequence[Parameter], Compute, bool]]] = {}
        self._names: dict[Parameter, str] = {}
        self._arrivals: Counter[Parameter] = Counter()
        self._per_microbatch: dict[Parameter, float] = {}
        self._last: dict[Parameter, float] = {}  # the number of the step's last arrival, once it is known
        self._microbatches = 0
        self.steps = 0
        self._on_ready: Callable[[Parameter], None] | None = None
        self._lender: Lender | None = None
        self._recorded: list[Parameter] | None = None

    def adopt(self, parameter: Parameter, name: str) -> None:
        """Watch ``parameter``: each gradient that autograd puts into ``.grad`` is added to ``main_grad``.

        Raises :class:`PluginError` for one that is frozen already.
        """
        if not parameter.requires_grad:
            raise PluginError(
                f"the model froze its parameter {name}",
                why="weight decay would change it though it gets no gradient",
                fix="make what is not trained a buffer (register_buffer), or leave requires_grad as it is",
            )
        if parameter not in self._names:  # a parameter shared by two chunks gets one hook
            self._names[parameter] = name
            vars(parameter)["accumulator"] = self  # it lives as long as what it adopted; the collector sees this
            parameter.register_post_accumulate_grad_hook(partial(_move_grad, weakref.ref(self)))

    def borrow_from(self, lender: Lender) -> None:
        """From now on ask ``lender`` for each ``main_grad`` before it is added to."""
        self._lender = lender

    @property
    def defers(self) -> bool:
        """Whether what is submitted now waits for W."""
        return self._deferred_to is not None

    def submit(self, parameters: Sequence[Parameter], compute: Compute, *, reads: bool = False) -> None:
        """Take over a layer's weight gradient: ``compute`` adds it to the ``main_grad`` of ``parameters``.

        In a whole backward (``B``) it runs at once; in a split one (``I``) it is kept for ``W``. With ``reads`` it
        reads the parameters' values too, which may not be there in ``W``.
        """
        if self._deferred_to is None:
            self._finish(parameters, compute)
        else:
            self._queues.setdefault(self._deferred_to, deque()).append((parameters, compute, reads))

    def start_step(self, microbatches: int, on_ready: Callable[[Parameter], None]) -> None:
        """Begin a step of ``microbatches``; ``on_ready`` is called at each parameter's last arrival."""
        if self._microbatches and not self._per_microbatch:
            # Learned once, since it is a property of the model: later steps may have another number of microbatches.
            self._per_microbatch = {p: count / self._microbatches for p, count in self._arrivals.items()}
        self._arrivals.clear()
        self._last = {p: each * microbatches for p, each in self._per_microbatch.items()}
        self._microbatches, self._on_ready = microbatches, on_ready
        self.steps += 1

    def start_recorded_step(self) -> None:
        """Begin a step that is recorded whole: what a step makes of its parameters, it makes in each replay."""
        self.steps += 1

    @contextmanager
    def deferring(self, key: Key) -> Iterator[None]:
        """Within: submitted weight gradients wait for :meth:`run_deferred` with the same ``key`` (action I)."""
        self._deferred_to = key
        try:
            yield
        finally:
            self._deferred_to = None

    @contextmanager
    def recording(self) -> Iterator[list[Parameter]]:
        """Within: arrivals are listed, in order, instead of counted (graph capture). A recording within has its own."""
        before, self._recorded = self._recorded, []
        try:
            yield self._recorded
        finally:
            self._recorded = before

    def arrived(self, parameters: Iterable[Parameter]) -> None:
        """Count the gradients of ``parameters``, which a replayed graph has added to their ``main_grad``."""
        for parameter in parameters:
            self._arrived(parameter)

    def run_deferred(self, key: Key) -> None:
        """Compute the deferred weight gradients of ``key``, first in, first out (action W)."""
        for parameters, compute, reads in self._queues.pop(key, ()):
            if reads and self._lender is not None:
                # Of what W reads no neighbour follows.
                self._lender.ensure_ready(parameters, ahead=False)
            self._finish(parameters, compute)
            if reads and self._lender is not None:
                self._lender.release(parameters)

    def _finish(self, parameters: Sequence[Parameter], compute: Compute) -> None:
        if self._lender is not None:
            self._lender.before_adding(parameters)
        with _without_history():  # W runs outside of a backward
            compute()
        for parameter in parameters:
            self._arrived(parameter)

    def move_grad(self, parameter: Parameter) -> None:
        """Add what autograd put into ``.grad`` to ``main_grad``."""
        if parameter.grad is None:
            return  # the hook also fires when a Function returned None for a parameter it submitted
        if self._lender is not None:
            self._lender.before_adding((parameter,))
        with _without_history():
            main_grad(parameter).add_(parameter.grad)
        parameter.grad = None  # or autograd would add the next gradient to it, and it would be counted twice
        self._arrived(parameter)

    def _arrived(self, parameter: Parameter) -> None:
        if self._recorded is not None:
            self._recorded.append(parameter)
            return
        arrivals = self._arrivals[parameter] = self._arrivals[parameter] + 1
        last = self._last.get(parameter)
        if not last or self._on_ready is None:
            return
        if arrivals == last:
            self._on_ready(parameter)
        elif arrivals > last:
            raise PluginError(
                f"a gradient of {self._names.get(parameter, 'an unknown parameter')} arrived after its bucket was sent",
                why=f"{last:g} arrivals were learned from the first step, this is number {arrivals}",
                fix="a parameter must take part in every microbatch equally often",
            )


def _without_history() -> AbstractContextManager[object]:
    """The work of ``torch.no_grad``. Within a backward nothing is recorded anyway, and to say so takes microseconds."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def _move_grad(accumulator: weakref.ref[GradientAccumulator], parameter: torch.Tensor) -> None:
    """The hook of a parameter. Weak, since the garbage collector cannot see that autograd holds a hook.

    A bound method would hold the accumulator, which holds every parameter: model, gradients and groups of each training
    would stay until the process ends.
    """
    alive = accumulator()
    assert alive is not None, "a parameter keeps the accumulator that adopted it"
    alive.move_grad(cast("Parameter", parameter))  # registered on parameters only
