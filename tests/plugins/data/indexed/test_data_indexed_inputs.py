"""Where blocks of inputs begin and end."""

from __future__ import annotations

import gzip
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_run.errors import DataError
from megatron_run_data_indexed.preparation import inputs
from megatron_run_data_indexed.preparation.inputs import find_inputs


def test_the_separator_of_documents_is_found_wherever_blocks_are_cut(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for size in (5, 17, 64):
        texts = ["".join(generator.choice(list("ab<"), generator.integers(1, 40))) for _ in range(80)]
        path = tmp_path / "a.txt"
        path.write_text("<end>".join(texts))
        (found,), _ = find_inputs([str(path)])
        cuts = list(inputs.blocks([found], b"<end>", size))
        content = path.read_bytes()
        assert b"".join(content[cut.start : cut.stop] for cut in cuts) == content
        assert all(content[: cut.stop].endswith(b"<end>") for cut in cuts[:-1])


def test_a_plain_file_without_an_end_of_a_document_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is packed: a hole behind a line takes no disk."""
    monkeypatch.setattr(inputs, "LARGEST_RECORD", {"text": 2**22, "jsonl": 2**22})
    for name, separator in (("a.jsonl", None), ("a.txt", None), ("a.txt", b"<end>")):
        path = tmp_path / name
        path.write_bytes(b'{"text": "a"}\n' * 1000)
        os.truncate(path, 1 << 40)
        with pytest.raises(DataError, match=r"has more than 4 MiB without an end of a document"):
            list(inputs.blocks(find_inputs([str(path)])[0], separator, 2**20))


def test_a_small_file_that_unpacks_to_one_endless_document_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory would hold all of it: a megabyte of packed zeros is a gigabyte."""
    monkeypatch.setitem(inputs.LARGEST_RECORD, "text", 2**22)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + b"a" * 2**23 + b'"}\n'))
    for separator in (b"\n", None):
        source = replace(inputs.find_inputs([str(path)])[0][0], format="text")
        with pytest.raises(DataError, match=r"bomb\.jsonl\.gz unpacks to more than 4 MiB"):
            list(inputs.blocks([source], separator, 2**20))
