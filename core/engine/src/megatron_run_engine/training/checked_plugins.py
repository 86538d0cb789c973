"""Holds layers, data sources and scalers to their contracts, where torch's own error would name no plugin.

The conformance suites check more, and before a run; what is checked here is cheap enough for every sample and step.
Layers are checked as a factory makes them: each declares a ``ParameterSpec`` for each of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from math import isfinite
from shlex import quote
from typing import TYPE_CHECKING, Concatenate, ParamSpec

import numpy as np
import torch
from torch import nn

from megatron_run.contracts import AttentionCore, ParallelLayers, Pieces, Scaler, StackedLayers
from megatron_run.contracts.data import DOCUMENTS, LABELS, LOSS_MASK, POSITIONS, TOKENS
from megatron_run.errors import DataError, InputError, PluginError, RunError
from megatron_run.registry.hooks import in_one_line, said_type
from megatron_run_engine.runtime.parameter_init import unspecified

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from megatron_run.contracts import Chunk, Dataset, DataSource, Field
    from megatron_run.contracts.data import Split
    from megatron_run.registry.loaded_plugin import Plugin

#: Fields of a sample that index a table of the size of the vocabulary, and must therefore lie within it.
_IDS = ("tokens", "labels")
#: What a plugin's code raises and torch, whose errors have other causes too, does not; and all that either may raise.
_RAISED = (ArithmeticError, AttributeError, LookupError, SystemExit, TypeError, ValueError)
_ANY = (Exception, SystemExit)
P = ParamSpec("P")


def _checked(
    make: Callable[Concatenate[StackedLayers, P], nn.Module],
) -> Callable[Concatenate[CheckedLayers, P], nn.Module]:
    """``make``, a method of :class:`StackedLayers`, for :class:`CheckedLayers`, which looks at the layer."""

    @wraps(make)
    def made_and_checked(self: CheckedLayers, /, *arguments: P.args, **options: P.kwargs) -> nn.Module:
        try:
            layer = make(self, *arguments, **options)
        except (RunError, MemoryError):
            raise
        except (AttributeError, LookupError, SystemExit, TypeError) as cause:  # what a plugin's code raises, not torch
            missing = getattr(cause, "name", "") == "base"
            hint = "; call super().__init__(base) in the factory's __init__" if missing else ""
            raise self.failed(make.__name__, in_one_line(cause) + hint) from cause
        return self.check(make.__name__, layer)

    return made_and_checked


class CheckedLayers(StackedLayers):
    """Passes on the layers of ``base``. Raises :class:`PluginError` for a layer that breaks its contract.

    That is what is no layer, what cannot be made, and a parameter without ``parameter_specs``: it would train, but with
    an undefined initialisation, and with a wrong gradient where its gradient is a partial sum, as under sequence
    parallelism. ``name`` is the factory's name in errors, and ``pieces`` what this rank holds of samples.
    """

    def __init__(self, base: ParallelLayers, name: str, pieces: Pieces) -> None:
        super().__init__(base)
        self._name, self._pieces = name, pieces

    def check(self, method: str, layer: nn.Module) -> nn.Module:
        """Return ``layer``, made by ``method``. Raises :class:`PluginError` if it is no layer, or lacks a spec."""
        if not isinstance(layer, nn.Module) or "_modules" not in vars(layer):
            without = f"a {type(layer).__name__} without nn.Module.__init__" if isinstance(layer, nn.Module) else ""
            raise self.failed(method, f"it returned {without or said_type(layer)}, and must return a torch.nn.Module")
        if missing := unspecified(layer):
            raise PluginError(
                f"{method} of {self._name} returned {type(layer).__name__}, which does not say what {missing} is",
                why="parameter_specs, a dict on the module that owns a parameter, say how it starts, and over which "
                "ranks its gradient is a part of a sum",
                fix=f'set self.parameter_specs = {{"{missing.rpartition(".")[2]}": ParameterSpec(Init(...))}} there',
            )
        if method == "core_attention" and self._pieces.ranks > 1 and not AttentionCore.of(layer).pieces:
            raise InputError(
                f"the attention of {self._name} sees only the tokens of its own rank, and parallel.context="
                f"{self._pieces.ranks} splits those of a sample",
                fix="name context last, as in --plugin parallel-layer=tensor+context, or set parallel.context=1",
            )
        return layer

    def failed(self, method: str, why: str) -> PluginError:
        """Return the error of what ``method`` of the factory did."""
        return PluginError(
            f"{self._name}: {method} failed",
            why=why,
            fix="correct the plugin, or see the whole cause with --debug",
        )

    column_linear = _checked(StackedLayers.column_linear)
    row_linear = _checked(StackedLayers.row_linear)
    vocab_embedding = _checked(StackedLayers.vocab_embedding)
    output_layer = _checked(StackedLayers.output_layer)
    norm = _checked(StackedLayers.norm)
    dropout = _checked(StackedLayers.dropout)
    core_attention = _checked(StackedLayers.core_attention)
    cross_entropy = _checked(StackedLayers.cross_entropy)
    expert_column_linear = _checked(StackedLayers.expert_column_linear)
    expert_row_linear = _checked(StackedLayers.expert_row_linear)


def module_of(chunk: Chunk) -> nn.Module:
    """``chunk`` as the module that it is in practice. Raises :class:`PluginError` if it is none."""
    module: object = chunk
    if not isinstance(module, nn.Module):
        fix = "derive the chunk from torch.nn.Module"
        raise PluginError(f"the model built {said_type(chunk)}, which is no torch.nn.Module", fix=fix)
    return module


class CheckedDataset:
    """Samples of ``dataset``, which belongs to ``split`` of ``plugin``; ``vocab_size`` is its number of token ids.

    ``in_order``: the run reads them by ascending index; False: it shuffles.
    Raises :class:`DataError` for a sample with a token outside the vocabulary, a loss mask that is not 0 or 1, fields
    that are no arrays or not what ``fields`` declare, or documents that do not cover its row, and :class:`PluginError`
    for one that cannot be read.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        plugin: Plugin,
        vocab_size: int,
        sequence_length: int,
        fields: Iterable[Field] = (),
        *,
        in_order: bool = False,
    ) -> None:
        self._dataset, self._split, self._plugin = dataset, split, plugin
        self._vocab_size, self._length = vocab_size, sequence_length
        self._fields = (LOSS_MASK, *(field for field in fields if field not in (TOKENS, LABELS, LOSS_MASK)))
        self.in_order = in_order

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Mapping[str, NDArray[np.generic]]:
        """Return sample ``index``, checked."""
        try:
            sample = self._dataset[index]
        except RunError:
            raise
        except (Exception, SystemExit) as cause:
            raise self._plugin.failed(f"{self._split} sample {index}", in_one_line(cause)) from cause
        if not isinstance(sample, Mapping):
            why = f"it is {said_type(sample)}, and must map names of fields to arrays"
            raise self._plugin.failed(f"{self._split} sample {index}", why)
        for name in _IDS:
            if name in sample:
                self._check_ids(index, name, sample[name])
        for field in self._fields:
            if field.name in sample:
                self._check_field(index, field, sample[field.name])
        for name, found in sample.items():
            if not isinstance(found, np.ndarray) or found.dtype.hasobject:  # also what is not declared is hashed
                raise self._broken(index, f"{name} is {said_type(found)}, and must be an array of numbers")
        return sample

    def _check_field(self, index: int, field: Field, found: NDArray[np.generic]) -> None:
        if not isinstance(found, np.ndarray) or not field.fits(found.dtype.name, found.shape, self._length):
            is_ = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else said_type(found)
            raise self._broken(index, f"{field.name} is {is_}, and is declared as {field}")
        if field == LOSS_MASK and not ((found == 0) | (found == 1)).all():  # false for NaN too
            place = int(np.flatnonzero((found != 0) & (found != 1))[0])
            raise self._broken(index, f"loss_mask[{place}] is {found[place]}, and must be 0 or 1")
        if field == DOCUMENTS and not _covers(found, self._length):
            span = f"from {found[0]} to {found[-1]}" if len(found) else "nowhere"
            why = f"documents go {span}; they must begin with 0, never fall and end with {self._length}"
            raise self._broken(index, why)
        if field == POSITIONS and not 0 <= int(found.min()) <= int(found.max()) < self._length:
            why = f"positions reach from {found.min()} to {found.max()}, and must from 0 to {self._length - 1}"
            raise self._broken(index, why)

    def _check_ids(self, index: int, name: str, ids: object) -> None:
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.shape != (self._length,):
            found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else said_type(ids)
            raise self._broken(index, f"{name} are {found}, and must be int64 [{self._length}]")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            place = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
            why = f"{name}[{place}] is {ids[place]}, and vocab_size is {self._vocab_size}"
            raise self._broken(index, why)

    def _broken(self, index: int, why: str) -> DataError:
        return DataError(
            f"{self._split} sample {index} of plugin {self._plugin} of {self._plugin.source} cannot be trained on",
            why=why,
            origin=self._plugin.origin,
            fix="correct the plugin; to see what else it breaks: megatron-run plugins check "
            f"{quote(f'data={self._plugin.reference}')}",
        )


