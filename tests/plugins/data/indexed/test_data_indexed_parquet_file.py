"""Parquet files: few values in memory whatever some hundred bytes stand for, and few openings of many groups."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import DataError
from megatron_run_data_indexed.preparation import parquet_file
from megatron_run_data_indexed.preparation.inputs import blocks, find_inputs
from megatron_run_data_indexed.preparation.parquet_file import column_values, row_groups
from megatron_run_data_indexed.preparation.records import Reading, read_records

arrow: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")


def test_a_text_that_every_row_names_is_in_memory_once(tmp_path: Path) -> None:
    """A file of 700 bytes took 8 GiB."""
    text, path = "a" * (1 << 20), tmp_path / "a.parquet"
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 400, arrow.int32()), arrow.array([text]))
    parquet.write_table(arrow.table({"text": column}), path, compression="zstd")
    assert path.stat().st_size < 2000
    before, rows = arrow.default_memory_pool().max_memory(), 0
    tracemalloc.start()
    try:
        for block in blocks(find_inputs([str(path)])[0], None, 1 << 20):
            for record in read_records(block, Reading()):
                assert record.text == text.encode()
                rows += 1
        assert tracemalloc.get_traced_memory()[1] < 16 * len(text)
    finally:
        tracemalloc.stop()
    assert rows == 400
    assert arrow.default_memory_pool().max_memory() < before + 16 * len(text)


@pytest.mark.parametrize("kind", [arrow.string(), arrow.large_string(), arrow.binary()])
def test_texts_are_those_that_were_written(tmp_path: Path, kind: Any) -> None:
    texts = [None if number % 7 == 0 else f"text {number % 50}" * (number % 90) for number in range(5000)]
    values = [None if text is None else text.encode() for text in texts] if kind == arrow.binary() else texts
    table = arrow.table({"a.b": arrow.array(values, kind), "other": list(range(5000))})
    for dictionary in (True, False):
        parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=dictionary, row_group_size=900)
        assert list(column_values(tmp_path / "a.parquet", "a.b", "--key")) == values
        assert list(column_values(tmp_path / "a.parquet", "a.b", "--key", range(1, 3))) == values[900:2700]


def test_rows_that_come_to_much_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of equal numbers take no bytes of a file, and eight each in memory."""
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"tokens": [[7] * 1000] * 64}), path)
    described = parquet.read_metadata(path)
    monkeypatch.setattr(parquet_file, "_BYTES", 16_000)
    assert parquet_file._rows_at_once(path, described, 0, "tokens") in (1, 2)
    assert list(column_values(path, "tokens", "--key")) == [[7] * 1000] * 64
    monkeypatch.setattr(parquet_file, "LARGEST", 7_000)
    with pytest.raises(DataError, match="a row has more than"):
        list(column_values(path, "tokens", "--key"))


def test_many_small_groups_are_a_block_and_large_ones_are_each(tmp_path: Path) -> None:
    """Each block opens the file, whose description has all groups: 20,000 would be read 20,000 times."""
    schema = arrow.schema([("text", arrow.string())])
    with parquet.ParquetWriter(tmp_path / "small.parquet", schema) as file:
        for number in range(500):
            file.write_table(arrow.table({"text": [f"row {number}"]}))
    assert len(row_groups(tmp_path / "small.parquet", 1)) < 4
    (source,) = find_inputs([str(tmp_path / "small.parquet")])[0]
    cut = list(blocks([source], None, 1))
    assert sum(block.consumed for block in cut) == source.size
    found = [record.text.decode() for block in cut for record in read_records(block, Reading())]
    assert found == [f"row {number}" for number in range(500)]
    texts = [f"{number**9} is a number, " * 40 for number in range(4000)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "large.parquet", row_group_size=1000)
    assert row_groups(tmp_path / "large.parquet", 1) == [range(number, number + 1) for number in range(4)]
    assert row_groups(tmp_path / "large.parquet", 1 << 40) == [range(4)]
