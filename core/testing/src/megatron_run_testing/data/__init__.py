"""The conformance suite of kind ``data``: samples have the contract's form, and are the same always and everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, get_args

import numpy as np

from megatron_run.contracts.data import LABELS, LOSS_MASK, TOKENS, Dataset, DataSource, Field, Split
from megatron_run_testing import Check, CheckFailed
from megatron_run_testing.data.elsewhere import NotSendableError, another_rank, process_with, run_elsewhere
from megatron_run_testing.ranks import SendablePlugin

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Number of samples of each split that are checked.
LOOK = 5

#: By split, or a split's stream: its number of samples, and the hashes of some by index and field.
_Contents = Mapping[str, tuple[int, Mapping[int, Mapping[str, str]]]]


class PluginData(SendablePlugin):
    """Creates the source of a plugin; it can be sent to another process."""

    def __call__(self) -> DataSource:
        """The source, as each rank creates it."""
        source: DataSource = self.plugin.create()
        return source


def data_checks(
    source: DataSource, sequence_length: int = 32, seed: int = 7, *, create: Callable[[], DataSource] | None = None
) -> tuple[Check, ...]:
    """The checks that every source of samples must pass; ``source`` must have data for all three splits.

    ``create`` makes it anew in another process: a function of a module, or a :class:`PluginData`. Without one
    ``source`` itself is sent there, and so cannot show what it took from its process when it was made.
    """

    def opened(split: Split) -> Dataset:
        return source.dataset(split, sequence_length, seed)

    checks: dict[str, Callable[[], str | None]] = {
        "every split holds a sample": partial(_each_split, opened, _holds_a_sample),
        "samples have the fields of the contract": partial(
            _each_split, opened, partial(_fields_fit, fields=source.fields, sequence_length=sequence_length)
        ),
        "documents cover their rows": partial(_each_split, opened, partial(_documents_cover, source=source)),
        "token ids lie in the vocabulary": partial(_each_split, opened, partial(_ids_fit, source=source)),
        "the loss mask is 0 or 1": partial(_each_split, opened, _mask_fits),
        "a sample is the same every time": partial(_samples_repeat, opened),
        "a sample keeps its values when others are read": partial(_samples_keep, source, sequence_length, seed),
        "every rank finds the same samples": partial(_ranks_agree, source, create, sequence_length, seed),
        "an order of its own goes on after an epoch": partial(_order_goes_on, source, sequence_length, seed),
        "the files of the samples can be read": lambda: _files_exist(source),
        "baselines are losses": lambda: _baselines_are_losses(source.baselines(sequence_length, seed, [0])),
        "text can be encoded and decoded": lambda: _text_returns(source),
    }
    return tuple(Check(name, run) for name, run in checks.items())


def _each_split(opened: Callable[[Split], Dataset], check: Callable[[Split, Dataset], None]) -> None:
    for split in get_args(Split):
        check(split, opened(split))


def _looked_at(dataset: Dataset) -> list[int]:
    """Indices of samples spread over the dataset, including the first and the last; none if it is empty."""
    return sorted({place * (len(dataset) - 1) // (LOOK - 1) for place in range(LOOK)}) if len(dataset) else []


def _holds_a_sample(split: Split, dataset: Dataset) -> None:
    if len(dataset) < 1:
        raise CheckFailed(f"split {split} has {len(dataset)} samples; raise DataError when there is no data")


def _fields_fit(split: Split, dataset: Dataset, fields: Sequence[Field], sequence_length: int) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for index in _looked_at(dataset):
        sample = dataset[index]
        for field in (*fields, *(each for each in (TOKENS, LABELS, LOSS_MASK) if each not in fields)):
            name = field.name
            if name not in sample:
                raise CheckFailed(f"{split} sample {index} has no {name}, only {', '.join(sorted(sample))}")
            found = sample[name]
            if not isinstance(found, np.ndarray):
                raise CheckFailed(f"{split} sample {index}: {name} is a {type(found).__name__}, expected an array")
            if not field.fits(found.dtype.name, found.shape, sequence_length):
                sizes = [sequence_length if size == "s" else size for size in field.shape]
                raise CheckFailed(
                    f"{split} sample {index}: {name} is {found.dtype} {list(found.shape)}, "
                    f"expected {field.dtype} {sizes}"
                )
            if shapes.setdefault(name, found.shape) != found.shape:
                raise CheckFailed(f"{split} sample {index}: {name} is {list(found.shape)}, another is {shapes[name]}")


def _documents_cover(split: Split, dataset: Dataset, source: DataSource) -> None:
    """Documents begin at 0, never fall, and end at s; in each, positions count from 0."""
    names = {field.name for field in source.fields}
    for index in _looked_at(dataset) if "documents" in names else ():
        sample = dataset[index]
        bounds = sample["documents"].tolist()
        if bounds[0] != 0 or bounds[-1] != len(sample["tokens"]) or bounds != sorted(bounds):
            raise CheckFailed(f"{split} sample {index}: documents are {bounds}, and must rise from 0 to the last token")
        counted = [place for start, stop in pairwise(bounds) for place in range(stop - start)]
        if "positions" in names and sample["positions"].tolist() != counted:
            raise CheckFailed(f"{split} sample {index}: positions do not begin at 0 in each of documents {bounds}")


def _ids_fit(split: Split, dataset: Dataset, source: DataSource) -> None:
    for index in _looked_at(dataset):
        for name in ("tokens", "labels"):
            ids = dataset[index][name].astype(np.int64)
            if ids.min() < 0 or ids.max() >= source.vocab_size:
                raise CheckFailed(
                    f"{split} sample {index}: {name} reach from {ids.min()} to {ids.max()}, "
                    f"the vocabulary from 0 to {source.vocab_size - 1}"
                )


def _mask_fits(split: Split, dataset: Dataset) -> None:
    for index in _looked_at(dataset):
        mask = np.ravel(dataset[index].get("loss_mask", ()))  # that there is one is another check's to find
        wrong = np.flatnonzero((mask != 0) & (mask != 1))  # NaN too: it equals neither
        if wrong.size:
            place = int(wrong[0])
            raise CheckFailed(f"{split} sample {index}: loss_mask[{place}] is {mask[place]}, and must be 0 or 1")


def _samples_repeat(opened: Callable[[Split], Dataset]) -> None:
    """Read samples twice, the second time in reverse and from a newly opened dataset, to reveal hidden state."""
    for split in get_args(Split):
        first, again = opened(split), opened(split)
        if len(first) != len(again):
            raise CheckFailed(f"split {split} has {len(first)} samples, and {len(again)} when opened again")
        indices = _looked_at(first)
        before = {index: _copied(first[index]) for index in indices}
        for index in reversed(indices):
            if changed := _changed(before[index], again[index]):
                raise CheckFailed(f"{split} sample {index} differs in {changed[0]} when it is asked for again")


def _order_goes_on(source: DataSource, sequence_length: int, seed: int) -> str:
    """Read the stream of a source with an order of its own across the end of an epoch, forwards and backwards."""
    for split in get_args(Split):
        first, again = (source.stream(split, sequence_length, seed, 4 * LOOK) for _ in range(2))
        if first is None or again is None:
            return "the trainer shuffles"
        indices = [*_looked_at(first), len(first), len(first) + 1]
        try:
            before = {index: _copied(first[index]) for index in indices}
        except IndexError as cause:
            raise CheckFailed(f"{split} stream of {len(first)} samples has no next epoch: {cause}") from cause
        for index in reversed(indices):
            if changed := _changed(before[index], again[index]):
                raise CheckFailed(f"{split} sample {index} of the stream differs in {changed[0]} when it is read again")
    return ""


def _orders(source: DataSource, sequence_length: int, seed: int) -> Iterator[tuple[str, Dataset]]:
    """Every split by name, and its stream where the source has an order of its own."""
    for split in get_args(Split):
        yield split, source.dataset(split, sequence_length, seed)
        stream = source.stream(split, sequence_length, seed, 4 * LOOK)
        if stream is not None:
            yield f"{split} stream", stream


def _samples_keep(source: DataSource, sequence_length: int, seed: int) -> None:
    """Hold samples as they were given while others are read, to reveal arrays that are used again."""
    for name, dataset in _orders(source, sequence_length, seed):
        held = [(index, sample, _copied(sample)) for index in _looked_at(dataset) for sample in (dataset[index],)]
        for index, sample, before in held:
            if changed := _changed(before, sample):
                raise CheckFailed(
                    f"{name} sample {index} changes in {changed[0]} when another is read; give each arrays of its own"
                )


def _ranks_agree(
    source: DataSource, create: Callable[[], DataSource] | None, sequence_length: int, seed: int
) -> str | None:
    """Open the data in a process with the environment of another rank, and compare what is there."""
    here, environment = _contents(source, sequence_length, seed), another_rank()
    try:
        there = run_elsewhere(_opened_elsewhere, environment, create or source, sequence_length, seed)
    except NotSendableError as cause:
        return f"{cause}; check the plugin itself, by megatron-run plugins check"
    where = process_with(environment)
    rule = (
        "samples depend on options and arguments alone: take nothing from the rank, from hash() of a text or the time"
    )
    for name in {**here, **there}:
        (count, samples), (other, others) = here.get(name, (0, {})), there.get(name, (0, {}))
        if count != other:
            raise CheckFailed(f"{name} has {count} samples, and {other} {where}; {rule}")
        for index, hashes in samples.items():
            if changed := [field for field in hashes if hashes[field] != others[index].get(field)]:
                raise CheckFailed(f"{name} sample {index} differs in {changed[0]} {where}; {rule}")
    return None


def _opened_elsewhere(subject: DataSource | Callable[[], DataSource], sequence_length: int, seed: int) -> _Contents:
    return _contents(subject if isinstance(subject, DataSource) else subject(), sequence_length, seed)


def _contents(source: DataSource, sequence_length: int, seed: int) -> _Contents:
    """The content of ``source``, in a form that processes can compare."""
    return {
        name: (len(dataset), {index: _hashes(dataset[index]) for index in _looked_at(dataset)})
        for name, dataset in _orders(source, sequence_length, seed)
    }


def _hashes(sample: Mapping[str, NDArray[np.generic]]) -> dict[str, str]:
    return {
        name: sha256(f"{value.dtype} {value.shape} ".encode() + value.tobytes()).hexdigest()
        for name, value in _copied(sample).items()
    }


def _copied(sample: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
    return {name: np.array(value) for name, value in sample.items()}


def _changed(before: Mapping[str, NDArray[np.generic]], after: Mapping[str, NDArray[np.generic]]) -> list[str]:
    """The fields that are other bits now: NaN is the same as itself, and a mask of it is another check's to find."""
    earlier, later = _hashes(before), _hashes(after)
    return [name for name in earlier if earlier[name] != later.get(name)]


def _files_exist(source: DataSource) -> str:
    """A run records what they hold."""
    for path in source.files:
        if not path.is_file():
            raise CheckFailed(f"files names {path}, which is no file")
    return "" if source.files else "it names no files: when these change, a run that goes on may not notice"


def _baselines_are_losses(baselines: Mapping[str, float]) -> str:
    for name, loss in baselines.items():
        if not (isfinite(loss) and loss >= 0):
            raise CheckFailed(f"baseline {name!r} is {loss}; a loss in nats per token is finite and not negative")
    return "" if baselines else "it has no baselines"


def _text_returns(source: DataSource) -> str:
    text = "def add(a, b):\n    return a + b\n"
    ids = source.encode(text)
    if ids is None:
        if source.decode([0]) is not None:
            raise CheckFailed("decode gives text, but encode gives None: data is text or it is not")
        return "the data is not text"
    if any(not 0 <= token < source.vocab_size for token in ids):
        raise CheckFailed(f"encode gives {list(ids)}, the vocabulary reaches from 0 to {source.vocab_size - 1}")
    if not isinstance(source.decode(ids), str):
        raise CheckFailed(f"encode gives ids, but decode of them gives {source.decode(ids)!r}")
    return ""
