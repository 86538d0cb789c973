"""The contract of kind ``model``: the network, built from parallel layers, one chunk at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from megatron_run.contracts.costs import ModelCosts
    from megatron_run.contracts.data import Field
    from megatron_run.contracts.parallel_layer import ParallelLayers
    from megatron_run.contracts.schedule import Place

#: The most layers that are planned: lists of more take minutes and gigabytes, and are typing mistakes.
MAX_LAYERS = 100_000


@dataclass(frozen=True)
class Decoding:
    """The state that layers need while texts are generated, token by token, instead of read whole.

    The texts of a batch are the rows of a table. All rows end in the same column, so the first ``padding[i]`` columns
    of row i hold no token; None: every row is full. This pass reads columns ``first`` to ``first + s - 1``. ``caches``
    holds, by the number of a layer, what that layer has chosen to keep of the columns before, an object of its own with
    a method ``keep(rows)`` that forgets the other rows; None: nothing is kept, ``first`` is 0 and no row is padded. No
    token is dropped for want of an expert's capacity: what a text becomes must not depend on the other rows.

    ``positions`` [b, s] are the places of this pass's tokens in their texts, None where they are the columns; ``mask``
    [b, 1, s, first + s] is true where a query may attend, None for causal. With ``last_only`` the logits of the last
    column are enough.
    """

    first: int = 0
    padding: Tensor | None = None
    caches: dict[int, Any] | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None
    last_only: bool = False


@dataclass(frozen=True)
class Microbatch:
    """One microbatch as a stage sees it.

    ``index`` counts within the step (0..M-1), ``step`` counts from 1. ``sample0`` is the index of its first sample in
    the global batch; together with seed, step and layer it determines every random number. ``fields`` are the batch
    fields that this stage needs (:meth:`Model.fields`), each [b, *shape], most of them [b, s]. ``train`` is false in
    evaluation (no dropout). ``decoding`` is set while texts are generated, of which ``tokens`` are the only field.
    """

    index: int
    step: int
    sample0: int
    fields: Mapping[str, Tensor]
    train: bool = True
    decoding: Decoding | None = None


@dataclass(frozen=True)
class ChunkOut:
    """The result of a chunk's forward.

    ``x`` [s, b, h] goes to the next position; the last position returns None. ``losses`` maps a name to (sum, weight),
    both scalars: the language-model loss ``lm`` summed over tokens, and the number of tokens; an auxiliary loss, and 1,
    or with ``train.loss_mean=token`` a sum and a number as :meth:`Model.counts` has them.
    ``logits`` [s, b, p/t], this rank's part of the padded vocabulary, come from the last chunk if its microbatch has no
    labels. ``beside`` holds what goes along with ``x``, by the names of :attr:`Boundary.beside`: an encoder's output,
    for instance. A chunk may hand on what it received.
    """

    x: Tensor | None
    losses: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    logits: Tensor | None = None
    beside: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Boundary:
    """Shape and dtype of the tensor that crosses between stages for one microbatch, and of those ``beside`` it.

    Most models send the residual stream alone. What another one sends beside it is declared by name, in any shape, and
    has a gradient too, which is zero where a chunk makes no use of it::

        Boundary((16, b, h), dtype, beside={"encoder": Boundary((48, b, h), dtype)})

    The tensors of a microbatch are one message: they are sent one after the other, in the order declared here.

    A size of None is known to the sender only. It costs one more small message: the sizes are sent before the tensor. A
    size that follows from the microbatch's index and step needs no message, since every stage can compute it. A model
    that drops a variable number of tokens in some microbatches declares that as::

        tokens = sequence_length if not self._drops(microbatch) else None  # only the sender knows how many are left
        return Boundary((tokens, micro_batch_size, hidden_size), dtype)
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    beside: Mapping[str, Boundary] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"({', '.join('?' if size is None else str(size) for size in self.shape)}) {self.dtype}"

    @property
    def tensors(self) -> tuple[Boundary, ...]:
        """That of ``x``, then of each tensor beside it."""
        return (self, *self.beside.values())

    @property
    def known(self) -> bool:
        """Whether every size of every tensor is known to the receiver."""
        return None not in self.shape and all(each.known for each in self.beside.values())

    def fits(self, x: Tensor) -> bool:
        """Whether ``x`` has this dtype, this number of dimensions and all known sizes."""
        if x.dtype != self.dtype or x.dim() != len(self.shape):
            return False
        return x.shape == self.shape or self.resolve(self.unknown(x)) == x.shape

    def unknown(self, x: Tensor) -> list[int]:
        """The sizes of ``x`` in the dimensions declared as None, in order."""
        return [size for size, declared in zip(x.shape, self.shape, strict=True) if declared is None]

    def resolve(self, sizes: Iterable[int] = ()) -> tuple[int, ...]:
        """The whole shape, with ``sizes`` for the dimensions declared as None."""
        remaining = iter(sizes)
        return tuple([next(remaining) if size is None else size for size in self.shape])


