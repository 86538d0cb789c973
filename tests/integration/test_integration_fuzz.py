"""Foreign bytes: what once broke a reader gets an answer, and the campaign sees what has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_run.errors import DataError
from megatron_run_planner.accuracy import _COLUMNS
from tests.campaigns import fuzz, readers
from tests.campaigns.fuzz import Fuzzed, drawn, fuzz_all
from tests.campaigns.fuzzed import DATA, READERS, FuzzedReader
from tests.campaigns.samples import write_samples

COLUMNS = [name.encode() for name in _COLUMNS]
DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
#: What the fuzzer has found, made small: the reader, and what made it take too much or raise what it may not.
FOUND = [
    ("metrics.jsonl", b'{"v": 1}\n'),
    ("metrics.jsonl", b"[]\n"),
    ("metrics.jsonl", b"\xff\n"),
    ("metrics.jsonl", DEEP + b"\n"),
    ("eval.jsonl", b'{"step": 1, "loss": []}\n{"step": 2, "loss": 3.5}\n'),
    ("eval.jsonl", b'{"step": 1}\n'),
    ("tokenizer_config.json", b'{"chat_template": [{"name": [], "template": "x"}]}'),
    ("tokenizer_config.json", DEEP),
    ("a chat template", b"{{ 9 ** 9 ** 9 }}"),
    ("a chat template", b"{{ 'a' * 99999999999 }}"),
    ("a chat template", b"{{ " + b"9" * 5000 + b" }}"),
    ("tokenizer_config.json of BERT", DEEP),
    ("vocab.json", b'{"a": 4294967295}'),
    ("what a dataset was made of", DEEP),
    ("an order of samples", b"\x93NUMPY\x01\x00v\x00{'descr'" + b"\0" * 110),
    ("JSON lines of tokens", b'{"tokens": [[], 2]}\n'),
    ("JSON lines of tokens", b'{"tokens": [18446744073709551615]}\n'),
    ("MNLI's lines", DEEP),
    ("MNLI's lines", b"[]"),
    ("RACE's passages", b"[]"),
    ("SQuAD's questions", b'{"data": [{"paragraphs": [{"context": "a", "qas": ["q"]}]}]}'),
    ("prompts", DEEP),
    ("passages of a task", DEEP),
    ("a device", b"name: \xff\n"),
    ("a table of runs", b"# GPUs\n" + b"1" * 200_000),
    ("a table of runs", b",".join(COLUMNS) + b"\n" + b",".join([b"1e999"] * len(COLUMNS))),
    ("the launch script slurm", b"torchrun pretrain_gpt.py --use-" + b"9" * 5000),
    ("messages of a sidecar", b'{"quiet": "x", "stopped": 0}\n'),
    ("messages of a sidecar", b'{"quiet": NaN, "stopped": []}\n'),
    ("config.json of llama", b'{"vocab_size": 99999999999999999999}'),
]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("fuzz") / "samples"
    write_samples(folder, {Path(READERS[name].file).parts[0] for name, _ in FOUND})
    yield folder
    hub = readers.hub()  # of which a process of the campaign has one
    hub.start()
    hub.finish(10.0)
    readers.hub.cache_clear()


@pytest.mark.parametrize(("name", "content"), FOUND, ids=[f"{name}-{n}" for n, (name, _) in enumerate(FOUND)])
def test_what_once_broke_a_reader_gets_an_answer(name: str, content: bytes, samples: Path, tmp_path: Path) -> None:
    assert not Fuzzed(READERS[name], samples, tmp_path).attempt(content)


#: Readers that are quick, of each group that is.
QUICK = ("YAML", "a manifest with its SHA-256 made right", "a shard", "an .idx", "JSON lines", "messages of a sidecar")


@pytest.mark.nightly
def test_a_few_changed_files_get_their_answers(tmp_path: Path) -> None:
    rows = fuzz_all(tmp_path, 120, seed=0, jobs=1, only=QUICK)
    assert not [fault for row in rows for fault in row.faults]
    assert sum(row.tried for row in rows) >= 120


def test_a_reader_that_is_wrong_about_some_bytes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> None:
        content = path.read_bytes()
        if b"9" in content:
            raise KeyError(content)
        if b"-" in content:
            while True:
                pass
        if not content.startswith(b"{"):
            raise DataError("")

    monkeypatch.setattr(fuzz, "PROMPT", 0.05)
    (tmp_path / "samples" / "a").mkdir(parents=True)
    (tmp_path / "samples" / "a" / "b").write_bytes(b'{"a": 1, "b": [1, 2]}')
    reader = FuzzedReader("odd", DATA, "a/b", read, "json")
    fuzzed = Fuzzed(reader, tmp_path / "samples", tmp_path / "work")
    tally = fuzzed.run(drawn(reader, fuzzed.corpus, 300, seed=1))
    kinds = {fault.split(",")[0]: content for fault, content in tally.faults.items()}
    assert kinds.keys() == {"KeyError", "no answer within 0.05 s", "an error that says nothing"}
    assert len(kinds["KeyError"]) < 30  # it was made small