def open_split(
    plugin: Plugin,
    source: DataSource,
    split: Split,
    sequence_length: int,
    seed: int,
    samples: int | None = None,
    *,
    most_ids: int | None = None,
) -> CheckedDataset:
    """Open ``split`` of the data ``source`` that ``plugin`` made, of which the run reads ``samples`` samples.

    ``most_ids`` is the vocabulary of the model, which may lack the last ids of the data. Samples come in the order of
    the source, if it has one; with None in that of its files, for a look without a run. Raises what
    :class:`CheckedDataset` does.
    """
    try:
        ordered = None if samples is None else source.stream(split, sequence_length, seed, samples)
        dataset = source.dataset(split, sequence_length, seed) if ordered is None else ordered
        len(dataset)
    except RunError:
        raise
    except (Exception, SystemExit) as cause:
        raise plugin.failed(f"opening split {split}", in_one_line(cause)) from cause
    in_order = ordered is not None
    ids = source.vocab_size if most_ids is None else min(source.vocab_size, most_ids)
    return CheckedDataset(dataset, split, plugin, ids, sequence_length, source.fields, in_order=in_order)


def _covers(documents: NDArray[np.generic], length: int) -> bool:
    """Whether ``documents`` [d] begin at 0, never fall and end at ``length``."""
    ends = len(documents) > 1 and documents[0] == 0 and documents[-1] == length
    return bool(ends and (documents[1:] >= documents[:-1]).all())  # type: ignore[operator]  # they are int64