@dataclass(frozen=True)
class Segment:
    """A part of a layer that can be captured: ``fn(*tensors) -> tensor or tuple`` over named tensors.

    ``inputs`` and ``outputs`` are names in the layer's environment. (``layer``, ``index``) identifies the segment in
    the random stream; the embedding is layer -1, the head is layer ``num_layers``. ``why_eager`` is the reason why the
    segment must not be captured, empty if it may. ``draws``: ``fn`` draws random numbers in training, so the random
    streams must be positioned just before it, even if it is captured together with its neighbours.
    ``differentiable``: some output of ``fn`` has a gradient; otherwise there is no backward to capture. ``decodes``:
    while texts are generated, ``fn`` is called with the microbatch's :class:`Decoding` as ``decoding`` too.

    ``recompute``: what ``fn`` saves for its backward is discarded, and ``fn`` runs again there; neighbours are
    recomputed together. ``offload``: it waits in host memory. A model sets both from
    ``context.train.recomputes(name)`` and ``offloads(name)``; the engine does the rest. ``parts`` names parts of ``fn``
    that the model itself recomputes where ``train.recompute`` names them.
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
    recompute: bool = False
    offload: bool = False
    parts: tuple[str, ...] = ()
    decodes: bool = False


@runtime_checkable
class ModelOptions(Protocol):
    """The part of a model's options that the kernel reads, whatever else they hold.

    ``num_layers`` layers are split over the stages. ``vocab_size`` is the number of token ids without padding; where
    the user leaves it at None, that of the data is filled in before a model is made.
    """

    num_layers: int
    vocab_size: int | None

    def costs(self, sequence_length: int, vocab_size: int) -> ModelCosts:
        """The costs of the model for samples of ``sequence_length`` tokens and ``vocab_size`` token ids.

        Training reports MFU by them, and the planner plans with them; it needs neither torch nor a device.
        """
        ...


@dataclass(frozen=True)
class NewParts:
    """Parts that may differ between a model and the weights that it starts from (``run.init_from``), as a head.

    Logical tensors whose names begin with one of ``prefixes`` start from their initial values where the weights lack
    them or have them in another shape, and may be left over. Options declare it as a class attribute ``new_parts``, and
    mark those of such a part with :data:`~megatron_run.contracts.meaning.OF_NEW_PART`.
    """

    prefixes: tuple[str, ...] = ()


class Mixture(Protocol):
    """The group ``experts`` of a model's options: ``count`` of them (0: none), of which a token has ``top_k``."""

    count: int
    top_k: int


def mixture_of(options: object) -> Mixture | None:
    """The group ``experts`` of ``options``; None for a model that knows of no experts."""
    experts = getattr(options, "experts", None)
    return cast("Mixture", experts) if isinstance(getattr(experts, "count", None), int) else None


