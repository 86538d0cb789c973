"""The section ``data``: which datasets a launch script reads, how it splits them, and what ends a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_run_format_megatron.launch_script.settings import Arguments, Setting, default_of
from megatron_run_format_megatron.launch_script.tokenizer_flags import (
    find_vocabulary,
    last_token,
    tokenizer_file,
    tokenizer_words,
)

_SPLIT = (969.0, 30.0, 1.0)  # Megatron's default
#: The flags that need to know where documents end, and their keys.
_ENDS = {
    "eod_mask_loss": "mask_end",
    "reset_position_ids": "reset_positions",
    "reset_attention_mask": "reset_attention",
}


def data(arguments: Arguments) -> Iterator[Setting]:
    """The section ``data``: the datasets of ``--data-path`` in Megatron's order, mock data where it names none."""
    given = arguments.get
    named = None if given("mock_data") else given("data_path")
    if named:
        yield Setting("data.use", "indexed", "--data-path: .bin and .idx files")
        yield from _datasets(named, given("split"))
        if given("data_cache_path"):
            yield Setting("data.cache", given("data_cache_path"), "--data-cache-path")
        yield from _documents(arguments)
    else:
        why = "--mock-data" if given("mock_data") else "NOT YOUR DATA: name it in data.paths, with data.use=indexed"
        yield Setting("data.use", "mock", why)
    vocabulary = find_vocabulary(arguments)
    if vocabulary is not None:
        yield vocabulary._replace(key="data.vocab_size")


def _datasets(named: Sequence[str], split: Sequence[float] | None) -> Iterator[Setting]:
    paths, weights = blend(named)
    yield Setting("data.paths", paths, "--data-path")
    if weights:
        yield Setting("data.weights", weights, "--data-path: weights before the paths")
    shares = [int(share) if share == int(share) else share for share in split or _SPLIT]
    yield Setting("data.split", shares, "--split" if split else default_of("--split"))
    yield Setting("data.order", "megatron", "--data-path: the samples of GPTDataset, in its order")


def blend(named: Sequence[str]) -> tuple[list[str], list[float]]:
    """The paths and weights of ``--data-path``: ``0.7 a 0.3 b``, or paths alone, which have no weights."""
    try:
        weights = [float(word) for word in named[::2]]
    except ValueError:
        weights = []
    if not weights or len(named) % 2:
        return list(named), []
    return list(named[1::2]), weights


def _documents(arguments: Arguments) -> Iterator[Setting]:
    file = tokenizer_file(arguments)
    if file is not None:
        yield Setting("data.tokenizer", str(file), tokenizer_words(arguments))
    asked = [name for name in _ENDS if arguments.get(name)]
    for name in asked:
        yield Setting(f"data.{_ENDS[name]}", True, f"--{name.replace('_', '-')}")
    last = last_token(arguments)
    if asked and file is None and last is not None:
        yield last._replace(key="data.end_of_document")
