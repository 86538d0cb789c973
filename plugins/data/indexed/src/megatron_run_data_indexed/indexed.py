"""The source of samples: which files, which part of them, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run.contracts import Dataset, DataSource, Split
from megatron_run.contracts.data import Field
from megatron_run.errors import DataError, InputError
from megatron_run.errors.wording import plural
from megatron_run_data_indexed import megatron_order
from megatron_run_data_indexed.blend import blend, normalised, places_in
from megatron_run_data_indexed.cache import cached, key, within
from megatron_run_data_indexed.megatron_order import GPTIndex
from megatron_run_data_indexed.preparation.about import about_path, ends_of, made_with
from megatron_run_data_indexed.samples import (
    Blend,
    GPTSamples,
    Joined,
    Known,
    Ordered,
    Part,
    SampleForm,
    Samples,
    Shuffled,
    blend_of,
)
from megatron_run_engine.data import PACKED_FIELDS, SPLITS, PackedDocuments, require_ids, same_shape
from megatron_run_engine.data.indexed_files import IndexedReader, files_of, open_tokens, prefix_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run_data_indexed.cache import Arrays
    from megatron_run_data_indexed.options import IndexedOptions
    from megatron_run_data_indexed.samples import Windows
    from megatron_run_engine.data import Tokenizer

#: Samples after which the choices of a weighted blend start again under ``order=permuted``, which keeps no index file:
#: the shares are exact to one sample in as many. Up to here they are megatron-core's.
PERIOD = 2**16


class Indexed(DataSource):
    """Datasets in .bin and .idx files. They are opened, and checked, when a split is first opened."""

    def __init__(self, options: IndexedOptions) -> None:
        self._options = options
        self._packs = options.packing == "documents"

    @cached_property
    def _readers(self) -> tuple[IndexedReader, ...]:
        readers = tuple(open_tokens(path) for path in self._options.paths)
        for reader in readers:
            self._check_vocabulary(reader.path.with_suffix(""))
        require_ids(readers, self.vocab_size)
        return readers

    def _check_vocabulary(self, prefix: Path) -> None:
        """Raise :class:`DataError` where ``data prepare`` has recorded another vocabulary than the run's."""
        made = made_with(prefix)
        if made is None:
            return
        why = f"{about_path(prefix)} says that {made.name} made it, with {made.vocab_size} ids"
        if self._tokenizer is not None and not made.fits(self._tokenizer):
            raise DataError(
                f"data.tokenizer={self._options.tokenizer} did not make the tokens of {prefix}",
                why=why,
                origin="data.paths",
                fix=f"set data.tokenizer={made.name}, or prepare the texts again",
            )
        if self.vocab_size < made.vocab_size:
            raise DataError(
                f"data.vocab_size={self.vocab_size} is too small for {prefix}",
                why=why,
                origin="data.paths",
                fix=f"set data.vocab_size={made.vocab_size}",
            )

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if self._options.tokenizer is None:
            return None
        from megatron_run_engine.data import open_tokenizer

        return open_tokenizer(self._options.tokenizer)

    @cached_property
    def _form(self) -> SampleForm:
        options = self._options
        asked = options.mask_end, options.reset_positions, options.reset_attention
        if any(asked):
            self._check_ends()
        return SampleForm(self.end_of_text, *asked)

    @cached_property
    def _ends(self) -> dict[int | None, Path]:
        """The tokens that end documents, each with a dataset: as asked for, as prepared, or the tokenizer's."""
        prefixes = [prefix_of(path) for path in self._options.paths]
        if self._options.end_of_document is not None:
            return {self._options.end_of_document: prefixes[0]}
        return ends_of(prefixes, None if self._tokenizer is None else self._tokenizer.end_of_document)

    def _check_ends(self) -> None:
        """Raise :class:`InputError` unless one known token ends the documents of all datasets."""
        looks = "data.mask_end, data.reset_positions and data.reset_attention look for it"
        if self.end_of_text is not None and len(self._ends) == 1:
            return
        if len(self._ends) > 1:
            each = ", ".join(f"{prefix}: {'none' if end is None else end}" for end, prefix in self._ends.items())
            raise InputError(
                f"documents end with different tokens ({each})",
                why=looks,
                origin="data.paths",
                fix="prepare them with one --end-of-document, or set data.end_of_document to an id",
            )
        raise InputError(
            "the token that ends a document is not known",
            why=looks,
            fix="set data.end_of_document to its id, or data.tokenizer",
        )

    @property
    def fields(self) -> tuple[Field, ...]:
        """Positions and bounds of documents too, where they are packed or reset."""
        return PACKED_FIELDS if self._packs else self._form.names

    @property
    def vocab_size(self) -> int:
        """``data.vocab_size``, or the number of ids of the tokenizer. Raises :class:`InputError` without either."""
        if self._options.vocab_size is not None:
            return self._options.vocab_size
        if self._tokenizer is not None:
            return self._tokenizer.vocab_size
        raise InputError(
            "the vocabulary of the data is not known",
            why=".bin and .idx files hold token ids, and do not say of how many",
            fix="set data.tokenizer to the tokenizer that made them, or data.vocab_size",
        )

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        """Open ``split`` in the order of the files. Raises :class:`DataError` as :meth:`stream`."""
        return self._with_fields(Joined(self._parts(split, sequence_length)))

    def _with_fields(self, ordered: Ordered[Any]) -> Dataset:
        # Packed rows have the fields.
        return Known(ordered if self._packs else Samples(ordered, self._form), lambda: self.vocab_size)

    def summary(self, sequence_length: int, seed: int) -> str:
        """How full the rows of packed documents are."""
        if not self._packs:
            return ""
        parts = zip(self._options.paths, self._parts("train", sequence_length), strict=True)
        return "; ".join(f"{path}: {part}" for path, part in parts)

    def stream(self, split: Split, sequence_length: int, seed: int, samples: int) -> Dataset:
        """Open ``split`` in the order of ``data.order``.

        A validation or test split to which ``data.split`` gives nothing is empty. Raises :class:`DataError` for files
        that are missing or damaged, and for a split that is too short for one sample.
        """
        parts = self._parts(split, sequence_length)
        if not any(len(part) for part in parts):
            return self._with_fields(Joined(parts))
        windows: Ordered[Any]
        if self._options.order == "megatron":
            windows = self._as_megatron(parts, split, sequence_length, seed, samples)
        else:
            windows = self._permuted(parts, seed, SPLITS.index(split))
        return self._with_fields(windows)

    def _bounds(self, reader: IndexedReader, split: Split) -> tuple[int, int]:
        """Return the sequences of ``split``. megatron-core counts sequences, so a document may end within a split."""
        if self._options.order == "megatron":
            return megatron_order.split_bounds(self._options.split, len(reader))[SPLITS.index(split)]
        first, last = megatron_order.split_bounds(self._options.split, len(reader.documents) - 1)[SPLITS.index(split)]
        return int(reader.documents[first]), int(reader.documents[last])

    def _parts(self, split: Split, sequence_length: int) -> Sequence[Ordered[Any]]:
        """Return the samples of every dataset, in the order of its file or as they were packed."""
        parts: Sequence[Part | PackedDocuments]
        if self._packs:
            parts = packed = [self._packed(reader, split, sequence_length) for reader in self._readers]
            same_shape(packed)
        else:
            parts = [Part(reader, *self._bounds(reader, split), sequence_length) for reader in self._readers]
        share = self._options.split[SPLITS.index(split)] / sum(self._options.split)
        short = [number for number, part in enumerate(parts) if not len(part)]
        if share and short and (self._options.weights or len(short) == len(parts)):
            raise self._too_short(split, share, short[0], sequence_length)
        return parts

    def _packed(self, reader: IndexedReader, split: Split, sequence_length: int) -> PackedDocuments:
        first, last = megatron_order.split_bounds(self._options.split, len(reader.documents) - 1)[SPLITS.index(split)]
        bounds = reader.token_bounds(reader.documents[first : last + 1])
        padding = self.end_of_text or 0  # no label, and a document by itself
        return PackedDocuments(reader.tokens, bounds, sequence_length, padding=padding)

    def _too_short(self, split: Split, share: float, number: int, sequence_length: int) -> DataError:
        reader = self._readers[number]
        first, last = self._bounds(reader, split)
        tokens = reader.token_at(last) - reader.token_at(first)
        needed = "a document needs 2" if self._packs else f"a sample needs {sequence_length + 1}"
        ways = [f"give {split} a larger share with data.split"]
        if first == last:  # no share is large enough where there are fewer documents than splits
            ways = ["make more documents of its texts (megatron-run data prepare --separator)", "set data.split=1,0,0"]
        elif tokens > 1 and not self._packs:
            ways.append(f"lower train.sequence_length to {tokens - 1}")
        return DataError(
            f"the {split} split of {self._options.paths[number]} is too short for one sample",
            why=f"{share:.1%} of {plural(len(reader.documents) - 1, 'document')} came to {plural(tokens, 'token')}, "
            f"and {needed}",
            origin="data.paths and data.split",
            fix=", or ".join(ways),
        )

    def _permuted(self, parts: Sequence[Ordered[Any]], seed: int, place: int) -> Ordered[Any]:
        if not self._options.weights:
            return Shuffled(Joined(parts), seed, place)
        choices = blend(self._options.weights, PERIOD)
        rare = np.flatnonzero(np.bincount(choices, minlength=len(parts)) == 0)
        if rare.size:
            raise InputError(
                f"data.weights gives {self._options.paths[rare[0]]} less than one sample in {PERIOD}",
                fix="raise its weight, leave it out, or set data.order=megatron",
            )
        return blend_of((Shuffled(part, seed, place, number) for number, part in enumerate(parts)), choices)

    def _as_megatron(
        self, parts: Sequence[Ordered[Any]], split: Split, sequence_length: int, seed: int, samples: int
    ) -> Windows:
        """Return what megatron-core reads. Held-out splits are read once, however many samples are asked for."""
        train, weights = split == "train", self._options.weights
        if train:
            samples = self._options.samples or samples
        opened = partial(self._gpt, split, sequence_length, seed)
        if len(self._readers) == 1:
            return opened(self._readers[0], samples if train else None)
        if weights:
            size, each = megatron_order.samples_of_each(weights, samples)
            datasets = [opened(reader, one if train else None) for reader, one in zip(self._readers, each, strict=True)]
            return self._blended(datasets, normalised(weights).tolist(), size)  # and once more there, as theirs
        held = [opened(reader, None) for reader, part in zip(self._readers, parts, strict=True) if len(part)]
        sizes = [len(dataset) for dataset in held]
        return self._blended(held, sizes, min(samples, sum(sizes)))

    def _gpt(
        self, split: Split, sequence_length: int, seed: int, reader: IndexedReader, samples: int | None
    ) -> GPTSamples:
        first, last = bounds = self._bounds(reader, split)
        made_from = (reader.lengths[first:last], bounds, sequence_length, samples, seed)
        build = partial(megatron_order.build, reader.lengths, bounds, sequence_length, samples, seed)

        def fits(found: Arrays) -> bool:
            return megatron_order.fits(GPTIndex(**found), reader.lengths, bounds, sequence_length, samples)

        arrays = cached(self._folder, f"gpt-{key(*made_from)}", GPTIndex._fields, build, fits)
        return GPTSamples(reader, GPTIndex(**arrays), sequence_length)

    def _blended(self, datasets: Sequence[Windows], weights: Sequence[float], size: int) -> Windows:
        def build() -> tuple[NDArray[np.int16], NDArray[np.int64]]:
            choices = blend(weights, size)
            return choices, places_in(choices, len(datasets))

        def fits(found: Arrays) -> bool:
            return within(found["choices"], (np.int16, (size,)), 0, len(datasets)) and within(
                found["places"], (np.int64, (size,)), 0, size
            )

        arrays = cached(self._folder, f"blend-{key(list(weights), size)}", ("choices", "places"), build, fits)
        return Blend(datasets, arrays["choices"], arrays["places"])

    @property
    def _folder(self) -> Path | None:
        return None if self._options.cache is None else Path(self._options.cache).expanduser()

    @property
    def files(self) -> tuple[Path, ...]:
        """Both files of each dataset."""
        return files_of(self._options.paths)

    @property
    def tokenizer_file(self) -> Path | None:
        """The file of ``data.tokenizer`` that is kept beside the weights, None without one."""
        if self._options.tokenizer is None:
            return None
        from megatron_run_engine.data import json_file

        return json_file(self._options.tokenizer)

    def encode(self, text: str) -> Sequence[int] | None:
        """Return the token ids of ``text``; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.encode_text(text)

    def encode_prompt(self, text: str) -> Sequence[int] | None:
        """Return the token ids of ``text`` with the tokens around a text; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.encode_prompt(text)

    @property
    def special_tokens(self) -> Mapping[str, tuple[str, int]]:
        """As the tokenizer's folder says."""
        return {} if self._tokenizer is None else self._tokenizer.special_tokens()

    def decode(self, tokens: Sequence[int]) -> str | None:
        """Return the text of ``tokens``; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.decode(tokens)

    def chat_template(self, *, tools: bool = False) -> str | None:
        """As the tokenizer's folder says."""
        return None if self._tokenizer is None else self._tokenizer.template(tools=tools)

    @property
    def end_of_text(self) -> int | None:
        """``data.end_of_document``, what ``data prepare`` has recorded, or the tokenizer's, in this order."""
        return next((end for end in self._ends if end is not None), None)