class CheckedScaler(Scaler):
    """``scaler``, made by ``plugin``.

    Raises :class:`PluginError` where a method fails, where the scale moves or is no scale, and where it changes without
    a state.
    """

    def __init__(self, scaler: Scaler, plugin: Plugin) -> None:
        self._scaler, self._plugin = scaler, plugin
        first = scaler.scale
        if first.dtype != torch.float32 or tuple(first.shape) != (1,):
            raise plugin.failed("scale", f"it is {first.dtype} {list(first.shape)}, and must be torch.float32 [1]")
        self._address = first.data_ptr()
        self._first: float | None = None
        self._has_state = False

    @property
    def scale(self) -> Tensor:
        """The scale of the plugin, at the address that it had at first."""
        scale = self._scaler.scale
        if scale.data_ptr() != self._address:
            why = "scale moved, and captured graphs hold the old address; write into it, as mul_ and fill_ do"
            raise self._plugin.failed("update", why)
        return scale

    @property
    def inv_scale(self) -> Tensor:
        """As the plugin has it."""
        return self._scaler.inv_scale

    def update(self, found_inf: Tensor) -> None:
        """Update the plugin's scale."""
        with self._named("update", _RAISED):
            self._scaler.update(found_inf)

    def state_dict(self) -> Mapping[str, float]:
        """The state of the plugin."""
        with self._named("state_dict"):
            state = self._scaler.state_dict()
            unfit = [f"{key} is {value}" for key, value in state.items() if not isfinite(value)]
        if unfit:
            raise self._plugin.failed("state_dict", f"{unfit[0]}, and must be finite: no run could be resumed")
        return state

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load the plugin's state."""
        with self._named("load_state_dict", where=f"; the saved state has {', '.join(state) or 'nothing'}"):
            self._scaler.load_state_dict(state)

    @contextmanager
    def _named(self, method: str, raised: tuple[type[BaseException], ...] = _ANY, where: str = "") -> Iterator[None]:
        try:
            yield
        except (RunError, MemoryError):
            raise
        except raised as cause:
            raise self._plugin.failed(method, in_one_line(cause) + where) from cause

    def check_state(self, scale: float) -> None:
        """Check that the scale is one, and that one that changes has a state.

        ``scale`` is that of the last step, already on the host.
        """
        if not (isfinite(scale) and scale > 0):
            raise self._plugin.failed("update", f"the scale became {scale:g}, and must be finite and above 0")
        self._first = scale if self._first is None else self._first
        if scale != self._first and not self._has_state:
            if not self.state_dict():
                why = f"it is empty, and the scale went from {self._first:g} to {scale:g}: no run could be resumed"
                raise self._plugin.failed("state_dict", why)
            self._has_state = True
