"""Reader and writer of .bin and .idx, against megatron-core's and against damage."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_run.errors import DataError
from megatron_run_engine.data.indexed_files import CODES, IndexedReader, IndexedWriter, dtype_for
from tests.plugins.data.indexed.corpora import megatron

HEADER = 34
#: Three sequences of 3, 0 and 2 tokens in two documents, as `written` makes them.
LENGTHS, OFFSETS, DOCUMENTS, END = HEADER, HEADER + 12, HEADER + 36, HEADER + 60


@pytest.fixture
def oracle() -> Any:
    return megatron().files


def written(folder: Path) -> Path:
    with IndexedWriter(folder / "a.b", np.uint16) as writer:
        writer.add([1, 2, 3])
        writer.add([])
        writer.end_document()
        writer.add([4, 5])
        writer.end_document()
    return folder / "a.b"


def documents(generator: np.random.Generator, dtype: np.dtype[Any]) -> Iterator[list[tuple[np.ndarray[Any, Any], int]]]:
    for _ in range(generator.integers(1, 20)):
        sizes = generator.integers(0, 9, generator.integers(0, 4))
        yield [(generator.integers(0, 128, size).astype(dtype), int(generator.integers(0, 3))) for size in sizes]


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("dtype", CODES.values(), ids=str)
def test_files_equal_megatron_cores_byte_for_byte_and_each_reads_the_others(
    tmp_path: Path, oracle: Any, dtype: np.dtype[Any], modes: bool
) -> None:
    import torch

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    builder = oracle.IndexedDatasetBuilder(f"{theirs}.bin", dtype.type, modes)
    with IndexedWriter(ours, dtype, modes=modes) as writer:
        for document in documents(np.random.default_rng(5), dtype):
            for tokens, mode in document:
                builder.add_item(torch.from_numpy(tokens.astype(np.float64)), mode)
                writer.add(tokens, mode)
            builder.end_document()
            writer.end_document()
    builder.finalize(f"{theirs}.idx")
    for suffix in ("bin", "idx"):
        assert Path(f"{ours}.{suffix}").read_bytes() == Path(f"{theirs}.{suffix}").read_bytes()

    read, expected = IndexedReader(theirs), oracle.IndexedDataset(str(ours), multimodal=modes)
    assert len(read) == len(expected) > 0
    for sequence in range(len(read)):
        wanted = expected[sequence]
        np.testing.assert_array_equal(read[sequence], wanted[0] if modes else wanted)
        assert read.modes is None if not modes else read.modes is not None and read.modes[sequence] == wanted[1]
    np.testing.assert_array_equal(read.documents, expected.document_indices)


@pytest.mark.parametrize("size", [1, 65499, 65500, 2**20])
def test_the_type_for_a_vocabulary_is_megatron_cores(oracle: Any, size: int) -> None:
    assert dtype_for(size) == oracle.DType.optimal_dtype(size)


@pytest.mark.parametrize("seed", range(20))
def test_what_was_written_is_read(tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    dtype = CODES[int(generator.integers(1, 9))]
    made = list(documents(generator, dtype))
    with IndexedWriter(tmp_path / "d", dtype, modes=True) as writer:
        for document in made:
            for tokens, mode in document:
                writer.add(tokens.tolist(), mode)
            writer.end_document()
    read = IndexedReader(tmp_path / "d")
    sequences = [sequence for document in made for sequence in document]
    assert len(read) == len(sequences)
    assert read.dtype == dtype
    for place, (tokens, mode) in enumerate(sequences):
        np.testing.assert_array_equal(read[place], tokens)
        assert read.modes is not None
        assert read.modes[place] == mode
    assert np.diff(read.documents).tolist() == [len(document) for document in made]
    assert not list(tmp_path.glob("*.tmp"))


def test_documents_added_at_once_equal_those_added_one_by_one(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "one", np.int32) as one, IndexedWriter(tmp_path / "all", np.int32) as whole:
        for tokens in ([1, 2, 3], [], [4]):
            one.add(tokens)
            one.end_document()
        whole.add_documents([1, 2, 3, 4], [3, 0, 1])
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"all.{suffix}").read_bytes()


@pytest.mark.parametrize("tokens", [[65536], [-1], [0.5], [3, 2**40]])
def test_a_token_that_the_type_cannot_hold_is_refused(tmp_path: Path, tokens: list[float]) -> None:
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add([1])
        with pytest.raises(DataError, match="sequence 1 for "):
            writer.add(tokens)
    assert len(IndexedReader(tmp_path / "d")) == 1


def test_a_failure_while_writing_leaves_the_older_dataset(tmp_path: Path) -> None:
    prefix = written(tmp_path)
    with pytest.raises(DataError), IndexedWriter(prefix, np.uint16) as writer:
        writer.add([9, -1])
    assert IndexedReader(prefix)[0].tolist() == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx"]


def test_a_type_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="uint32"):
        IndexedWriter(tmp_path / "d", np.uint32)


def test_a_folder_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        IndexedWriter(tmp_path / "no" / "d", np.uint16)


def patch(at: int, form: str, *values: int | bytes) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        path = Path(f"{prefix}.idx")
        content = bytearray(path.read_bytes())
        struct.pack_into(form, content, at, *values)
        path.write_bytes(content)

    return change


def cut(suffix: str, size: int) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        path = Path(f"{prefix}.{suffix}")
        path.write_bytes(path.read_bytes()[:size])

    return change


def add(suffix: str, content: bytes) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        path = Path(f"{prefix}.{suffix}")
        path.write_bytes(path.read_bytes() + content)

    return change


def remove(suffix: str) -> Callable[[Path], None]:
    return lambda prefix: Path(f"{prefix}.{suffix}").unlink()


def index_of_another(prefix: Path) -> None:
    with IndexedWriter(f"{prefix}2", np.uint16) as writer:
        writer.add_documents(np.arange(9), [4, 5])
    Path(f"{prefix}2.idx").replace(f"{prefix}.idx")


def a_folder(prefix: Path) -> None:
    Path(f"{prefix}.idx").unlink()
    Path(f"{prefix}.idx").mkdir()


#: The fault, and what the line says of file and place. The lengths are 3, 0, 2 and the bounds 0, 2, 3.
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no index": (remove("idx"), ".idx"),
    "no tokens": (remove("bin"), ".bin"),
    "index is a folder": (a_folder, ".idx"),
    "empty index": (cut("idx", 0), "byte 0"),
    "half a magic": (cut("idx", 5), "byte 0"),
    "foreign magic": (patch(0, "9s", b"TNTIDX\0\0\0"), "byte 0"),
    "text": (patch(0, "9s", b'{"text": '), "byte 0"),
    "only a magic": (cut("idx", 9), "byte 9"),
    "half a header": (cut("idx", 30), "byte 30"),
    "only a header": (cut("idx", 34), "byte 34"),
    "version 2": (patch(9, "<Q", 2), "byte 9"),
    "big-endian version": (patch(9, ">Q", 1), "byte 9"),
    "code 0": (patch(17, "B", 0), "byte 17"),
    "code 9": (patch(17, "B", 9), "byte 17"),
    "code 255": (patch(17, "B", 255), "byte 17"),
    "wider code": (patch(17, "B", 4), f"byte {OFFSETS + 8}"),
    "narrower code": (patch(17, "B", 1), f"byte {OFFSETS + 8}"),
    "2**64 - 1 sequences": (patch(18, "<Q", 2**64 - 1), f"byte {END}"),
    "2**40 sequences": (patch(18, "<Q", 2**40), f"byte {END}"),
    "no sequences": (patch(18, "<Q", 0), f"byte {HEADER + 24}"),
    "2**64 - 1 documents": (patch(26, "<Q", 2**64 - 1), f"byte {END}"),
    "no documents": (patch(26, "<Q", 0), f"byte {DOCUMENTS}"),
    "one document fewer": (patch(26, "<Q", 2), f"byte {END - 8}"),
    "negative length": (patch(LENGTHS + 8, "<i", -2), f"byte {LENGTHS + 8}"),
    "huge length": (patch(LENGTHS, "<i", 2**31 - 1), f"byte {OFFSETS + 8}"),
    "huge last length": (patch(LENGTHS + 8, "<i", 2**31 - 1), ".bin ends at byte 10"),
    "first offset": (patch(OFFSETS, "<q", 2), f"byte {OFFSETS}"),
    "offset beyond the end": (patch(OFFSETS + 16, "<q", 2**62), f"byte {OFFSETS + 16}"),
    "negative offset": (patch(OFFSETS + 8, "<q", -6), f"byte {OFFSETS + 8}"),
    "first bound": (patch(DOCUMENTS, "<q", 1), f"byte {DOCUMENTS}"),
    "bound goes back": (patch(DOCUMENTS + 8, "<q", -1), f"byte {DOCUMENTS + 8}"),
    "bound beyond the end": (patch(DOCUMENTS + 8, "<q", 2**40), f"byte {DOCUMENTS + 16}"),
    "last bound": (patch(DOCUMENTS + 16, "<q", 2), f"byte {DOCUMENTS + 16}"),
    "truncated index": (cut("idx", END - 1), f"byte {END - 1}"),
    "longer index": (add("idx", b"\0" * 8), f"byte {END}"),
    "truncated tokens": (cut("bin", 9), ".bin ends at byte 9"),
    "no token": (cut("bin", 0), ".bin ends at byte 0"),
    "more tokens": (add("bin", b"\0\0"), ".bin goes on at byte 10"),
    "index of another dataset": (index_of_another, ".bin ends at byte 10"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_with_file_and_offset_and_costs_no_memory(tmp_path: Path, fault: str) -> None:
    prefix = written(tmp_path)
    damage, place = FAULTS[fault]
    damage(prefix)
    tracemalloc.start()
    with pytest.raises(DataError) as raised:
        IndexedReader(prefix)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    line = str(raised.value)
    assert "\n" not in line
    assert str(prefix) in line
    assert place in line
    assert peak < 2**20


def test_faults_are_found_beyond_the_first_block(tmp_path: Path) -> None:
    n = 200_000
    with IndexedWriter(tmp_path / "d", np.uint8) as writer:
        writer.add_documents(np.zeros(n, np.uint8), np.ones(n, np.int64))
    IndexedReader(tmp_path / "d")
    for at in (HEADER + 4 * n + 8 * 150_000, HEADER + 12 * n + 8 * 131_072):
        whole = (tmp_path / "d.idx").read_bytes()
        patch(at, "<q", 7)(tmp_path / "d")
        with pytest.raises(DataError, match=f"byte {at}:"):
            IndexedReader(tmp_path / "d")
        (tmp_path / "d.idx").write_bytes(whole)
