"""The contract of kind ``optimizer``: data-parallel communication, sharding and the update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts.model import Chunk
    from megatron_run.contracts.parameters import ParamInfo


class Optimizer(ABC):
    """Reduces gradients over the data-parallel group and updates the parameters.

    The kernel accumulates every gradient into ``parameter.main_grad`` (see ``megatron_run.gradients``) and calls, once
    a step and in this order: ``zero_grad``; ``grad_ready`` for each parameter at its last gradient of the step and
    ``start_grad_sync`` for each chunk after its last backward; ``finish_grad_sync``; ``unscale_``; and, when all
    gradients are finite, ``clip_``, ``step`` and ``start_param_sync``. ``ensure_ready`` is called before any segment
    reads its parameters. Nobody else reads ``main_grad`` after ``unscale_``.

    Communication leaves in one sequence that is fixed in advance and equal on every rank, never by arrival.
    """

    @abstractmethod
    def attach(self, chunks: Sequence[Chunk], infos: Sequence[dict[Parameter, ParamInfo]], grad_scale: float) -> None:
        """Take over the parameters of this stage's chunks; ``infos[i]`` describes those of ``chunks[i]``.

        Makes the gradient buffers and, where it likes, moves the parameters into flat storage. Every gradient is
        multiplied by ``grad_scale`` (1 / data-parallel size when losses are averaged) before its reduction.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Clear every ``main_grad`` for the next step."""

    @abstractmethod
    def grad_ready(self, parameter: Parameter) -> None:
        """The last gradient of this step has been added to ``parameter.main_grad``."""

    @abstractmethod
    def start_grad_sync(self, chunk: int) -> None:
        """Send what is left of ``chunk``'s gradients. Idempotent."""

    @abstractmethod
    def finish_grad_sync(self) -> None:
        """Wait for every reduction; then sum over each parameter's ``partial_over`` group."""

    @abstractmethod
    def unscale_(self, factor: Tensor) -> Tensor:
        """Multiply the gradients by ``factor`` (fp32 [1]) and return found_inf, fp32 [1], agreed over all ranks."""

    @abstractmethod
    def clip_(self, max_norm: float) -> Tensor:
        """Scale the gradients down to ``max_norm`` (0: leave them) and return the global norm before, fp32 [1].

        ``coefficient = max_norm / (norm + 1e-6)``, applied only when below 1. Every logical parameter counts once
        (``ParamInfo.counted``), padding never.
        """

    @abstractmethod
    def step(self, lr: float, weight_decay: float) -> None:
        """Update the parameters. ``weight_decay`` applies where ``ParamInfo.decay`` is true."""

    @abstractmethod
    def start_param_sync(self) -> None:
        """Start bringing updated parameters to the ranks that did not compute them."""

    @abstractmethod
    def ensure_ready(self, parameters: Iterable[Parameter]) -> None:
        """Return once ``parameters`` hold their updated values. Cheap and idempotent."""
