"""What every format is read into and written from: a model under our names, each tensor read when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: Reads one whole tensor onto the host. What it returns may share memory with a file: it is never written into.
Read = Callable[[], "Tensor"]


@dataclass(frozen=True)
class Weights:
    """A model and, where they are known, the optimizer's moments.

    ``config`` is the ``model`` section of a configuration; ``use`` is ``gpt`` unless it says otherwise. ``tensors``
    maps each logical name (``layers.0.attention.qkv.query.weight``) to what reads it in fp32; ``moments`` maps each
    field of an update rule (``exp_avg``) to the like. ``step`` counts the updates so far. ``sequence_length`` is the
    longest sequence that the model knows, None where nothing says it. ``notes`` are lines for the user: what was in
    the source and has no place here.
    """

    config: Mapping[str, object]
    tensors: Mapping[str, Read]
    step: int = 0
    sequence_length: int | None = None
    moments: Mapping[str, Mapping[str, Read]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
