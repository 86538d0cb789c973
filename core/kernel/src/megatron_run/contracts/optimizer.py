"""The contract of kind ``optimizer``: data-parallel communication, sharding and the update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_run.contracts.state import MASTER

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts.model import Chunk
    from megatron_run.contracts.parameters import ParamInfo
    from megatron_run.contracts.state import ReadState, StatePiece


class Optimizer(ABC):
    """Reduces gradients over the data-parallel group and updates the parameters.

    The engine accumulates every gradient into ``parameter.main_grad`` (``megatron_run_engine.runtime.gradients``) and
    calls, once a step and in this order: ``zero_grad``; ``grad_ready`` for each parameter at its last gradient of the
    step and ``start_grad_sync`` for each chunk after its last backward; ``finish_grad_sync``; ``unscale_``; and, when
    all gradients are finite, ``clip_``, ``step`` and ``start_param_sync``. ``ensure_ready`` is called before any
    segment reads its parameters. Nobody else reads ``main_grad`` after ``unscale_``, and after ``finish_grad_sync`` it
    need be right only where this rank updates the parameter.

    Communication leaves in one sequence that is fixed in advance and equal on every rank, never by arrival.

    Parameters are in ``context.dtypes.param``; they are updated in ``context.dtypes.main`` and rounded, so that small
    updates are not lost. :class:`megatron_run_engine.optim.FlatOptimizer` is all of this but one question, how the
    data-parallel ranks share the work. A whole working plugin that halves what its all-reduce sends::

        class HalfTheBytes(ShardingStrategy):
            def __init__(self, peers):
                self._peers = peers

            def updated(self, bucket):
                return range(len(bucket.grad))

            def start_reduce(self, bucket):
                return Pending(bucket.grad.copy_(self._peers.sum_(bucket.grad.bfloat16())))

            def start_gather(self, values, bucket):
                return Pending(values)

        @hookimpl
        def megatron_run_create_optimizer(context, options):
            return FlatOptimizer(context, options, HalfTheBytes)
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
    def count_zeros(self) -> Tensor:
        """Zeros among the gradients, over all ranks, fp32 [1]; asked for after ``clip_`` (``train.count_zeros``).

        Every logical parameter counts once, padding never.
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

    @abstractmethod
    def memory(self) -> Mapping[str, int]:
        """Bytes that this rank holds between steps, by role.

        The roles are ``parameters``, ``gradients``, ``masters``, ``main_gradients`` (fp32 copies of 16-bit gradients)
        and ``state``, left out where it is not known. On the meta device, where a run is planned, the same as after a
        first step elsewhere.
        """

    @abstractmethod
    def iter_state(self) -> Iterator[StatePiece]:
        """This rank's part of the state, without any communication.

        Master weights (field :data:`~megatron_run.contracts.MASTER`, whatever the precision) and the rule's own fields,
        as boxes of logical tensors. Over all ranks each value comes once: of data-parallel replicas one gives it, and
        of copies (``ParamInfo.counted``) the one that counts.
        """

    @abstractmethod
    def load_state(self, read: ReadState) -> None:
        """Replace the state by what ``read`` looks up, box by box, and bring the parameters up to date.

        Whoever wrote the state may have been laid out otherwise, and another optimizer with the same fields. Collective
        over the data-parallel ranks.
        """

    def load_weights(self, read: ReadState) -> None:
        """Replace the masters by what ``read`` looks up, and begin the rest anew, as before the first step.

        Collective as :meth:`load_state`. By default the rest is loaded as zeros, which is right for a rule whose state
        begins so.
        """
        from torch import zeros

        def read_or_zeros(name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
            return read(name, field, starts, sizes) if field == MASTER else zeros(sizes)

        self.load_state(read_or_zeros)
