"""Reading data: indices, blends and samples of data=indexed, against megatron-core's.

    python -m benchmarks.data [--quick]

Megatron-core builds its sample index and blends with compiled helpers, and shuffles with NumPy. The sides take turns
in one process and one thread, and the same results are asked for before anything is timed. What is compared is
processor time, which other work on the machine does not lengthen as much.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.support.command import run
from benchmarks.support.report import table
from megatron_run_data_indexed import megatron_run_create_data
from megatron_run_data_indexed.blend import blend, places_in
from megatron_run_data_indexed.megatron_order import build
from megatron_run_data_indexed.options import IndexedOptions
from megatron_run_engine.data.indexed_files import IndexedReader, IndexedWriter

S, SEED = 1024, 1234
#: Documents and their mean length: 100 million tokens; with --quick, 10 million.
DOCUMENTS, LENGTH = 200_000, 500
RUNS, FEW = 9, 3
#: Samples of a blend, and random ones that are read.
BLENDED, READ = 10**6, 4000


def paired(first: Callable[[], object], second: Callable[[], object], runs: int) -> tuple[float, float, float]:
    """The median processor seconds of both, which take turns, and the median of their ratios first/second."""
    times = []
    for _ in range(runs + 1):
        pair = []
        for work in (first, second):
            start = time.process_time()
            work()
            pair.append(time.process_time() - start)
        times.append(pair)
    first_seconds, second_seconds = zip(*times[1:], strict=True)  # the first of each warms up
    ratios = [one / other for one, other in times[1:]]
    return statistics.median(first_seconds), statistics.median(second_seconds), statistics.median(ratios)


def write_corpus(prefix: Path, documents: int) -> None:
    """Documents of random tokens, most of them short, as in a crawl of the web."""
    generator = np.random.default_rng(1)
    lengths = 1 + generator.exponential(LENGTH - 1, documents).astype(np.int64)
    with IndexedWriter(prefix, np.uint16) as writer:
        for part in np.array_split(lengths, 20):
            writer.add_documents(generator.integers(0, 50_000, int(part.sum()), dtype=np.uint16), part)


def peer_module(module: str) -> Any:
    """A module of megatron-core's data."""
    return import_module(f"megatron.core.datasets.{module}")


def gpt_dataset(prefix: str, samples: int, cache: str | None) -> Any:
    """Megatron-core's dataset of the training split. Without a cache it builds its indices each time."""
    gpt, files = peer_module("gpt_dataset"), peer_module("indexed_dataset")
    config = gpt.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=S,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=SimpleNamespace(vocab_size=50_000, eod=0, pad=-1, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=cache,
    )
    read, split = files.IndexedDataset(prefix), peer_module("utils").Split.train
    return gpt.GPTDataset(read, prefix, np.arange(len(read), dtype=np.int32), samples, split, config)


def built_index(prefix: Path, folder: Path, samples: int, runs: int) -> tuple[float, float, float]:
    """Build the three indices of ``samples`` samples; neither side writes them."""
    dataset = gpt_dataset(str(prefix), samples, str(folder / "theirs"))
    read = IndexedReader(prefix)

    def own() -> Any:
        return build(read.lengths, (0, len(read)), S, samples, SEED)

    for found, wanted in zip(own(), (dataset.document_index, dataset.sample_index, dataset.shuffle_index), strict=True):
        np.testing.assert_array_equal(found, wanted)
    dataset.config.path_to_cache = None
    with (
        mock.patch.object(dataset.config, "mock", new=True),  # the only way to keep it from its cache
        mock.patch("megatron.core.datasets.gpt_dataset.log_single_rank"),
    ):
        return paired(own, dataset._build_document_sample_shuffle_indices, runs)


def blended(runs: int, number: int) -> tuple[float, float, float]:
    """Choose the datasets of a blend of ``number``."""
    helpers, normalize = peer_module("helpers"), peer_module("utils").normalize
    weights = np.random.default_rng(number).random(number).tolist()

    def own() -> tuple[Any, Any]:
        choices = blend(weights, BLENDED)
        return choices, places_in(choices, number)

    def compiled() -> tuple[Any, Any]:
        choices, places = np.zeros(BLENDED, np.int16), np.zeros(BLENDED, np.int64)
        helpers.build_blending_indices(choices, places, normalize(weights), number, BLENDED, False)
        return choices, places

    for found, wanted in zip(own(), compiled(), strict=True):
        np.testing.assert_array_equal(found, wanted)
    return paired(own, compiled, runs)


def read_samples(prefix: Path, folder: Path, order: str, samples: int, runs: int) -> tuple[float, float, float]:
    """Read the first samples of the run, which lie anywhere in the file."""
    peer = gpt_dataset(str(prefix), samples, str(folder / "theirs"))
    cache = {"cache": str(folder / "ours")} if order == "megatron" else {}
    options = {"paths": str(prefix), "order": order, "vocab_size": 50_000, "split": (1, 0, 0), **cache}
    stream = megatron_run_create_data(IndexedOptions.model_validate(options)).stream("train", S, SEED, samples)
    assert stream is not None
    if order == "megatron":
        for index in range(0, samples, 97):
            np.testing.assert_array_equal(stream[index]["labels"], peer[index]["labels"].numpy())
    places = range(min(READ, len(stream), len(peer)))

    def read(dataset: Any) -> Callable[[], None]:
        def work() -> None:
            for place in places:
                dataset[place]

        return work

    return paired(read(stream), read(peer), runs)


def report(*, quick: bool) -> Iterator[str]:
    """Every comparison, a row each."""
    torch.set_num_threads(1)
    documents, runs = DOCUMENTS // (10 if quick else 1), FEW if quick else RUNS
    with TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core tells of Apex and Transformer Engine
        folder = Path(name)
        prefix = folder / "corpus"
        write_corpus(prefix, documents)
        read = IndexedReader(prefix)
        epoch = len(read.tokens) // S
        yield f"\n{len(read.tokens):,} tokens in {documents:,} documents, samples of {S}. One thread, {runs} runs.\n"

        def rows() -> Iterator[tuple[str, str, str, str]]:
            yield _row("index of one epoch", built_index(prefix, folder, epoch - 1, runs))
            yield _row("index of ten epochs", built_index(prefix, folder, 10 * epoch - 20, runs))
            for number in (2, 8, 64):
                yield _row(f"blend of {number} datasets, {BLENDED:,} samples", blended(runs, number))
            for order in ("megatron", "permuted"):
                found = read_samples(prefix, folder, order, epoch - 1, runs)
                yield _row(f"{min(READ, epoch - 1):,} samples, order={order}", found)
            yield _row("opening (and here checking) the files", _opening(prefix, runs))

        yield from table(("", "data=indexed, ms", "megatron-core, ms", "ratio"), rows())


def _opening(prefix: Path, runs: int) -> tuple[float, float, float]:
    opened = peer_module("indexed_dataset").IndexedDataset
    return paired(lambda: IndexedReader(prefix), lambda: opened(str(prefix)), runs)


def _row(name: str, found: tuple[float, float, float]) -> tuple[str, str, str, str]:
    own, peer, ratio = found
    return name, f"{own * 1e3:.3g}", f"{peer * 1e3:.3g}", f"{ratio:.2f}"


if __name__ == "__main__":
    run("data", "Reading data", __doc__ or "", report)
