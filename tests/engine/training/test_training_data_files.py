"""Which file of a run's data has changed, by what its run folder keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from megatron_run_engine.checkpoint.manifest import DataRecord
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.training.state.data_files import changed_files, keep_listed

FIRST: Mapping[str, str] = MappingProxyType({"a.txt": "a", "b.txt": "b", "c.txt": "c"})


def record(total: str, files: Mapping[str, str]) -> DataRecord:
    """Of files by their names, each with a letter for its hash."""
    listed = tuple((name, letter * 32) for name, letter in files.items())
    return DataRecord(samples=1, sha256="0" * 64, files=total * 32, listed=listed)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose first attempt read the files of ``FIRST``, and the second one another one."""
    keep_listed(record("1", FIRST), RunFolder(tmp_path, 1))
    keep_listed(record("2", {"other.txt": "e"}), RunFolder(tmp_path, 2))
    keep_listed(record("3", {}), RunFolder(tmp_path, 3))
    keep_listed(record("4", FIRST), RunFolder(tmp_path, 4, rank=1))
    return tmp_path


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({**FIRST, "b.txt": "d"}, "b.txt has other contents"),
        ({"a.txt": "a", "b.txt": "b"}, "c.txt is gone"),
        ({**FIRST, "d.txt": "d"}, "d.txt is new"),
        ({"/moved/a.txt": "a", "/moved/b.txt": "f", "/moved/c.txt": "c"}, "/moved/b.txt has other contents"),
        ({"renamed.txt": "a", "b.txt": "b", "c.txt": "d"}, "c.txt has other contents"),
        ({name: FIRST[name] for name in ("c.txt", "b.txt", "a.txt")}, "the same files in another order"),
        ({"a.txt": "1", "b.txt": "2", "x.txt": "3"}, "a.txt has .*, b.txt has other contents, x.txt is new and 1 more"),
    ],
)
def test_the_file_is_named_with_what_became_of_it(run: Path, now: Mapping[str, str], said: str) -> None:
    assert re.fullmatch(said, changed_files(run, record("1", {}), record("9", now)))


def test_a_step_of_any_attempt_is_compared_with_its_own_files(run: Path) -> None:
    assert changed_files(run, record("2", {}), record("9", {"other.txt": "f"})) == "other.txt has other contents"


#: Of a record for the step that the test below asks about, whose list is none.
SEVENS = "7" * 32


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{}",
        "[1]",
        '{"files": "1"',
        *(f'{{"files": "{SEVENS}", "listed": {listed}}}' for listed in ("[1]", '{"a": []}', '{"a": 5}', '{"a": {}}')),
    ],
)
def test_nothing_is_said_where_nothing_is_known(run: Path, content: str | None) -> None:
    if content is not None:
        (run / "data.json").write_text(content)
    assert changed_files(run, record("7", {}), record("9", FIRST)) == ""
    assert changed_files(run, record("1", {}), record("9", {})) == ""
    assert changed_files(run, record("1", {}), record("1", FIRST)) == "", "the files are the same"


def test_a_step_does_not_hold_the_list() -> None:
    assert record("1", FIRST).model_dump() == {"samples": 1, "sha256": "0" * 64, "files": "1" * 32}
