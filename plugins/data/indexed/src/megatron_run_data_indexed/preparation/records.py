"""The documents of a block, and the records that are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_run.errors.wording import did_you_mean
from megatron_run_data_indexed.preparation.inputs import Block, Input, blocks, separator_of
from megatron_run_data_indexed.preparation.parquet_file import column_values
from megatron_run_engine.data.user_files import byte_lines, json_line, read_range

Policy = Literal["refuse", "skip", "keep"]
#: Bytes read at once for the training of a tokenizer.
_BLOCK = 2**22


@dataclass(frozen=True)
class Reading:
    """How records are read: ``key`` of a JSON object or column, ``separator`` after each document of a text.

    Of malformed records the first ends the preparation (``refuse``), all are left out (``skip``), or what is there
    becomes a document (``keep``), with U+FFFD for bytes that are not UTF-8.
    """

    key: str = "text"
    separator: bytes | None = None
    malformed: Policy = "refuse"


@dataclass(frozen=True)
class Record:
    """One record: its ``text``, which is empty if there is none, or why it is malformed, and what then is there.

    ``line`` is the JSON object it is a part of, if it is.
    """

    text: bytes
    fault: str = ""
    line: bytes = b""


def read_records(block: Block, reading: Reading) -> Iterator[Record]:
    """Yield the records of ``block`` in order, one for each line, document or row.

    Raises :class:`DataError` for a file that cannot be read or lacks the column.
    """
    if block.source.format == "parquet":
        return _rows(block, reading.key)
    if block.source.format == "jsonl":
        return (_json(line, reading.key) for line in lines(block))
    content = _content(block)
    separator = separator_of(block.source, reading.separator)
    return map(_text, [content] if separator is None else separator.split(content))


def lines(block: Block) -> list[bytes]:
    """Return the lines of ``block``, empty ones among them, without their ends."""
    return byte_lines(_content(block))


def texts(inputs: Sequence[Input], reading: Reading) -> Iterator[str]:
    """Yield the documents of ``inputs``, malformed records left out. Raises as :func:`read_records`."""
    for block in blocks(inputs, reading.separator, _BLOCK):
        yield from (each.text.decode("utf-8") for each in read_records(block, reading) if each.text and not each.fault)


def _content(block: Block) -> bytes:
    if block.content is not None:
        return block.content
    return read_range(block.source.path, block.start, block.stop)


def _text(content: bytes) -> Record:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as cause:
        return Record(_repaired(content), f"not UTF-8 at its byte {cause.start}")
    return Record(content)


def _json(line: bytes, key: str) -> Record:
    line = line.strip()
    if not line:
        return Record(b"")
    try:
        record = json_line(line)
        if not isinstance(record, dict):
            return Record(line, f"a JSON {_names(record)}, not an object")
        if key not in record:
            fix = did_you_mean(key, list(record)) or f"--json-key is one of {', '.join(map(str, record)) or 'none'}"
            return Record(line, f"no key {key!r}; {fix}")
        text = record[key]
        if not isinstance(text, str):
            return Record(line, f"key {key!r} holds a JSON {_names(text)}, not text")
        return Record(text.encode("utf-8"), line=line)
    except UnicodeEncodeError:
        return Record(text.encode("utf-8", "replace"), "half of a surrogate pair, which is no character")
    except ValueError as cause:
        return Record(_repaired(line), str(cause))


def _rows(block: Block, key: str) -> Iterator[Record]:
    for value in column_values(block.source.path, key, "--json-key", block.groups):
        if isinstance(value, bytes):
            yield _text(value)
        elif isinstance(value, str):
            yield Record(value.encode("utf-8"))
        else:
            yield Record(b"", f"column {key!r} holds a {_names(value)}, not text")


def _names(value: object) -> str:
    kinds = {type(None): "null", list: "array", dict: "object", str: "string", bool: "boolean"}
    return kinds.get(type(value), "number")


def _repaired(content: bytes) -> bytes:
    return content.decode("utf-8", "replace").encode("utf-8")
