"""How a family of Hugging Face models is described: one table, read both ways.

A family is a :class:`Family` in a file of its own, listed in ``families``. The table says

- ``keys``: which of our ``model`` options, by dotted name (``norm.eps``), is which key of their ``config.json``;
- ``fixed``: the options that all models of the family share, which no key of theirs says;
- ``only``: keys of theirs whose other values have no counterpart here; an export writes the first value,
  unless it is None;
- ``sections``: what is not one to one, each a pair of functions (``sections`` has those that families share:
  rotations, windows by layer, an activation's name);
- ``tensors``: the name of each of their modules, or of a single tensor, and ours: ``{layer}`` and ``{expert}`` stand
  for numbers. Which of them have a weight and a bias follows from our model. :class:`Fused` says how several of ours
  make one of theirs, :class:`Either` which of ours it is in layers of different kinds.
- ``model``: ours, where it is not ``gpt`` but one whose options are gpt's with more.

All else follows. An import reads the options from the keys, an export writes the keys from the options; both refuse
with the reason. An option that a family says nothing about has its default in every model of it, so that a model with
another value is refused by its name, also when the option is younger than the family.

Legend: o outputs, i inputs of a matrix, n heads, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from pydantic import BaseModel

from megatron_run.config.fields import computes_the_same, submodel, walk
from megatron_run.config.values import nested
from megatron_run_engine.formats import GptOptions, options_class

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import ReadTensor
    from megatron_run_engine.formats import Shape

#: A ``config.json``, with the family's defaults; or our options as :meth:`GptOptions.explicit` gives them.
Config = Mapping[str, Any]

Options = TypeVar("Options", bound=BaseModel)
#: Options of which it matters only whether they are 0: a rate of training, with which the model has more tensors.
_PRESENT = frozenset({"experts.router.bias_rate"})
#: Options that are equal for the same model up to rounding: square roots were taken on the way.
_ROUNDED = 1e-6
#: A module's tensors, and a name that is a tensor's itself.
_PARTS = (".weight", ".bias", "")


def _always(_: GptOptions) -> bool:
    return True


class Fused(NamedTuple):
    """Our ``modules`` that are one of theirs, stacked by rows; then transposed.

    Ours are [o, i], as in torch's Linear; ``transposed`` ones are [i, o], as in GPT-2's Conv1D. With ``by_head`` the
    rows of the first head of each come first, then those of the second: [n, parts, d]. ``order`` gives the rows of
    ours, those of a head if ``by_head``, in the order in which theirs lie. The row is in models for which ``when`` is
    true.
    """

    modules: tuple[str, ...]
    transposed: bool = False
    by_head: bool = False
    order: Callable[[Any], Sequence[int]] | None = None
    when: Callable[[Any], bool] = _always


class Either(NamedTuple):
    """The one of our ``modules`` that a layer has: a module that they have in layers with experts and without."""

    modules: tuple[str, ...]


class Row(NamedTuple):
    """Their tensor ``foreign``, made from our ``logical`` ones as :class:`Fused` says; ``heads`` is n or 1."""

    foreign: str
    logical: tuple[str, ...]
    transposed: bool = False
    heads: int = 1
    order: tuple[int, ...] = ()

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of their tensor, from the shapes of ours."""
        rows, columns = sum(shapes[name][0] for name in self.logical), shapes[self.logical[0]][1:]
        return (*columns, rows) if self.transposed else (rows, *columns)

    def pack(self, tensors: Mapping[str, ReadTensor]) -> Tensor:
        """Their tensor, from ours."""
        read = [tensors[name]().unflatten(0, (self.heads, -1)) for name in self.logical]  # each [n, d, ...]
        stacked = torch.cat(read, dim=1) if len(read) > 1 else read[0]
        stacked = (stacked[:, list(self.order)] if self.order else stacked).flatten(0, 1)
        return stacked.t() if self.transposed else stacked

    def unpack(self, read: ReadTensor, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, ReadTensor]]:
        """Readers of our tensors out of theirs, which ``read`` gives: views of them where no rows are rearranged."""
        start = 0
        for name in self.logical:
            stop = start + shapes[name][0] // self.heads
            yield name, partial(self._rows, read, start, stop)
            start = stop

    def _rows(self, read: ReadTensor, start: int, stop: int) -> Tensor:
        whole = read()
        rows: Tensor = (whole.t() if self.transposed else whole).unflatten(0, (self.heads, -1))
        if self.order:
            return at_most_fp32(rows[:, [self.order.index(row) for row in range(start, stop)]].flatten(0, 1))
        return at_most_fp32(rows[:, start:stop].flatten(0, 1))


