"""The ranks that a run folder excludes: who is in the record, and what is refused there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_run.errors import CheckpointError, InputError
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.run_folder.excluded import NAME, Excluded, exclude, read_excluded, remaining

ONE, OTHER = Excluded("gpu1", 3, rank=11, step=6, attempt=2, reason="slow", time="today"), Excluded("gpu2", 0)


def test_who_is_excluded_stays_so_over_attempts_once_each(tmp_path: Path) -> None:
    assert read_excluded(tmp_path) == read_excluded(tmp_path / "absent") == ()
    exclude(RunFolder(tmp_path, 1), [ONE])
    exclude(RunFolder(tmp_path, 2), [Excluded("gpu1", 3, rank=5), OTHER])
    assert read_excluded(tmp_path) == (ONE, OTHER)


def test_what_a_user_adds_to_the_record_stays(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"note": "ask Kim", "ranks": [{"host": "gpu1", "place": 3, "seen": 1}]}))
    exclude(RunFolder(tmp_path, 1), [OTHER])
    record = json.loads((tmp_path / NAME).read_text())
    assert (record["note"], record["ranks"][0]["seen"], len(record["ranks"])) == ("ask Kim", 1, 2)


def test_the_ranks_that_remain_are_those_of_other_places_and_hosts() -> None:
    there = [Excluded(host, place) for host in ("gpu1", "gpu2") for place in range(4)]
    assert remaining([ONE, OTHER, Excluded("gpu9", 1)], there) == (0, 1, 2, 5, 6, 7)
    with pytest.raises(InputError, match=r"^no rank is left to train on: excluded.json in the run folder names all 1 "):
        remaining([OTHER], [Excluded("gpu2", 0)])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "no list 'ranks'"),
        ('{"ranks": 3}', "no list 'ranks'"),
        ('{"ranks": [7]}', "'7' has no host and local number 'place'"),
        ('{"ranks": [{"host": "gpu1"}]}', "has no host and local number"),
        ('{"ranks": [{"host": "", "place": 1}]}', "has no host and local number"),
        ('{"ranks": [{"host": "gpu1", "place": true}]}', "has no host and local number"),
        ('{"ranks": [{"host": "gpu1", "place": -1}]}', "has no host and local number"),
        (" " * (1 << 20) + "{}", "larger|bytes"),
    ],
    ids=lambda text: text[:20],
)
def test_what_no_run_writes_is_refused_in_one_line(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / NAME).write_text(content)
    with pytest.raises(InputError, match=why) as refused:
        read_excluded(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / NAME} does not say which ranks are left out: ")
    assert "\n" not in str(refused.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("made", ["link", "pipe", "folder"])
def test_what_is_no_file_is_refused(tmp_path: Path, made: str) -> None:
    run, record = tmp_path / "run", tmp_path / "run" / NAME
    run.mkdir()
    (tmp_path / "elsewhere").write_text('{"ranks": []}')
    make = {"link": lambda: record.symlink_to(tmp_path / "elsewhere"), "pipe": lambda: os.mkfifo(record)}
    make.get(made, record.mkdir)()
    with pytest.raises(InputError, match="does not say which ranks are left out"):
        read_excluded(run)
    with pytest.raises(InputError, match="does not say which ranks are left out"):
        exclude(RunFolder(run, 1), [ONE])
    assert (tmp_path / "elsewhere").read_text() == '{"ranks": []}'


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="which rank is left out cannot be recorded: No such file"):
        exclude(RunFolder(tmp_path / "gone", 1), [ONE])
