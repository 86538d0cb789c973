"""What is no file, or has no end, in the place of a reader's file: an answer for each, and who waits is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns import special as campaign
from tests.campaigns.fuzzed import DATA, READERS, FuzzedReader
from tests.campaigns.special import SPECIAL, Placed, all_readers, placed, special

#: Readers of each kind of opening that is quick to start.
QUICK = (
    *("a configuration, resolved", "a manifest", "a device", "the launch script slurm", "merges.txt", "vocab.txt"),
    *("tokenizer_config.json", "a model of SentencePiece", "a chat template", "an .idx", "an order of samples"),
    *("JSON lines", "a text", "a .gz", "a Parquet file", "conversations", "QQP's table", "what a dataset was made of"),
)


@pytest.mark.nightly
def test_special_files_get_their_answers(tmp_path: Path) -> None:
    rows = special(tmp_path, 0.5, seed=0, jobs=1, only=QUICK)
    assert not [fault for row in rows for fault in row.faults]
    assert sum(row.tried for row in rows) >= 3 * len(QUICK)


def test_every_reader_that_opens_a_file_is_tried() -> None:
    assert set(QUICK) < set(all_readers())
    assert len(READERS) - len(all_readers()) < 12  # what reads words or bytes


@pytest.mark.nightly
def test_a_reader_that_reads_whatever_is_there_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> None:
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass

    (tmp_path / "samples" / "a").mkdir(parents=True)
    (tmp_path / "samples" / "a" / "b").write_bytes(b"words")
    reader = FuzzedReader("odd", DATA, "a/b", read)
    monkeypatch.setattr(campaign, "WAITED", 0.2)
    tally = Placed(reader, tmp_path / "samples", tmp_path / "work").run(placed(reader, (), len(SPECIAL), 0))
    kinds = {fault.split(",")[0] for fault in tally.faults}
    assert kinds == {"no answer within 2 s", "IsADirectoryError", "FileNotFoundError"}
    assert b"a FIFO" in tally.faults.values()
    assert tally.tried == len(SPECIAL)
