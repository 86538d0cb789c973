"""The context that a plugin's factory receives: everything it may need, passed as an argument, never global.

These are the parts that a plugin may use, whoever implements them. A plugin that builds with layers or optimizers of
the engine names the engine's own class, ``megatron_run_engine.runtime.BuildContext``, which has them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

    import torch
    from pydantic import BaseModel
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Parameter

    from megatron_run.contracts.model import Microbatch, Segment
    from megatron_run.contracts.pieces import Pieces
    from megatron_run.contracts.schema import RunSection, TrainSection
    from megatron_run.contracts.topology import Scope, Topology


class BuildContext(Protocol):
    """Passed to every factory except those of pure data (schedule, data, observer)."""

    @property
    def topology(self) -> Topology:
        """This rank's place in the grid."""

    @property
    def groups(self) -> BuildGroups:
        """Its process groups."""

    @property
    def device(self) -> torch.device:
        """Its device; the meta device while a run is planned."""

    @property
    def dtypes(self) -> BuildDtypes:
        """The types of parameters."""

    @property
    def model(self) -> BaseModel:
        """The model plugin's options (:class:`~megatron_run.contracts.ModelOptions`), the vocabulary filled in."""

    @property
    def vocab_size(self) -> int:
        """Token ids of the model, unpadded."""

    @property
    def train(self) -> TrainSection:
        """The section ``train`` of the configuration."""

    @property
    def run(self) -> RunSection:
        """The section ``run``."""

    @property
    def gradients(self) -> WeightGradients:
        """Takes weight gradients."""

    @property
    def rng(self) -> Streams:
        """The random streams."""

    @property
    def metrics(self) -> Meters:
        """Creates meters for numbers to report."""

    @property
    def segments(self) -> Segments:
        """Runs the segments of layers, eagerly or from a captured graph."""

    @property
    def log(self) -> logging.Logger:
        """For warnings."""

    @property
    def sequence_shards(self) -> int:
        """Ranks that split the sequence between blocks: the tensor ranks under sequence parallelism, else 1."""

    @property
    def pieces(self) -> Pieces:
        """The pieces of each sample that this rank holds: its tokens are those of ``pieces.columns(length)``."""

    @property
    def lends(self) -> bool:
        """Whether parameters are built without memory: their optimizer is a :class:`~megatron_run.contracts.Lender`."""

    @property
    def fields(self) -> frozenset[str]:
        """The names of the fields of the data's samples (:meth:`megatron_run.contracts.Model.fields`)."""


class BuildDtypes(Protocol):
    """``param``: type of parameters and activations. ``main``: type of master weights and of their update, fp32."""

    @property
    def param(self) -> torch.dtype: ...  # noqa: D102  # above

    @property
    def main(self) -> torch.dtype: ...  # noqa: D102  # above


class BuildGroups(Protocol):
    """The process groups of a rank, by axis."""

    def group(self, scope: Scope) -> ProcessGroup | None:
        """The group of ``scope``, or None if it is this rank alone."""

    def sum_(self, tensor: Tensor, scope: Scope) -> Tensor:
        """Sum ``tensor`` in place over ``scope``."""

    def max_(self, tensor: Tensor, scope: Scope) -> Tensor:
        """Take the maximum of ``tensor`` in place over ``scope``."""


class WeightGradients(Protocol):
    """Every weight gradient goes here, at once or deferred."""

    def submit(self, parameters: Sequence[Parameter], compute: Callable[[], None], *, reads: bool = False) -> None:
        """Take over a layer's weight gradient: ``compute`` adds it to the ``main_grad`` of ``parameters``.

        In a whole backward (``B``) it runs at once; in a split one (``I``) it is kept for ``W``. With ``reads`` it
        reads the parameters' values too, which may not be there in ``W``.
        """


class Streams(Protocol):
    """The random streams of a rank, positioned before each segment."""

    @property
    def sharded(self) -> torch.Generator:
        """The device's default generator, which differs between tensor-parallel ranks."""

    @property
    def replicated(self) -> torch.Generator:
        """Equal on all tensor-parallel ranks."""


class Meter(Protocol):
    """A weighted mean over microbatches and ranks."""

    def add(self, total: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add a ``total`` over ``weight`` units; both are scalars. It costs no host synchronisation."""


class Meters(Protocol):
    """Creates meters while plugins are built. Names are equal on every rank, and each is used once."""

    def scalar(self, name: str) -> Meter:
        """Create the meter of ``name``, under which observers see it."""

    def total(self, name: str) -> Meter:
        """Create a meter that is reported as the sum over microbatches and ranks; weights do not count."""


class Segments(Protocol):
    """Runs segments, eagerly or from a captured graph."""

    def run(self, segments: Sequence[Segment], microbatch: Microbatch, environment: dict[str, Tensor]) -> None:
        """Run a layer's ``segments`` in order, reading inputs from and writing outputs to ``environment``."""
