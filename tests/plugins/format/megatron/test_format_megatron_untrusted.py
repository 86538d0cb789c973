"""Files that would execute something when they are unpickled are refused, by name, and execute nothing."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_run.errors import CheckpointError
from megatron_run_format_megatron.rank_files import Inert, load_metadata, load_tensor, load_weights


class Planted:
    """Unpickled in the usual way, it makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = str(made)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.made,)


def as_weights(content: Any, path: Path) -> Any:
    torch.save(content, path)
    return load_weights(path)


def as_tensor(content: Any, path: Path) -> Any:
    file = BytesIO()
    torch.save(content, file)
    return load_tensor(file.getvalue(), str(path))


def as_metadata(content: Any, path: Path) -> Any:
    path.write_bytes(pickle.dumps(content))
    return load_metadata(path)


READERS = (as_weights, as_tensor, as_metadata)


@pytest.mark.parametrize("reader", READERS)
def test_a_planted_program_is_refused_and_not_run(reader: Callable[..., Any], tmp_path: Path) -> None:
    made = tmp_path / "made"
    content = {"args": Namespace(num_layers=2), "model": {}, "more": [Planted(made)]}
    with pytest.raises(CheckpointError, match=r"posix\.mkdir") as caught:
        reader(content["more"] if reader is as_metadata else content, tmp_path / "file")
    assert "nothing was executed" in str(caught.value)
    assert str(tmp_path / "file") in str(caught.value)
    assert not made.exists()


def test_the_program_would_have_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps([Planted(tmp_path / "made")]))
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "name",
    ["builtins eval", "os system", "builtins getattr", "torch load", "torch.serialization load", "megatron_run.x Y"],
)
def test_only_names_in_the_table_are_found(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"c" + "\n".join(name.split()).encode() + b"\n.")
    with pytest.raises(CheckpointError, match=name.replace(" ", r"\.")):
        load_metadata(path)


def test_a_name_of_megatron_is_neither_imported_nor_called(tmp_path: Path) -> None:
    """``megatron.os.mkdir`` is nothing but a name here."""
    path, made = tmp_path / "file", tmp_path / "made"
    torch.save(Planted(made), path)
    content = path.read_bytes()
    assert content.count(b"posix\nmkdir") == 1
    for word in (b"megatron.os\nmkdir", b"megatron.\nevil"):
        other = tmp_path / "other"
        _rewritten(path, other, word)
        found = load_weights(other)
        assert isinstance(found, Inert)
        assert found.arguments == (str(made),)
    assert not made.exists()


def _rewritten(source: Path, target: Path, word: bytes) -> None:
    """``source``, in which ``posix.mkdir`` goes by another name."""
    reader = torch._C.PyTorchFileReader(str(source))
    writer = torch._C.PyTorchFileWriter(str(target))
    for record in reader.get_all_records():
        data = reader.get_record(record).replace(b"posix\nmkdir", word)
        if not record.startswith((".data", "version", "byteorder", ".format", ".storage")):
            writer.write_record(record, data, len(data))
    writer.write_end_of_file()


def test_what_other_libraries_allowed_is_not_allowed_here(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Planted, os.mkdir]):
        before = set(torch.serialization.get_safe_globals())
        with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
            as_weights(Planted(tmp_path / "made"), tmp_path / "file")
        assert set(torch.serialization.get_safe_globals()) == before >= {Planted, os.mkdir}
    assert not (tmp_path / "made").exists()


def test_weights_and_plain_data_are_read(tmp_path: Path) -> None:
    values = torch.arange(6).view(2, 3)
    content = {"args": Namespace(a=1, b="two", c=[3.5, None]), "x": values, "t": torch.bfloat16}
    found = as_weights(content, tmp_path / "file")
    assert isinstance(found["args"], Inert)
    assert vars(found["args"]) == {"a": 1, "b": "two", "c": [3.5, None]}
    assert torch.equal(found["x"], values)
    assert found["t"] is torch.bfloat16


def test_metadata_becomes_inert(tmp_path: Path) -> None:
    found = as_metadata(Metadata({}, storage_data={"a": torch.Size([2, 3])}), tmp_path / "file")
    assert isinstance(found, Inert)
    assert vars(found)["storage_data"] == {"a": torch.Size([2, 3])}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04", b"garbage" * 9])
def test_a_damaged_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    for load in (load_weights, load_metadata):
        with pytest.raises(CheckpointError) as caught:
            load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x80\x02Nr\xff\xff\xff\x3f.", "place 1073741823 of the memo"),
        (b"\x80\x02Np1073741823\n.", "place 1073741823 of the memo"),
        (b"\x80\x05\x96\x00\x00\x00\x00\x02\x00\x00\x00.", "BYTEARRAY8|bytes"),
    ],
)
def test_a_few_bytes_that_ask_for_gigabytes_are_refused(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=why):
        load_metadata(tmp_path / ".metadata")


@pytest.mark.parametrize("reader", [load_weights, lambda path: load_tensor(path.read_bytes(), str(path))])
def test_a_file_that_grows_when_it_is_read_is_refused(reader: Callable[[Path], Any], tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.zeros(1 << 16)}}, tmp_path / "plain")
    with ZipFile(tmp_path / "plain") as plain, ZipFile(tmp_path / "packed", "w", ZIP_DEFLATED) as packed:
        for each in plain.infolist():
            packed.writestr(each.filename, plain.read(each))
    with pytest.raises(CheckpointError, match="is compressed, to"):
        reader(tmp_path / "packed")


def test_a_file_of_any_length_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.truncate(40 << 30)
    with pytest.raises(CheckpointError, match="is too large"):
        load_metadata(tmp_path / ".metadata")
