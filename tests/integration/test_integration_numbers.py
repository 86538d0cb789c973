"""Numbers that nobody means: an answer in time and memory for each, and the campaign sees what has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.campaigns import fuzz
from tests.campaigns.fuzz import Fuzzed, read_all
from tests.campaigns.fuzzed import DATA, READERS, FuzzedReader
from tests.campaigns.numbers import deep, huge, keys, options
from tests.campaigns.samples import write_samples

#: What once had no answer: the reader, and the words that it was given.
FOUND = [
    ("config show with huge numbers", ("--set", "model.hidden_size=1000000000000", "--set", "model.num_heads=7")),
    ("config show with huge numbers", ("--plugin", "schedule=interleaved", "--set", "schedule.group_size=1000000000")),
    ("a dry run with huge numbers", ("--set", "model.loss_chunks=1000000")),
    ("a dry run with huge numbers", ("--set", "model.experts.layer_freq=1000000000")),
    ("a dry run with huge numbers", ("--plugin", "model=t5", "--set", "model.encoder_length=1000000000")),
    ("a plan with huge numbers", ("--set", "model.num_layers=1000000000")),
    ("a plan with huge numbers", ("--set", "model.num_layers=100000")),
    ("a plan with huge numbers", ("--set", "model.choices=1000000")),
    ("a plan with huge numbers", ("--set", "train.global_batch_size=1000000")),
    ("options with huge numbers", ("plan", "search", "preset:tiny", "--device", "a100", "--gpus", str(10**18))),
    *(("options with huge numbers", words) for words in deep()),
    ("options with huge numbers", ("plan", "goodput", "preset:tiny", "--gpus", "8", "--days", "1000000")),
    ("options with huge numbers", ("schedule", "show", "preset:tiny", "--stages", "4", "--microbatches", "1000000")),
]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers") / "samples"
    write_samples(folder, {"words"})
    return folder


@pytest.mark.parametrize(("name", "words"), FOUND, ids=[f"{number}" for number in range(len(FOUND))])
def test_what_once_had_no_answer_has_one(name: str, words: tuple[str, ...], samples: Path, tmp_path: Path) -> None:
    assert not Fuzzed(READERS[name], samples, tmp_path).attempt(json.dumps(words).encode())


@pytest.mark.nightly
def test_a_share_of_all_numbers_has_answers(tmp_path: Path) -> None:
    names = [name for name in READERS if name.endswith("huge numbers")]
    rows = read_all("a huge number", [(name, 6) for name in names], huge, tmp_path, 5, 1)
    assert not [fault for row in rows for fault in row.faults]
    assert sum(row.tried for row in rows) >= 6 * len(names)


def test_every_key_and_option_that_takes_a_number_is_tried() -> None:
    found = {key.name for key in keys()}
    assert {"train.steps", "model.num_layers", "parallel.layers", "run.time_limit", "data.stride"} <= found
    assert ("plan", "goodput") in {words[:2] for words in options()}


def test_a_loop_over_a_number_of_a_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> None:
        for _ in range(json.loads(path.read_bytes())["count"]):
            pass

    monkeypatch.setattr(fuzz, "PROMPT", 0.1)
    (tmp_path / "samples" / "a").mkdir(parents=True)
    (tmp_path / "samples" / "a" / "b").write_bytes(b'{"count": 3, "other": 1}')
    reader = FuzzedReader("odd", DATA, "a/b", read, "json")
    fuzzed = Fuzzed(reader, tmp_path / "samples", tmp_path / "work")
    tally = fuzzed.run(huge(reader, fuzzed.corpus, 30, 0))
    assert [fault.split(",")[0] for fault in tally.faults] == ["no answer within 0.1 s"]
