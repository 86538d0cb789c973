"""Small datasets, and megatron-core's classes on them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_run_engine.data.indexed_files import IndexedWriter

#: The token that ends a document. It also occurs within them, by chance.
END = 0


def corpus(prefix: Path, seed: int, documents: int, longest: int = 40, shortest: int = 1, vocabulary: int = 20) -> str:
    """Write documents of ``shortest`` to ``longest`` random tokens; return the prefix."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(shortest, longest + 1, documents)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_documents(generator.integers(0, vocabulary, int(lengths.sum())), lengths)
    return str(prefix)


def megatron() -> Any:
    """megatron-core's modules of data, or skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells of Apex and Transformer Engine
        pytest.importorskip("megatron.core.datasets.helpers_cpp")
        builder, gpt, helpers, files, utils = (
            import_module(f"megatron.core.datasets.{name}")
            for name in ("blended_megatron_dataset_builder", "gpt_dataset", "helpers", "indexed_dataset", "utils")
        )
    read = files._IndexReader.__getitem__
    files._IndexReader.__getitem__ = getattr(read, "__wrapped__", read)  # its cache keeps the last readers' files open
    return SimpleNamespace(
        builder=builder.BlendedMegatronDatasetBuilder,
        gpt=gpt,
        helpers=helpers,
        files=files,
        split=utils.Split,
        normalize=utils.normalize,
    )


def gpt_config(oracle: Any, cache: Path, sequence_length: int, seed: int, **asked: Any) -> Any:
    """Its configuration, with a tokenizer of 20 tokens without padding."""
    tokenizer = SimpleNamespace(vocab_size=20, eod=END, pad=-1, unique_identifiers={})
    return oracle.gpt.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        tokenizer=tokenizer,
        path_to_cache=str(cache),
        **{
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "create_attention_mask": False,
            "eod_mask_loss": False,
            **asked,
        },
    )


def built(oracle: Any, config: Any, sizes: Sequence[int]) -> Any:
    """Its datasets of train, validation and test, as its builder makes them on the only rank."""
    with mock.patch("torch.distributed.get_rank", return_value=0):
        return oracle.builder(oracle.gpt.GPTDataset, list(sizes), lambda: True, config).build()
