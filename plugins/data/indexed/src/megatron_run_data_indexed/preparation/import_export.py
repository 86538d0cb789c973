"""Indexed datasets from and to JSON lines and Parquet: a record for each document, its tokens or its text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron_run.errors import DataError, InputError
from megatron_run.files.publishing import publishing
from megatron_run_data_indexed.preparation.about import refuse_dataset, writing
from megatron_run_data_indexed.preparation.inputs import blocks, find_inputs
from megatron_run_data_indexed.preparation.inspect import document, end_of, text_of
from megatron_run_data_indexed.preparation.parquet_file import column_values, missing
from megatron_run_data_indexed.preparation.records import lines
from megatron_run_engine.data import Tokenizer
from megatron_run_engine.data.indexed_files import IndexedReader, dtype_for
from megatron_run_engine.data.user_files import json_line, packing

#: Documents that are in memory at once.
_ROWS = 1024
_BLOCK = 2**22
ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


def export(prefix: Path, target: Path, tokenizer: Tokenizer | None, key: str) -> int:
    """Write the documents of a dataset to ``target``; return how many.

    With a ``tokenizer`` key ``key`` holds their text, special tokens by name, without the end of a document, else their
    token ids. A document of several sequences is one record. Raises :class:`DataError` as :class:`IndexedReader`, and
    without space.
    """
    if not target.name.endswith(ENDINGS):
        raise InputError(f"{target} does not say its format", why=f"names end in {', '.join(ENDINGS)}")
    reader = IndexedReader(prefix)
    count = len(reader.documents) - 1
    end = None if tokenizer is None else end_of(prefix, tokenizer)
    values = (_value(document(reader, number), tokenizer, end) for number in range(count))
    try:
        with publishing(target) as (file,):
            if target.suffix == ".parquet":
                _write_parquet(file, values, key, text=tokenizer is not None)
                return count
            with packing(target, file) as lines_of:
                for value in values:
                    lines_of.write(json.dumps({key: value}, ensure_ascii=False).encode() + b"\n")
    except OSError as cause:
        raise DataError(f"{target} cannot be written", why=cause.strerror or str(cause)) from cause
    return count


def _value(tokens: Any, tokenizer: Tokenizer | None, end: int | None) -> Any:
    return tokens.tolist() if tokenizer is None else text_of(tokens, tokenizer, end)


def _write_parquet(file: Any, values: Iterator[Any], key: str, *, text: bool) -> None:
    try:
        import pyarrow as arrow
        from pyarrow.parquet import ParquetWriter
    except ModuleNotFoundError as cause:
        raise missing("Parquet needs the library pyarrow", "parquet") from cause
    schema = arrow.schema([(key, arrow.string() if text else arrow.list_(arrow.int64()))])
    with ParquetWriter(file, schema) as writer:
        while rows := list(islice(values, _ROWS)):
            writer.write_table(arrow.table({key: rows}, schema))


def import_(source: Path, prefix: Path, key: str, *, overwrite: bool = False) -> tuple[int, int]:
    """Make a dataset of the token ids in ``source``, a list in each record; return its (documents, tokens).

    The type of the tokens follows from the largest id, so ``source`` is read twice. Raises :class:`DataError` for a
    record without such a list, with file and line; :class:`InputError` if the dataset exists.
    """
    refuse_dataset(prefix, "TARGET", (source,), overwrite=overwrite)
    largest = max((int(each.max(initial=0)) for each in _token_lists(source, key)), default=0)
    documents = tokens = 0

    def about() -> dict[str, Any]:
        return {"documents": documents, "tokens": tokens, "inputs": [str(source)]}

    with writing(prefix, dtype_for(largest + 1), about) as writer:
        for each in _token_lists(source, key):
            writer.add_documents(each, [len(each)])
            documents, tokens = documents + 1, tokens + len(each)
    return documents, tokens


def _token_lists(source: Path, key: str) -> Iterator[Any]:
    for number, value in enumerate(_values(source, key), start=1):
        whole = isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in value)
        if not whole:
            raise DataError(
                f"{source}, record {number} has no list of token ids under {key!r}",
                fix="name it with --key; text becomes a dataset with megatron-run data prepare",
            )
        yield np.asarray(value, np.int64)


def _values(source: Path, key: str) -> Iterable[Any]:
    (found,), _ = find_inputs([str(source)])
    if found.format == "parquet":
        return column_values(source, key, "--key")
    return (_field(line, key) for block in blocks([found], None, _BLOCK) for line in lines(block) if line.strip())


def _field(line: bytes, key: str) -> Any:
    try:
        record = json_line(line)
    except ValueError:
        return None
    return record.get(key) if isinstance(record, dict) else None
