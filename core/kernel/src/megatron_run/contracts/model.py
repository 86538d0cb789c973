"""The contract of kind ``model``: the network, built from parallel layers, one chunk at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from megatron_run.contracts.actions import Place
    from megatron_run.contracts.parallel_layer import ParallelLayers


@dataclass(frozen=True)
class Microbatch:
    """One microbatch as every stage sees it.

    ``index`` within the step (0..M-1); ``step`` counts from 1; ``sample0`` is the index of its first sample within the
    global batch, which with seed, step and layer fixes every random number; ``fields`` are the batch fields this stage
    asked for (``Model.fields``), each [b, s]; ``train`` is false in evaluation (no dropout).
    """

    index: int
    step: int
    sample0: int
    fields: Mapping[str, Tensor]
    train: bool = True


@dataclass(frozen=True)
class ChunkOut:
    """What a chunk returns. ``x`` [s, b, h] goes to the next position (None from the last one while training).

    ``losses`` maps a name to (sum, weight), both scalars: the language-model loss ``lm`` summed over tokens and the
    number of tokens; an auxiliary loss and 1. ``logits`` [s, b, p/t] is what the last chunk returns when its microbatch
    has no labels: this rank's part of the padded vocabulary.
    """

    x: Tensor | None
    losses: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    logits: Tensor | None = None


@dataclass(frozen=True)
class Boundary:
    """Shape and dtype of the tensor that crosses between stages for one microbatch.

    A size of None is known to the sender alone, and costs one small message more: the sizes travel before the tensor.
    What follows from the microbatch's number and step needs no message, since every stage can compute it. A model that
    drops tokens on the way, as many as its routing likes, says so for the microbatches that it thins out::

        tokens = sequence_length if not self._drops(microbatch) else None  # only the sender knows how many are left
        return Boundary((tokens, micro_batch_size, hidden_size), dtype)
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"({', '.join('?' if size is None else str(size) for size in self.shape)}) {self.dtype}"

    @property
    def known(self) -> bool:
        """Whether every size is."""
        return None not in self.shape

    def fits(self, x: Tensor) -> bool:
        """Whether ``x`` has this dtype, this many dimensions and every size that is known."""
        if x.dtype != self.dtype or x.dim() != len(self.shape):
            return False
        return x.shape == self.shape or self.resolve(self.unknown(x)) == x.shape

    def unknown(self, x: Tensor) -> list[int]:
        """The sizes of ``x`` that only its sender knows, in the order of its dimensions."""
        return [size for size, declared in zip(x.shape, self.shape, strict=True) if declared is None]

    def resolve(self, sizes: Iterable[int] = ()) -> tuple[int, ...]:
        """The whole shape, with ``sizes`` for the dimensions that only the sender knows."""
        told = iter(sizes)
        return tuple([next(told) if size is None else size for size in self.shape])


@dataclass(frozen=True)
class Segment:
    """A part of a layer that can be captured: ``fn(*tensors) -> tensor or tuple`` over named tensors.

    ``inputs`` and ``outputs`` are names in the layer's environment. ``index`` tells segments of one layer apart in the
    random stream; the embedding is layer -1, the head layer ``num_layers``. ``why_eager`` says why it must not be
    captured, empty when it may. ``draws`` says that ``fn`` draws random numbers in training: only then does the random
    stream have to be positioned just before it, also where it is captured together with its neighbours.
    ``differentiable`` says that something of what it returns has a gradient: else it has no backward to capture.
    """

    name: str
    layer: int
    index: int
    fn: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    why_eager: str = ""
    draws: bool = False
    differentiable: bool = True


class ModelOptions(Protocol):
    """What the kernel reads of a model's options, whatever else they hold.

    ``num_layers`` layers are split over the stages. ``vocab_size`` is the number of token ids without padding; where
    the user leaves it at None, that of the data is filled in before a model is made.
    """

    num_layers: int
    vocab_size: int | None


class MixtureOptions(ModelOptions, Protocol):
    """Those of a model whose layers may have ``experts``, 0 for none, of which a token meets ``top_k``."""

    experts: int
    top_k: int


def mixture_options(options: object) -> MixtureOptions | None:
    """``options`` where they say how many experts a layer has; None for a model that knows of none."""
    return cast("MixtureOptions", options) if isinstance(getattr(options, "experts", None), int) else None


class Chunk(Protocol):
    """A piece of the model on one stage; in practice a ``torch.nn.Module``."""

    def __call__(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        """Run forward. ``x`` [s, b, h] comes from the previous position, None at the first."""
        ...

    def segments(self) -> Sequence[Segment]:
        """Every segment in forward order."""
        ...

    def train(self, mode: bool = True) -> Any:
        """As ``torch.nn.Module.train``: ``mode`` False switches dropout off."""
        ...

    def named_modules(self) -> Any:
        """As ``torch.nn.Module.named_modules``."""
        ...


class Model(ABC):
    """Describes a network and builds the chunks of one rank.

    Its options are :class:`ModelOptions`, and :class:`MixtureOptions` where layers may have experts; see the built-in
    gpt for a whole working plugin.
    """

    #: Names of the losses and metrics that chunks report, equal on every rank.
    metric_names: tuple[str, ...] = ("lm",)

    @abstractmethod
    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, nn.Parameter]
    ) -> Chunk:
        """Build the chunk at ``position`` of ``layout`` on ``context.device`` (or under ``torch.device("meta")``).

        Chunks of one stage that are tied put their one Parameter into ``shared`` and find it there. Values are left
        uninitialised: the kernel fills them from each parameter's :class:`Init`, by name, so that initial weights do
        not depend on the parallel layout.
        """

    @abstractmethod
    def fields(self, position: int, layout: tuple[Place, ...]) -> tuple[str, ...]:
        """The batch fields that the chunk at ``position`` needs: of ``tokens``, ``labels``, ``loss_mask``."""

    @abstractmethod
    def boundary(self, microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
        """Shape and dtype of what crosses between positions for ``microbatch``, which has no fields here.

        Both ends of a message must say the same, and stages have different fields: it may differ from one microbatch
        to the next, but only by ``index``, ``step``, ``sample0`` and ``train``. A size that these do not tell is None.
        ``sequence_length`` is that of a whole sample, of which a rank holds ``1 / context.sequence_shards`` between
        layers.
        """

    @abstractmethod
    def flops_per_token(self, sequence_length: int) -> float:
        """Floating-point operations of one token's forward and backward, attention counted in full."""
