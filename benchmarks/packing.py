"""The gain of packing on short documents: rows of many documents, beside one document a row, padded.

    python -m benchmarks.packing [--quick]

A GPT-2 of four layers in fp32 on one thread, forward and backward of microbatches of four rows, read from the data as
a run reads them. The same documents are packed (``data.packing=documents``) and padded; both sides take turns, and the
ratio is that of medians. Times are processor seconds of this process, which other work on the machine does not lengthen
as much. The goal is 0.95 of the inverse fill rate of padded rows: what is won by leaving padding out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmarks.support.command import run
from benchmarks.support.report import table
from megatron_run.contracts import Microbatch
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.data.batches import fields
from megatron_run_engine.data.packing import PACKED_FIELDS, PackedDocuments, best_fit, one_a_row
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.model import build_model

LENGTH, ROWS, VOCAB, GOAL = 512, 4, 512, 0.95
#: Median lengths of documents; lengths are spread log-normally, as those of texts are, and end at a row's.
MEDIANS = (32, 96, 192)
PLAIN = ("tokens", "labels", "loss_mask")


def documents(median: int, count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens, and the bounds of documents with 1 to ``LENGTH`` labels."""
    generator = np.random.default_rng(median)
    lengths = np.exp(generator.normal(np.log(median), 0.6, count)).astype(np.int64).clip(1, LENGTH) + 1
    return generator.integers(0, VOCAB, lengths.sum()), np.concatenate(([0], lengths.cumsum()))


def stepper(dataset: PackedDocuments, names: tuple[str, ...]) -> Callable[[int], float]:
    """A function that trains on the rows of one step, and returns processor seconds."""
    options = GptOptions(num_layers=4, hidden_size=256, num_heads=8, vocab_size=VOCAB, dropout=0.0)
    train = {"sequence_length": LENGTH, "micro_batch_size": ROWS, "global_batch_size": ROWS}
    context = single_process_context(options, dtype=torch.float32, train=train)
    context = replace(context, fields=frozenset(names))
    built = build_model(lambda context, _: Gpt(context, options), context, options).train(mode=True)

    def step(number: int) -> float:
        rows = [(number * ROWS + row) % len(dataset) for row in range(ROWS)]
        start = time.process_time()
        built.step(Microbatch(0, number, 0, fields(dataset, rows, names, torch.device("cpu"))))
        return time.process_time() - start

    step(0)  # warm
    return step


def report(*, quick: bool) -> Iterator[str]:
    """Measure both sides for each median length, five or fifteen times."""
    torch.set_num_threads(1)
    columns = ("median length", "fill, padded", "fill, packed", "padded, s", "packed, s", "ratio", "goal", "met")
    yield from table(columns, (_row(median, 5 if quick else 15) for median in MEDIANS))


def _row(median: int, samples: int) -> tuple[str, ...]:
    stream, bounds = documents(median)
    padded, packed = (PackedDocuments(stream, bounds, LENGTH, padding=0, fit=fit) for fit in (one_a_row, best_fit))
    sides = stepper(padded, PLAIN), stepper(packed, tuple(field.name for field in PACKED_FIELDS))
    timed = [tuple(side(number) for side in sides) for number in range(samples)]
    seconds = [statistics.median(each) for each in zip(*timed, strict=True)]
    ratio = packed.fill / seconds[1] / (padded.fill / seconds[0])
    goal = GOAL / padded.fill
    return (
        f"{median}",
        f"{padded.fill:.1%}",
        f"{packed.fill:.1%}",
        *(f"{each:.2f}" for each in seconds),
        f"{ratio:.2f}",
        f"at least {goal:.2f}",
        "yes" if ratio >= goal else "no",
    )


if __name__ == "__main__":
    run("packing", "Packing", __doc__, report)
