"""Our shards are safetensors files by the word of the format's own library, and its files can be read."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_run.contracts.optimizer import StatePiece
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.files import FileSystem
from megatron_run_engine.checkpoint.shard_file import DTYPES, encode_header, lay_out, read_header, write_shard
from tests.support.saved_steps import random_values, same_bits


def pieces(seed: int) -> list[StatePiece]:
    draw = random.Random(seed)
    found = []
    for index, dtype in enumerate(sorted(DTYPES)):
        shape = tuple(draw.randint(1, 5) for _ in range(index % 4))
        found.append(StatePiece(f"w{index}", "master", (0,) * len(shape), shape, random_values(draw, shape, dtype)))
    return found


def test_the_formats_library_reads_our_file(tmp_path: Path) -> None:
    mine = pieces(1)
    written = write_shard(tmp_path / "a.safetensors", mine, FileSystem())
    assert written.bytes == (tmp_path / "a.safetensors").stat().st_size
    theirs = load_file(tmp_path / "a.safetensors")
    assert len(theirs) == len(mine)
    for piece in mine:
        (found,) = (values for name, values in theirs.items() if name.startswith(f"{piece.name}:master"))
        assert same_bits(found, piece.tensor)


def test_we_read_the_header_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {piece.name: piece.tensor.contiguous() for piece in pieces(2)}
    save_file(tensors, path, metadata={"format": "pt"})
    header, content = read_header(path), path.read_bytes()
    assert header.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = header.entries[name]
        assert (DTYPES[entry.dtype], entry.shape) == (tensor.dtype, tuple(tensor.shape))
        raw = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
        assert content[header.data + entry.start : header.data + entry.stop] == raw


def test_every_value_is_aligned(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", pieces(3), FileSystem())
    header = read_header(tmp_path / "a")
    for entry in header.entries.values():
        assert (header.data + entry.start) % DTYPES[entry.dtype].itemsize == 0


def test_a_rank_may_hold_nothing(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", [], FileSystem())
    assert not read_header(tmp_path / "a").entries
    assert not load_file(tmp_path / "a")


GOOD = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def write(path: Path, header: object, data: int = 24) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * data)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"w": {**GOOD["w"], "dtype": "X9"}}, "type 'X9'"),
        ({"w": {**GOOD["w"], "shape": [2, 4]}}, "24 bytes for 8 values"),
        ({"w": {**GOOD["w"], "shape": [2.0, 3]}}, "no whole number"),
        ({"w": {**GOOD["w"], "shape": [-2, -3]}}, "no whole number"),
        ({"w": {**GOOD["w"], "shape": [1] * 100}}, "100 dimensions"),
        ({"w": {**GOOD["w"], "data_offsets": [8, 32]}}, "starts at byte 8"),
        ({**GOOD, "v": GOOD["w"]}, "starts at byte 0 of the data, expected 24"),
        ({}, "24 bytes of data, the header speaks of 0"),
        ({"w": {"dtype": "F32"}}, "KeyError: 'shape'"),
        ({"w": 3}, ""),
        ([], ""),
        (b"\xff\xfe{}", ""),
        (b"[" * 5000, ""),
        (b'{"w":1,"w":1}', "there twice"),
        (b"{", "a header of 1 bytes"),
    ],
)
def test_a_header_that_lies_is_refused(header: object, why: str, tmp_path: Path) -> None:
    write(tmp_path / "a", GOOD)
    assert read_header(tmp_path / "a").entries
    write(tmp_path / "a", header)
    with pytest.raises(CheckpointError, match="is no intact safetensors file") as error:
        read_header(tmp_path / "a")
    assert why in str(error.value)


@pytest.mark.parametrize("length", [0, 7, 8, 9])
def test_a_file_that_is_too_short_is_refused(length: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff" * length)
    with pytest.raises(CheckpointError):
        read_header(tmp_path / "a")


def test_random_bytes_in_a_header_raise_nothing_but_our_error(tmp_path: Path) -> None:
    draw = random.Random(0)
    whole = encode_header(lay_out({"w": ("F32", (2, 3))})) + b"\0" * 24
    for _ in range(500):
        broken = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            broken[draw.randrange(len(whole) - 24)] = draw.randrange(256)
        (tmp_path / "a").write_bytes(broken)
        with suppress(CheckpointError):  # nothing else, and soon
            read_header(tmp_path / "a")
