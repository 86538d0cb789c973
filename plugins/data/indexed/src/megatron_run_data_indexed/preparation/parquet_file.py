"""Parquet files: which of their row groups make a block, and the values of a column, few in memory at once.

A file of some hundred bytes may stand for gigabytes: a dictionary's text that each row names, runs of equal numbers. So
a text of a dictionary stays one text, rows are read by the bytes that they come to, and a row has a limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.errors import DataError
from megatron_run.errors.install_hint import how_to_add
from megatron_run.errors.wording import did_you_mean
from megatron_run.files.foreign_file import check_file
from megatron_run_engine.data.user_files import LARGEST, unreadable

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData, ParquetFile, RowGroupMetaData

#: The most rows that are in memory at once, and the bytes that they come to, but for one row.
_ROWS, _BYTES = 1024, 1 << 26
#: The bytes of a number in memory.
_NUMBER = 8


def row_groups(path: Path, size: int) -> list[range]:
    """The row groups of ``path``, together those that come to about ``size`` bytes.

    Each opening reads the description of all groups, so a part is at least as large as that. Raises
    :class:`DataError` for a damaged file.
    """
    with _opened(path) as file:
        described = file.metadata
    count = described.num_row_groups
    least = -(-count * described.serialized_size // max(path.stat().st_size, 1))
    ends, first, held = [], 0, 0
    for group in range(count):
        held += described.row_group(group).total_byte_size
        if held >= size and group + 1 - first >= least:
            ends.append(group + 1)
            first, held = group + 1, 0
    bounds = [0, *ends, *([count] if first < count else [])]
    return [range(*pair) for pair in pairwise(bounds)]


def column_values(path: Path, key: str, option: str, groups: Sequence[int] | None = None) -> Iterator[Any]:
    """Yield the values of column ``key``, which ``option`` names, in ``groups`` of rows, all of them by default.

    Raises :class:`DataError` for a damaged file, one without the column, and a row of more than ``LARGEST`` bytes.
    """
    file = _opened(path, key)
    names = file.schema_arrow.names
    if key not in names:
        fix = did_you_mean(key, names) or f"{option} is one of {', '.join(names)}"
        raise DataError(f"{path} has no column {key!r}", fix=fix)
    with _naming(path), file:
        for group in range(file.num_row_groups) if groups is None else groups:
            rows = _rows_at_once(path, file.metadata, group, key)
            for batch in file.iter_batches(rows, row_groups=[group], columns=[key]):
                yield from _one_by_one(batch.column(0))


def _one_by_one(column: Any) -> Iterator[Any]:
    """The values of a column in memory, each made when its turn comes; a dictionary's text as often as it is named."""
    if not hasattr(column, "dictionary"):
        yield from (value.as_py() for value in column)
        return
    texts = column.dictionary
    yield from (None if place is None else texts[place].as_py() for place in column.indices.to_pylist())


def _rows_at_once(path: Path, described: FileMetaData, group: int, key: str) -> int:
    """How many rows of a group come to ``_BYTES``, as the file describes them."""
    found: RowGroupMetaData = described.row_group(group)
    columns = [found.column(place) for place in range(found.num_columns)]
    inner = [each for each in columns if f"{each.path_in_schema}.".startswith(f"{key}.")]
    held = sum(max(each.total_uncompressed_size, each.num_values * _NUMBER) for each in inner)
    a_row: int = held // max(found.num_rows, 1)
    if a_row > LARGEST:
        raise DataError(f"{path} is not read", why=f"a row has more than {LARGEST >> 20} MiB")
    return min(_ROWS, _BYTES // max(a_row, 1)) or 1


def _opened(path: Path, key: str = "") -> ParquetFile:
    """Open a Parquet file, whose column ``key`` keeps its dictionary if it has texts. Raises :class:`DataError`."""
    try:
        from pyarrow.parquet import ParquetFile, read_metadata
    except ModuleNotFoundError as cause:
        raise missing(f"{path} needs the library pyarrow", "parquet") from cause
    try:
        check_file(path)
    except OSError as cause:
        raise unreadable(path, cause) from cause
    with _naming(path):
        described = read_metadata(path)
        columns = {described.schema.column(place).path for place in range(described.num_columns)}
        return ParquetFile(path, metadata=described, read_dictionary=sorted({key} & columns))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the Parquet file ``path`` in what the library raises: OSError, ValueError, and errors of its own of both."""
    try:
        yield
    except (OSError, ValueError) as cause:
        raise DataError(f"{path} is damaged", why=str(cause).partition("\n")[0]) from cause


def missing(what: str, extra: str) -> DataError:
    """The error of a library that ``extra`` brings."""
    return DataError(what, fix=how_to_add("megatron-run-data-indexed", extra))
