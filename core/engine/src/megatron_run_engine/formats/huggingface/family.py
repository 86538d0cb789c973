"""What a family of Hugging Face models says of itself, and how its tensors are made of ours.

Legend: o outputs, i inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_run_engine.formats.gpt import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run_engine.builtin.model.gpt import GptOptions
    from megatron_run_engine.formats.weights import Read

#: A ``config.json``.
Config = Mapping[str, Any]


class Row(NamedTuple):
    """A tensor of ``theirs`` and those of ``ours`` of which it is made: stacked by rows, then transposed.

    Ours are [o, i], as torch's Linear has them; ``transposed`` ones are [i, o], as GPT-2's Conv1D.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of theirs, from those of ours."""
        rows, columns = sum(shapes[name][0] for name in self.ours), shapes[self.ours[0]][1:]
        return (*columns, rows) if self.transposed else (rows, *columns)

    def pack(self, tensors: Mapping[str, Read]) -> Tensor:
        """Theirs from ours."""
        read = [tensors[name]() for name in self.ours]
        stacked = torch.cat(read) if len(read) > 1 else read[0]
        return stacked.t() if self.transposed else stacked

    def unpack(self, read: Read, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Read]]:
        """What reads each of ours out of theirs, which ``read`` gives; fp32."""
        start = 0
        for name in self.ours:
            stop = start + shapes[name][0]
            yield name, partial(self._rows, read, start, stop)
            start = stop

    def _rows(self, read: Read, start: int, stop: int) -> Tensor:
        theirs = read()
        return (theirs.t() if self.transposed else theirs)[start:stop].float()


class Family(NamedTuple):
    """One family, by its ``model_type``.

    ``mismatches`` says why a model of ours is none of it (nothing: it is one), ``config`` is then its ``config.json``;
    ``unfit`` says why a ``config.json`` is beyond ours, with every reason, ``model`` is then our ``model`` section, and
    ``positions`` its longest sequence. ``rows`` are its tensors, without the ``prefix`` that names those of the body in
    a whole model. ``defaults`` are of ``config.json``; ``notes`` is what does not change what the model computes.
    """

    model_type: str
    prefix: str
    defaults: Config
    mismatches: Callable[[GptOptions], list[str]]
    config: Callable[[GptOptions, int], dict[str, Any]]
    unfit: Callable[[Config], list[str]]
    model: Callable[[Config], dict[str, Any]]
    positions: str
    rows: Callable[[GptOptions], list[Row]]
    notes: Callable[[Config], list[str]]


#: The output layer, where it is no word embedding.
HEAD = "lm_head.weight"


def needs(options: GptOptions, wanted: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """``position=rope (it has learned)`` for each option that is none of the values in ``wanted``."""
    return [
        f"model.{key}={_word(getattr(options, key))} (it has {' or '.join(map(_word, values))})"
        for key, values in wanted.items()
        if getattr(options, key) not in values
    ]


def must_be(config: Config, wanted: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """``hidden_act='relu' (only 'silu')`` for each key of ``config`` that is none of the values in ``wanted``."""
    return [
        f"{key}={config.get(key)!r} (only {' or '.join(map(repr, values))})"
        for key, values in wanted.items()
        if config.get(key) not in values
    ]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