class Chunk(Protocol):
    """The part of the model at one position of the layout; in practice a ``torch.nn.Module``.

    One that honours ``Microbatch.decoding`` is a :class:`DecodingChunk` too.
    """

    def __call__(self, x: Tensor | None, microbatch: Microbatch, **beside: Tensor) -> ChunkOut:
        """Run the forward. ``x`` [s, b, h] comes from the previous position; it is None at the first.

        What comes ``beside`` it are arguments of the names that :attr:`Boundary.beside` declares, none at the first.
        """
        ...

    def segments(self) -> Sequence[Segment]:
        """All segments, in forward order."""
        ...

    def train(self, mode: bool = True) -> Any:
        """As ``torch.nn.Module.train``; without ``mode`` dropout is off."""
        ...

    def named_modules(self) -> Any:
        """As ``torch.nn.Module.named_modules``."""
        ...


class DecodingChunk:
    """A chunk whose layers may keep what they need of earlier tokens, and whose rows may be padded.

    Text is generated from a chunk without ``caches``, or of another class, by reading all of it again for each token.
    """

    #: Whether every layer here keeps what it needs.
    caches: bool = False
    #: The longest text that is read with other angles than longer ones; None where all have the same.
    angle_switch: int | None = None


class Model(ABC):
    """Describes a network, and builds its chunks on one rank from parallel layers.

    A model knows nothing of pipelines, tensor parallelism or optimizers: it builds the layers of one place, and states
    what crosses between places. The engine derives communication, initial values and checkpoints from that.

    Its options are :class:`ModelOptions`, with a group ``experts`` as :class:`Mixture` where layers may have some. A
    whole working plugin is the built-in ``gpt``.
    """

    #: Names of the losses and metrics that chunks report, equal on every rank.
    metric_names: tuple[str, ...] = ("lm",)
    #: Whether logits are those of the next token, so that text can be generated and scored.
    predicts_next: bool = True
    #: Whether chunks compute any pieces of a sample (``context.pieces``) as if the others were there. Its fields of
    #: shape ``"s"`` are then cut into pieces, and ``parallel.context`` may be above 1. Each class says it for itself.
    computes_pieces: bool = False

    @abstractmethod
    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, nn.Parameter]
    ) -> Chunk:
        """Build the chunk at ``position`` of ``layout`` on ``context.device``, or under ``torch.device("meta")``.

        Tied chunks of one stage share a Parameter through ``shared``: the first stores it, the others find it there.
        Values stay uninitialised: the engine fills each parameter from its :class:`Init` and its name, so that initial
        weights do not depend on the parallel layout.
        """

    @abstractmethod
    def fields(self, position: int, layout: tuple[Place, ...]) -> tuple[str | Field, ...]:
        """The batch fields that the chunk at ``position`` needs.

        ``context.fields`` are those that the data has, beyond ``tokens``, ``labels`` and ``loss_mask`` for instance
        ``positions`` and ``documents``. A field that :data:`megatron_run.contracts.data.FIELDS` does not name is
        declared as a :class:`Field`. Every rank reads its samples itself, so a chunk in the middle may ask as well.
        """

    @abstractmethod
    def boundary(self, microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
        """Shape and dtype of the tensor, or tensors, between positions for ``microbatch``, which has no fields here.

        Both ends of a message must compute the same boundary, and stages have different fields. So it may depend on
        ``index``, ``step``, ``sample0`` and ``train`` of the microbatch; a size that does not follow from these is
        None. ``sequence_length`` are the tokens of a sample that this rank computes, all but those of other context-
        parallel ranks; between layers it holds ``1 / context.sequence_shards`` of them.
        """

    def counts(self, fields: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """How many tokens each loss counts in a microbatch: scalars by the names of losses that are sums over tokens.

        With ``train.loss_mean=token`` a loss named here is divided by its number over the global batch, any other by
        the number of microbatches. ``fields`` are those of the last position. The number of ``lm`` is its weight.
        """
        return {"lm": fields["loss_mask"].sum()}

    def before_update(self, *, skipped: bool) -> None:  # noqa: B027  # most models do nothing
        """Change parameters by a rule of the model's own. Collective: called once a step, on every rank.

        All gradients of the step have arrived, and the optimizer's update follows unless it is ``skipped``: then forget
        what was counted. Such parameters are declared ``moved`` (:class:`ParameterSpec`), get no gradient and no weight
        decay, and have the type of the master weights; every rank that holds one must change it alike.
        """
