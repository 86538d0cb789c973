"""How a family of Hugging Face models is described: its configuration, and its tensors as made from ours.

Legend: o outputs, i inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import ReadTensor
    from megatron_run_engine.formats.gpt_tensors import GptOptions, Shape

#: A ``config.json``.
Config = Mapping[str, Any]


class Row(NamedTuple):
    """One tensor of ``theirs``, made from those of ``ours``: stacked by rows, then transposed.

    Ours are [o, i], as in torch's Linear; ``transposed`` ones are [i, o], as in GPT-2's Conv1D.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of their tensor, from the shapes of ours."""
        rows, columns = sum(shapes[name][0] for name in self.ours), shapes[self.ours[0]][1:]
        return (*columns, rows) if self.transposed else (rows, *columns)

    def pack(self, tensors: Mapping[str, ReadTensor]) -> Tensor:
        """Their tensor, from ours."""
        read = [tensors[name]() for name in self.ours]
        stacked = torch.cat(read) if len(read) > 1 else read[0]
        return stacked.t() if self.transposed else stacked

    def unpack(self, read: ReadTensor, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, ReadTensor]]:
        """Readers of our tensors, in fp32, out of theirs, which ``read`` gives."""
        start = 0
        for name in self.ours:
            stop = start + shapes[name][0]
            yield name, partial(self._rows, read, start, stop)
            start = stop

    def _rows(self, read: ReadTensor, start: int, stop: int) -> Tensor:
        theirs = read()
        return (theirs.t() if self.transposed else theirs)[start:stop].float()


class Family(NamedTuple):
    """One family, by its ``model_type``.

    Export: ``mismatches`` gives every reason why a model of ours is not of this family; where there is none,
    ``config`` gives its ``config.json``. Import: ``unsupported`` gives every reason why a ``config.json`` has no
    counterpart; where there is none, ``model`` gives our ``model`` section. ``positions`` is the key of the longest
    sequence, ``defaults`` are the values of keys that ``config.json`` leaves out, ``notes`` tell the user about
    differences that change no logit. ``rows`` are the tensors, by names without the ``prefix`` that the body of a whole
    model has.
    """

    model_type: str
    prefix: str
    defaults: Config
    mismatches: Callable[[GptOptions], list[str]]
    config: Callable[[GptOptions, int], dict[str, Any]]
    unsupported: Callable[[Config], list[str]]
    model: Callable[[Config], dict[str, Any]]
    positions: str
    rows: Callable[[GptOptions], list[Row]]
    notes: Callable[[Config], list[str]]


#: The output layer of an untied model.
HEAD = "lm_head.weight"


def needs(options: GptOptions, wanted: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """``position=rope (it has learned)`` for each option whose value is not among those ``wanted``."""
    return [
        f"model.{key}={_word(getattr(options, key))} (it has {' or '.join(map(_word, values))})"
        for key, values in wanted.items()
        if getattr(options, key) not in values
    ]


def must_be(config: Config, wanted: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """``hidden_act='relu' (only 'silu')`` for each key of ``config`` whose value is not among those ``wanted``."""
    return [
        f"{key}={config.get(key)!r} (only {' or '.join(map(repr, values))})"
        for key, values in wanted.items()
        if config.get(key) not in values
    ]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
