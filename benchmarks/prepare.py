"""Preparing data: tokens a second from JSON lines, against the ways of megatron-core's users and Hugging Face's.

    python -m benchmarks.prepare [--quick]

The peers do with the same `tokenizers` tokenizer and as many processes what they usually do: a pool that encodes one
document at a time and sends it to megatron-core's builder, as Megatron-LM's preprocess_data does; and `datasets.map` in
batches through transformers, whose result is an Arrow file, if `datasets` is installed. All take turns, each in a child
process that has imported everything. Ratios are of processor time, of all processes; wall time is told beside them.
Where both write indexed datasets, their bytes are compared first.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers

from benchmarks.support.command import run
from benchmarks.support.report import table
from megatron_run_data_indexed.preparation.inputs import find_inputs
from megatron_run_data_indexed.preparation.prepare import Preparation, prepare
from megatron_run_engine.data.indexed_files import IndexedReader
from megatron_run_engine.data.tokenizer_training import train_tokenizer

WORKERS = len(os.sched_getaffinity(0))
VOCABULARY = 8192
#: Bytes of text, and turns.
TEXT, RUNS = 24_000_000, 5
LITTLE, FEW = 4_000_000, 3
OURS, MEGATRON, DATASETS = "ours", "preprocess_data's way", "datasets.map"
GOAL = 1.2


def write_corpus(folder: Path, size: int) -> tuple[Path, Path]:
    """JSON lines of ``size`` bytes of text, and a tokenizer of it: paragraphs of the standard library's sources."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    paragraphs = [part for path in sources for part in path.read_text("utf-8", "replace").split("\n\n") if part.strip()]
    generator = np.random.default_rng(0)
    corpus, written = folder / "corpus.jsonl", 0
    with corpus.open("w", encoding="utf-8") as file:
        while written < size:  # drawn anew, so that no tokenizer has seen all documents already
            text = "\n\n".join(paragraphs[place] for place in generator.integers(0, len(paragraphs), 8))
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text)
    train_tokenizer(paragraphs[::4], "bpe", VOCABULARY, folder / "tokenizer.json")
    return corpus, folder / "tokenizer.json"


def indexed(corpus: Path, tokenizer: Path, out: Path) -> int:
    """``megatron-run data prepare``."""
    inputs, _ = find_inputs([str(corpus)])
    job = Preparation(tuple(inputs), out, str(tokenizer), workers=WORKERS)
    return prepare(job, overwrite=True, tell=print, progress=lambda _: None).tokens


_encoder: Any = None


def _start(tokenizer: Path) -> None:
    global _encoder  # noqa: PLW0603  # how a pool's processes keep what each needs
    _encoder = tokenizers.Tokenizer.from_file(str(tokenizer))


def _encode(line: str) -> list[int]:
    ids: list[int] = _encoder.encode(json.loads(line)["text"], add_special_tokens=False).ids
    return [*ids, 0]  # <|endoftext|>


def megatron(corpus: Path, tokenizer: Path, out: Path) -> int:
    """A pool that encodes a document a call; the builder of megatron-core."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder, tokens = IndexedDatasetBuilder(f"{out}.bin", dtype=np.uint16), 0
    with multiprocessing.Pool(WORKERS, _start, (tokenizer,)) as pool, corpus.open(encoding="utf-8") as file:
        for ids in pool.imap(_encode, file, 32):
            builder.add_document(ids, [len(ids)])
            tokens += len(ids)
    builder.finalize(f"{out}.idx")
    return tokens


def datasets_map(corpus: Path, tokenizer: Path, out: Path) -> int:
    """``datasets`` in batches, through transformers; an Arrow file."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    encoder = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [[*ids, 0] for ids in encoder(rows["text"], add_special_tokens=False)["input_ids"]]}

    loaded = datasets.Dataset.from_json(str(corpus), cache_dir=str(out), keep_in_memory=False)
    made = loaded.map(encode, batched=True, num_proc=WORKERS, remove_columns=["text"], load_from_cache_file=False)
    return sum(map(len, made.with_format("numpy")["ids"]))


def measured(work: Callable[[Path, Path, Path], int], *paths: Path) -> tuple[int, float, float]:
    """Tokens, seconds, and seconds of processors, of ``work`` in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        begun = time.perf_counter()
        tokens = work(*paths)
        seconds = time.perf_counter() - begun
        os.write(writer, json.dumps([tokens, seconds]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read()
    _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"{work.__name__} ended with {status}")
    tokens, seconds = json.loads(answer)
    return tokens, seconds, _of(usage)


def _of(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def report(*, quick: bool) -> Iterator[str]:
    """Tokens a second of each way, and how many times as many ours makes."""
    ways = {OURS: indexed, MEGATRON: megatron}
    if find_spec("datasets"):
        import datasets  # noqa: F401  # before the children are forked
        import transformers  # noqa: F401

        ways[DATASETS] = datasets_map
    with TemporaryDirectory() as name:
        folder = Path(name)
        corpus, tokenizer = write_corpus(folder, LITTLE if quick else TEXT)
        found: dict[str, list[tuple[int, float, float]]] = {way: [] for way in ways}
        for turn in range(FEW if quick else RUNS):
            for number, (way, work) in enumerate(ways.items()):
                found[way].append(measured(work, corpus, tokenizer, folder / f"out{turn}-{number}"))
        assert (folder / "out0-0.bin").read_bytes() == (folder / "out0-1.bin").read_bytes()
        assert (folder / "out0-0.idx").read_bytes() == (folder / "out0-1.idx").read_bytes()
        tokens = len(IndexedReader(folder / "out0-0").tokens)
    assert all(each[0] == tokens for way in found.values() for each in way)
    yield f"\n{tokens:,} tokens, {WORKERS} processes, {len(found[OURS])} turns.\n"
    yield from table(("way", "tokens/s", "tokens/s of processor", "ours is times as fast", "goal"), rows(found))


def rows(found: dict[str, list[tuple[int, float, float]]]) -> Iterator[tuple[str, ...]]:
    """A row a way: rates from medians, and the median of the turns' ratios of processor time."""
    for way, turns in found.items():
        rates = [statistics.median(turn[0] / turn[place] for turn in turns) for place in (1, 2)]
        ratio = statistics.median(peer[2] / own[2] for own, peer in zip(found[OURS], turns, strict=True))
        said = "" if way == OURS else f"{ratio:.2f}"
        goal = "" if way == OURS else f"at least {GOAL}: {'yes' if ratio >= GOAL else 'no'}"
        yield way, f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", said, goal


if __name__ == "__main__":
    run("prepare", "Preparing data", __doc__ or "", report)
