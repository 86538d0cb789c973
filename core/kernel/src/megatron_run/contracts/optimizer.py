"""The contract of kind ``optimizer``: data-parallel communication, sharding, the update, and the state to save."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts.model import Chunk
    from megatron_run.contracts.parameters import ParamInfo

#: The field of the fp32 weights, which exists in every precision. All other fields belong to the update rule.
MASTER = "master"


class Optimizer(ABC):
    """Reduces gradients over the data-parallel group, and updates the parameters.

    The engine accumulates every gradient in ``parameter.main_grad`` (see
    :mod:`megatron_run_engine.runtime.gradients`, which draws the callbacks of a step). In each step it calls:

    1. ``zero_grad``;
    2. during the backward, ``grad_ready`` for each parameter after its last gradient of the step, and
       ``start_grad_sync`` for each chunk after its last backward;
    3. ``finish_grad_sync``, ``unscale_`` and ``clip_``, also where a gradient is not finite;
    4. ``step`` and ``start_param_sync``, unless the step is skipped: not all gradients are finite, or a guard objects.

    The host waits for the device once, between 3 and 4, for all numbers of the step: no method should wait for it.

    ``ensure_ready`` is called before any segment reads its parameters. After ``finish_grad_sync``, ``main_grad`` must
    be correct only where this rank updates the parameter; after ``unscale_`` only the optimizer reads it.

    Collectives must start in an order that is fixed in advance and equal on every rank, never in the order in which
    gradients arrive: ranks would deadlock.

    Parameters have the type ``context.dtypes.param``. They are updated in ``context.dtypes.main`` and then rounded, so
    that small updates are not lost.

    :class:`megatron_run_engine.optim.FlatOptimizer` implements everything except how data-parallel ranks divide the
    work, which a :class:`~megatron_run_engine.optim.ShardingStrategy` decides. A whole working plugin, whose all-reduce
    sends half as many bytes::

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

    #: Whether an update ends with a multiplication of rows by ``ParamInfo.row_factors``.
    scales_rows: bool = False

    @abstractmethod
    def attach(self, chunks: Sequence[Chunk], infos: Sequence[dict[Parameter, ParamInfo]], grad_scale: float) -> None:
        """Take over the parameters of this stage's chunks; ``infos[i]`` describes those of ``chunks[i]``.

        This allocates every ``main_grad``, and may move parameters into flat storage. Every gradient is multiplied by
        ``grad_scale`` (1 / data-parallel size if losses are averaged) before its reduction.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Set every ``main_grad`` to zero for the next step."""

    @abstractmethod
    def grad_ready(self, parameter: Parameter) -> None:
        """``parameter.main_grad`` is complete for this step: its reduction may start."""

    @abstractmethod
    def start_grad_sync(self, chunk: int) -> None:
        """Start reducing the remaining gradients of ``chunk``. Idempotent."""

    @abstractmethod
    def finish_grad_sync(self) -> None:
        """Wait for every reduction; then sum over each parameter's ``partial_over`` group."""

    @abstractmethod
    def unscale_(self, factor: Tensor) -> Tensor:
        """Multiply the gradients by ``factor`` (fp32 [1]); return found_inf, fp32 [1], the maximum over all ranks."""

    @abstractmethod
    def clip_(self, max_norm: float) -> Tensor:
        """Scale the gradients down to ``max_norm`` (0: no clipping), and return the global norm before, fp32 [1].

        The norm of gradients that are not all finite is not read.

        ``coefficient = max_norm / (norm + 1e-6)`` applies only if it is below 1. Every logical parameter counts once
        (``ParamInfo.counted``), and padding not at all.
        """

    @abstractmethod
    def count_zeros(self) -> Tensor:
        """Number of zeros among the gradients of all ranks, fp32 [1]; called after ``clip_`` (``train.count_zeros``).

        Every logical parameter counts once, and padding not at all.
        """

    @abstractmethod
    def step(self, lr: float, weight_decay: float) -> None:
        """Update the parameters, as far as ``lr`` says. ``weight_decay`` applies to those with ``ParamInfo.decay``.

        Both change from step to step.
        """

    @abstractmethod
    def start_param_sync(self) -> None:
        """Start gathering updated parameters on the ranks that did not compute them."""

    @abstractmethod
    def ensure_ready(self, parameters: Iterable[Parameter]) -> None:
        """Block until ``parameters`` hold their updated values. Idempotent, and cheap if they do already."""

    @abstractmethod
    def finish_param_sync(self) -> None:
        """Wait until no collective for parameters is in flight: a run saves, or ends."""

    @abstractmethod
    def memory(self) -> Mapping[str, int]:
        """Bytes that this rank holds between steps, by role.

        The roles are ``parameters``, ``gradients``, ``masters``, ``main_gradients`` (fp32 copies of 16-bit gradients),
        ``state``, which is omitted if it is not known, and of a :class:`Lender` ``lent`` and ``frozen``. Those that
        begin with ``host_`` lie in host memory whatever the device. On the meta device, where runs are planned, the
        numbers are those after a first step on a real device.
        """

    @abstractmethod
    def iter_state(self) -> Iterator[StatePiece]:
        """This rank's part of the state, without communication.

        It consists of master weights (field :data:`~megatron_run.contracts.MASTER`, in every precision) and of the
        rule's own fields, as boxes of logical tensors. Over all ranks, each value comes once: from one of the
        data-parallel replicas, and from the copy that counts (``ParamInfo.counted``).
        """

    @abstractmethod
    def load_state(self, read: ReadState) -> None:
        """Replace the state with the boxes that ``read`` returns, and update the parameters from the masters.

        The state may have been written with another parallel layout, and by another optimizer with the same fields.
        Collective over the data-parallel ranks.
        """

    def load_weights(self, read: ReadState) -> None:
        """Replace the master weights with the boxes that ``read`` returns, and reset the rest of the state.

        Collective, as :meth:`load_state`. The default loads zeros for the rest, which is correct for a rule whose
        initial state is zero.
        """
        from torch import zeros

        def read_or_zeros(name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
            return read(name, field, starts, sizes) if field == MASTER else zeros(sizes)

        self.load_state(read_or_zeros)


class Lender(Optimizer):
    """An optimizer that holds parameters and gradients whole only while a segment needs them, and lends their memory.

    The engine builds parameters without memory, and this gives those without values their initial ones. ``release``
    ends what ``ensure_ready`` began, around the forward and the backward of a segment; what is not whole may be read by
    nobody. ``before_adding`` comes before each addition to a ``main_grad``, which is read by nobody else. A parameter
    keeps its storage, whose memory comes and goes: what autograd has saved of it then has its values again.

    A segment must not change its inputs in place, and its parameters get gradients on all ranks or on none, since
    gradients are reduced as they arrive.

    The bytes that are ``lent`` at once at most, and those of ``frozen`` parameters, are roles of its ``memory``.
    """

    @abstractmethod
    def hold(self, infos: Sequence[dict[Parameter, ParamInfo]]) -> None:
        """Take over the frozen parameters of each chunk too. Called before :meth:`attach`."""

    @abstractmethod
    def ensure_ready(self, parameters: Iterable[Parameter], *, ahead: bool = True) -> None:
        """As :meth:`Optimizer.ensure_ready`; ``ahead``: the segments that follow in this pass are read next."""

    @abstractmethod
    def kept(self) -> Iterable[tuple[Tensor, Tensor]]:
        """This rank's shares of what is lent, as values and gradients: what is made of others follows from them."""

    @abstractmethod
    def release(self, parameters: Iterable[Parameter]) -> None:
        """``parameters`` are not read before the next ``ensure_ready``."""

    @abstractmethod
    def keep(self, parameters: Iterable[Parameter]) -> None:
        """Values were written to frozen ``parameters`` while they were ready: they are theirs from now on."""

    @abstractmethod
    def before_adding(self, parameters: Sequence[Parameter]) -> None:
        """``main_grad`` of ``parameters`` is about to be added to."""


class StatePiece(NamedTuple):
    """A box of one field of a logical tensor: values ``starts[i]`` to ``starts[i] + sizes[i] - 1`` in dimension i.

    ``name`` is canonical (``Part.name``); ``field`` is :data:`MASTER` or one of the update rule (``exp_avg``, ...).
    ``tensor`` has shape ``sizes``, and is a view if possible. A number for the whole tensor, such as the step count,
    has no dimensions. Over all ranks, the pieces of a field cover the logical tensor, each value once.
    """

    name: str
    field: str
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor


class ReadState(Protocol):
    """Reads boxes of a saved state; they need not be the boxes of the saved :class:`StatePiece` s."""

    def __call__(self, name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A box, of shape ``sizes``, of ``field`` of ``name``. Raises a RunError if it was not saved."""
        ...
