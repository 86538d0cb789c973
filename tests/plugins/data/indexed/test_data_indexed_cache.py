"""The cache of index files: one build for all ranks, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_run.errors import DataError
from megatron_run_data_indexed.cache import cached, key, within


def fits(found: Mapping[str, NDArray[Any]]) -> bool:
    return within(found["a"], (np.int64, (1000,)), 0, 1000)


def array() -> tuple[NDArray[np.int64]]:
    return (np.arange(1000),)


def test_of_many_that_start_at_once_one_builds_and_all_read_its_files(tmp_path: Path) -> None:
    builds, barrier = [], Barrier(8)

    def build() -> tuple[NDArray[np.int64]]:
        builds.append(1)
        return array()

    def start(_: int) -> NDArray[np.int64]:
        barrier.wait()
        return cached(tmp_path / "new" / "folder", "entry", ("a",), build, fits)["a"]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(start, range(8)))
    assert len(builds) == 1
    for result in results:
        np.testing.assert_array_equal(result, np.arange(1000))
        assert not result.flags.writeable


def test_a_build_that_fails_leaves_nothing_and_the_next_one_builds(tmp_path: Path) -> None:
    def fail() -> tuple[NDArray[np.int64]]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, "entry", ("a",), fail, fits)
    assert not (tmp_path / "entry").exists()
    np.testing.assert_array_equal(cached(tmp_path, "entry", ("a",), array, fits)["a"], np.arange(1000))


def test_a_file_that_was_cut_short_is_built_again(tmp_path: Path) -> None:
    cached(tmp_path, "entry", ("a",), array, fits)
    path = tmp_path / "entry" / "a.npy"
    for size in (0, 50, 3000):
        path.write_bytes(path.read_bytes()[:size])
        np.testing.assert_array_equal(cached(tmp_path, "entry", ("a",), array, fits)["a"], np.arange(1000))


@pytest.mark.parametrize(
    "other",
    [
        np.arange(1000, dtype=np.int32),
        np.arange(1000.0),
        np.arange(999),
        np.arange(1000).reshape(10, 100),
        np.arange(1000) - 1,
        np.arange(1000) + 1,
    ],
    ids=["kind", "floats", "shorter", "shape", "below", "beyond"],
)
def test_an_array_that_nobody_can_have_built_is_built_again(tmp_path: Path, other: NDArray[np.int64]) -> None:
    cached(tmp_path, "entry", ("a",), array, fits)
    np.save(tmp_path / "entry" / "a.npy", other)
    np.testing.assert_array_equal(cached(tmp_path, "entry", ("a",), array, fits)["a"], np.arange(1000))


def test_a_build_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is damaged"):
        cached(tmp_path, "entry", ("a",), lambda: (np.arange(1001),), fits)


def test_a_folder_that_cannot_be_written_is_one_line_with_the_key_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache"):
        cached(tmp_path / "file" / "cache", "entry", ("a",), array, fits)


def test_a_key_counts_the_contents_of_arrays() -> None:
    first = np.arange(5, dtype=np.int32)
    keys = {key(first, 1), key(first, 2), key(first + 1, 1), key(first[:4], 1), key(first.astype(np.int64), 1)}
    assert len(keys) == 5
    assert key(first.copy(), 1) == key(first, 1)
