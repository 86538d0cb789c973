"""What is told of a dataset, and its way to JSON lines and Parquet and back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_run.errors import DataError, InputError
from megatron_run_data_indexed.preparation import inspect as inspection
from megatron_run_data_indexed.preparation.about import about_path
from megatron_run_data_indexed.preparation.import_export import export, import_
from megatron_run_engine.data.indexed_files import IndexedReader, IndexedWriter
from megatron_run_engine.data.tokenizer import ByteTokenizer, open_tokenizer
from megatron_run_engine.data.tokenizer_training import train_tokenizer

DOCUMENTS = [[list(b"hello")], [[7] * 3, [8] * 6], [], [list(b"bye"), []], [[1] * 200]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Documents of none, one and two sequences."""
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        for document in DOCUMENTS:
            for sequence in document:
                writer.add(sequence)
            writer.end_document()
    return tmp_path / "data"


def flat() -> list[list[int]]:
    return [[token for sequence in document for token in sequence] for document in DOCUMENTS]


def test_counts_and_lengths_are_those_of_documents(prefix: Path) -> None:
    reader = IndexedReader(prefix)
    summary = inspection.summarise(reader, prefix)
    lengths = [len(tokens) for tokens in flat()]
    assert inspection.document_lengths(reader).tolist() == lengths
    assert (summary.documents, summary.sequences, summary.tokens) == (5, 6, sum(lengths))
    assert (summary.shortest, summary.median, summary.longest) == (0, int(np.median(lengths)), 200)
    assert summary.dtype == "uint16"
    assert summary.size == sum(path.stat().st_size for path in prefix.parent.iterdir())
    assert all(count == sum(first <= length <= last for length in lengths) for first, last, count in summary.bins), (
        summary.bins
    )
    assert sum(count for *_, count in summary.bins) == 5


def test_samples_are_the_text_of_documents(prefix: Path) -> None:
    shown = inspection.samples(IndexedReader(prefix), prefix, ByteTokenizer(), 5)
    assert [(number, cut) for number, _, cut in shown] == [(0, False), (1, False), (2, False), (3, False), (4, True)]
    assert [shown[0][1], shown[3][1]] == ["hello", "bye"]
    assert len(inspection.samples(IndexedReader(prefix), prefix, ByteTokenizer(), 2)) == 2


def test_no_tokenizer_is_used_but_the_one_that_made_the_dataset(prefix: Path, tmp_path: Path) -> None:
    """Who wrote the description may name any file of its reader's."""
    train_tokenizer(["some words"], "bpe", 300, tmp_path / "t.json")
    made = open_tokenizer(str(tmp_path / "t.json"))
    about = {"tokenizer": str(tmp_path / "t.json"), "identity": made.identity, "vocab_size": made.vocab_size}
    about_path(prefix).write_text(json.dumps(about))
    opened = inspection.tokenizer_of(prefix, None)
    assert opened is not None
    assert opened.identity == made.identity
    train_tokenizer(["other texts"], "bpe", 300, tmp_path / "t.json")
    with pytest.raises(DataError, match=r"t\.json is not the tokenizer that made .*; add --tokenizer"):
        inspection.tokenizer_of(prefix, None)
    about_path(prefix).write_text(json.dumps({**about, "identity": None}))
    assert inspection.tokenizer_of(prefix, None) is None
    assert isinstance(inspection.tokenizer_of(prefix, "bytes"), ByteTokenizer)


def test_a_plot_has_a_bar_for_all_that_occurs() -> None:
    rows = inspection.plot([(1, 1, 1), (2, 3, 0), (4, 7, 1000)], width=10)
    assert [len(bar) for *_, bar in rows] == [1, 0, 10]


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
        return rows
    content = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_tokens_go_out_and_come_back(prefix: Path, tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    assert export(prefix, tmp_path / name, None, "ids") == 5
    assert rows_of(tmp_path / name) == [{"ids": tokens} for tokens in flat()]
    assert import_(tmp_path / name, tmp_path / "back", "ids") == (5, sum(map(len, flat())))
    reader = IndexedReader(tmp_path / "back")
    assert [reader[number].tolist() for number in range(len(reader))] == flat()
    assert reader.dtype == np.uint16
    with pytest.raises(InputError, match="exists"):
        import_(tmp_path / name, tmp_path / "back", "ids")


def test_text_goes_out(prefix: Path, tmp_path: Path) -> None:
    export(prefix, tmp_path / "a.jsonl", ByteTokenizer(), "text")
    assert [row["text"] for row in rows_of(tmp_path / "a.jsonl")] == [bytes(tokens).decode() for tokens in flat()]


@pytest.mark.parametrize(
    "row", ['{"tokens": "text"}', '{"tokens": [1, -1]}', '{"tokens": [1.5]}', "{", '{"other": [1]}', "[1]"]
)
def test_a_record_without_token_ids_is_named(tmp_path: Path, row: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}\n' + row + "\n")
    with pytest.raises(DataError, match=r"a.jsonl, record 2 has no list of token ids under 'tokens'"):
        import_(tmp_path / "a.jsonl", tmp_path / "back", "tokens")
    assert not list(tmp_path.glob("back*"))