def at_most_fp32(tensor: Tensor) -> Tensor:
    """``tensor``, which stays a view of its file unless it is float64."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _nothing(_: Config) -> list[str]:
    return []


class Section(NamedTuple):
    """Options that are not one key each.

    ``read`` gives ours of a ``config.json``, ``write`` theirs of our explicit options, whatever these are: what
    ``read`` makes of them is compared. ``unsupported`` gives every reason why a ``config.json`` has no counterpart.
    """

    read: Callable[[Config], dict[str, Any]]
    write: Callable[[Config], dict[str, Any]]
    unsupported: Callable[[Config], list[str]] = _nothing


class Family(NamedTuple):
    """One family, by its ``model_type``; the module's docstring says what the tables hold.

    ``architecture`` is the class in ``transformers``; ``positions`` is the key of the longest sequence; ``defaults``
    are the values of keys that ``config.json`` leaves out. ``dropouts`` are the keys of rates: several cover what
    ``model.dropout`` acts on, a single one covers attention alone. Names in ``tensors`` lack the ``prefix`` that the
    body of a whole model has; ``head`` is the output layer, which a tied model leaves out.
    """

    model_type: str
    architecture: str
    defaults: Config
    keys: Mapping[str, str]
    fixed: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    sections: tuple[Section, ...]
    tensors: Mapping[str, str | Fused | Either]
    dropouts: tuple[str, ...] = ("attention_dropout",)
    positions: str = "max_position_embeddings"
    prefix: str = "model."
    head: str = "lm_head"
    model: str = "gpt"

    def unsupported(self, config: Config) -> list[str]:
        """Every reason why a model with this ``config.json`` has no counterpart here."""
        return must_be(config, self.only) + [why for section in self.sections for why in section.unsupported(config)]

    def options(self, config: Config) -> dict[str, Any]:
        """Our ``model`` section, its groups as mappings. ``config`` has the family's defaults."""
        said = {option: config[key] for option, key in self.keys.items()}
        found = {**self.fixed, **{key: value for key, value in said.items() if value is not None}}
        for section in self.sections:
            found |= section.read(config)
        rates = {config[key] for key in self.dropouts}
        found["dropout"] = config[self.dropouts[0]] if len(self.dropouts) > 1 or rates == {0.0} else 0.0
        return nested(found if self.model == "gpt" else {"use": self.model, **found})

    def config(self, options: GptOptions) -> dict[str, Any]:
        """Their ``config.json`` of our ``options``; it describes another model where there are :meth:`mismatches`."""
        explicit = options.explicit()
        only = {key: values[0] for key, values in self.only.items() if values[0] is not None}
        found = {"architectures": [self.architecture], **only}
        found |= {key: explicit[option] for option, key in self.keys.items()}
        for section in self.sections:
            found |= section.write(explicit)
        return {**found, **dict.fromkeys(self.dropouts, options.dropout)}

    def mismatches(self, options: GptOptions) -> list[str]:
        """Every option in which this family differs from ``options``: ``norm=layernorm (the family has rmsnorm)``.

        The family's ``config.json`` of the options is read again: what does not come back, it cannot hold.
        """
        config = {**self.defaults, **self.config(options)}
        # Not validated: it is compared, be it possible or not.
        its = _unchecked(options_class(self.model), self.options(config)).explicit()
        wanted = options.explicit()
        unseen = {".".join(key) for key, field in walk(type(options)) if computes_the_same(field)}
        differ = [
            f"model.{key}={_value_text(value)} (the family has {_value_text(its[key])})"
            for key, value in wanted.items()
            if key not in unseen and not (_present if key in _PRESENT else _same)(value, its[key])
        ]
        return differ + self.unsupported(config)

    def notes(self, config: Config) -> list[str]:
        """Lines for the user about what an import changes without changing a logit."""
        return dropout_notes({key: config[key] for key in self.dropouts})

    def rows(self, options: GptOptions, shapes: Mapping[str, Shape]) -> list[Row]:
        """Their tensors for our model, whose tensors have these ``shapes``."""
        found = []
        for foreign, made in self._choices():
            if not made.when(options):
                continue
            order = () if made.order is None else tuple(made.order(options))
            heads = options.num_heads if made.by_head else 1
            for layer in range(options.num_layers if "{layer}" in foreign else 1):
                for expert in range(options.experts.count if "{expert}" in foreign else 1):
                    for part in _PARTS:
                        names = tuple(f"{name.format(layer=layer, expert=expert)}{part}" for name in made.modules)
                        if names[0] in shapes:
                            full = f"{foreign.format(layer=layer, expert=expert)}{part}"
                            found.append(Row(full, names, made.transposed, heads, order))
        return found

    def _choices(self) -> Iterator[tuple[str, Fused]]:
        for foreign, made in self.tensors.items():
            if isinstance(made, Either):
                yield from ((foreign, Fused((name,))) for name in made.modules)
            else:
                yield foreign, Fused((made,)) if isinstance(made, str) else made


def _unchecked(model: type[Options], given: Mapping[str, Any]) -> Options:
    """The options ``given``, groups as mappings, whatever their values."""
    groups = {name: inner for name, field in model.model_fields.items() if (inner := submodel(field.annotation))}
    made = {name: _unchecked(inner, given[name]) for name, inner in groups.items() if name in given}
    return model.model_construct(None, **{**given, **made})


def must_be(config: Config, wanted: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """``hidden_act='relu' (only 'silu')`` for each key of ``config`` whose value is not among those ``wanted``."""
    return [
        f"{key}={config.get(key)!r} (only {' or '.join(map(repr, values))})"
        for key, values in wanted.items()
        if config.get(key) not in values
    ]


def dropout_notes(rates: Config) -> list[str]:
    """The rate for several ``rates``, the first of which is taken; or of a single one, of attention alone."""
    said = ", ".join(f"{key}={rate}" for key, rate in rates.items())
    if len(rates) == 1 and any(rates.values()):
        return [f"{said} was left out: model.dropout, here 0.0, acts on more than attention"]
    if len(set(rates.values())) > 1:
        return [f"the source has {said}, and model.dropout is one rate: {next(iter(rates.values()))} was taken"]
    return []


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=_ROUNDED)
    return one == other


def _present(one: object, other: object) -> bool:
    return bool(one) == bool(other)


def _value_text(value: object) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
