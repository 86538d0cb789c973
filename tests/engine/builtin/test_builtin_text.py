"""data=text: from files to samples, splits and a baseline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from inspect import getsource
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, models

from megatron_run.contracts import DataSource, Split
from megatron_run.errors import DataError
from megatron_run_engine.builtin.data.text import Text, TextOptions, megatron_run_create_data
from megatron_run_engine.data.documents import PackedDataset
from megatron_run_engine.data.packing import PackedDocuments
from megatron_run_testing.data import data_checks

SPLITS: tuple[Split, ...] = get_args(Split)


def corpus(folder: Path, count: int = 40) -> Path:
    for number in range(count):
        (folder / f"{number:03}.txt").write_text(f"document {number} says {number * number}\n")
    return folder


def text(*paths: Path, **options: object) -> DataSource:
    return megatron_run_create_data(TextOptions.model_validate({"paths": [str(path) for path in paths], **options}))


def documents(source: DataSource, split: Split) -> set[str]:
    """What the stream of a split holds between the ends of documents."""
    dataset = source.dataset(split, 1, 0)
    assert isinstance(dataset, PackedDataset)
    tokens, labels = dataset.pairs(range(len(dataset)))
    stream = [*tokens.tolist(), *labels.tolist()[-1:]]
    pieces, piece = set(), bytearray()
    for token in stream:
        if token < 256:
            piece.append(token)
        elif piece:
            pieces.add(piece.decode())
            piece = bytearray()
    return pieces


def test_splits_are_disjoint_and_complete(tmp_path: Path) -> None:
    source = text(corpus(tmp_path), split="60,20,20")
    found = [documents(source, split) for split in SPLITS]
    assert sum(map(len, found)) == 40
    assert set.union(*found) == {path.read_text() for path in tmp_path.iterdir()}


def test_packed_documents_conform_and_hold_every_label_once(tmp_path: Path) -> None:
    source = text(corpus(tmp_path), split="60,20,20", packing="documents")
    for check in data_checks(source):
        check.run()
    dataset = source.dataset("train", 32, 0)
    assert isinstance(dataset, PackedDocuments)
    labels = np.concatenate([dataset.pairs([index])[1] for index in range(len(dataset))])
    whole = [document.encode() for document in documents(text(tmp_path, split="60,20,20"), "train")]
    assert sorted(labels.tolist()) == sorted([*b"".join(document[1:] for document in whole), *[256] * len(whole)])
    assert source.summary(32, 0) == str(dataset)
    assert f"{len(whole)} documents in {len(dataset)} rows of 32 tokens, " in str(dataset)


def test_a_new_file_moves_no_other(tmp_path: Path) -> None:
    before = {split: documents(text(corpus(tmp_path), split="60,20,20"), split) for split in SPLITS}
    (tmp_path / "000-new.txt").write_text("a new document")
    after = {split: documents(text(tmp_path, split="60,20,20"), split) for split in SPLITS}
    assert all(before[split] <= after[split] for split in SPLITS)
    assert sum(map(len, after.values())) == 41


def test_a_document_that_is_alone_is_cut(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"{number:04}" for number in range(250)))
    source = text(tmp_path / "book.txt", split=[0.8, 0.1, 0.1])
    assert [len(next(iter(documents(source, split)))) for split in SPLITS] == [800, 100, 100]


def test_few_documents_are_cut_where_validation_would_get_none(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * 1000)
    sizes = {split: [len(piece) for piece in documents(text(tmp_path), split)] for split in SPLITS}
    assert sizes == {"train": [900] * 3, "validation": [50] * 3, "test": [50] * 3}
    assert [len(piece) for piece in documents(text(tmp_path, split="100,0,0"), "train")] == [1000] * 3


def test_a_split_too_short_for_a_sample_says_what_to_do(tmp_path: Path) -> None:
    source = text(corpus(tmp_path, count=3), split="99,0.1,0.9")
    message = (
        r"the validation split is too short .*: 0% of 3 files came to 0 tokens, and a sample needs 65 .*; name more"
    )
    with pytest.raises(DataError, match=message):
        source.dataset("validation", 64, 0)


@pytest.mark.parametrize(("split", "length"), [("train", 300), ("validation", 60), ("train", 10**12)])
def test_what_is_advised_for_too_little_text_is_enough(split: Split, length: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 320)
    with pytest.raises(DataError, match="too short") as caught:
        text(tmp_path / "a.txt").dataset(split, length, 0)
    shorter = re.search(r"lower train.sequence_length to (\d+)", str(caught.value))
    assert shorter
    assert len(text(tmp_path / "a.txt").dataset(split, int(shorter[1]), 0)) == 1
    share = re.search(rf"give {split} (\d+)%", str(caught.value))
    assert (share is None) == (length > 320)
    if share:
        rest = 100 - int(share[1])
        shares = f"{share[1]},{rest},0" if split == "train" else f"{rest},{share[1]},0"
        assert len(text(tmp_path / "a.txt", split=shares).dataset(split, length, 0)) == 1


def test_a_split_of_which_nothing_is_asked_is_empty(tmp_path: Path) -> None:
    assert len(text(corpus(tmp_path), split="100,0,0").dataset("validation", 64, 0)) == 0


@pytest.mark.parametrize("split", ["90,5", "0,50,50", "90,-5,5", "a,b,c", [1, float("nan"), 1], "nan,1,1"])
def test_a_split_that_makes_no_sense_is_refused(split: object) -> None:
    with pytest.raises(ValidationError):
        TextOptions.model_validate({"split": split})


def test_one_path_may_be_written_bare(tmp_path: Path) -> None:
    assert TextOptions.model_validate({"paths": "a, b.txt"}).paths == ("a, b.txt",)


def test_files_are_read_when_a_split_is_asked_for(tmp_path: Path) -> None:
    source = text(tmp_path / "absent.txt")
    assert source.vocab_size == 257
    with pytest.raises(DataError, match=r"absent.txt does not exist"):
        source.dataset("train", 8, 0)


def test_json_lines_are_the_texts_that_they_hold(tmp_path: Path) -> None:
    """Named, in a folder or matched by a pattern: what is learned is what files of these texts would teach."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    words = [f"words of document {number}" for number in range(60)]
    path = tmp_path / "a" / "c.jsonl"
    path.write_text("\ufeff" + "".join(json.dumps({"id": 1, "text": each}) + "\r\n\n" for each in words), "utf-8")
    for number, each in enumerate(words):
        (tmp_path / "b" / f"{number:03}.txt").write_text(each)
    expected = text(tmp_path / "b", split="1,0,0").dataset("train", 16, 0)
    for named in (path, tmp_path / "a", tmp_path / "*" / "*.jsonl"):
        found = text(named, split="1,0,0").dataset("train", 16, 0)
        assert len(found) == len(expected) > 60
        assert all(np.array_equal(found[i]["tokens"], expected[i]["tokens"]) for i in range(len(found)))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            '{"messages": []}',
            r"c.jsonl:2 is no record with a text: of JSON lines .*; for conversations add --plugin data=",
        ),
        ('{"text": "cut', r"c.jsonl:2 is no record: "),
    ],
)
def test_a_line_without_a_text_is_told_with_its_place(line: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "words"}\n' + line + "\n")
    with pytest.raises(DataError, match=why) as refused:
        text(tmp_path / "c.jsonl").dataset("train", 4, 0)
    assert refused.value.origin == "data.paths"


def test_text_that_the_tokenizer_loses_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(tmp_path / "t.json"))
    (tmp_path / "text.txt").write_text("abx" * 100)
    assert len(text(tmp_path / "text.txt", tokenizer=str(tmp_path / "t.json")).dataset("train", 4, 0))
    assert "data.tokenizer has no token for 100 characters of the text, which are left out" in caplog.messages


def test_the_baseline_is_the_bigram_of_the_training_split(tmp_path: Path) -> None:
    source, samples = text(corpus(tmp_path), split="60,20,20"), [3, 0]
    ((name, loss),) = source.baselines(8, 0, samples).items()
    assert name == "byte bigram"
    opened = source.dataset("train", 8, 0)
    train = [opened[index] for index in range(len(opened))]
    validation = [source.dataset("validation", 8, 0)[index] for index in samples]
    counts = np.full((257, 257), 0.1)
    for sample in train:
        for token, label in zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True):
            counts[token, label] += 1
    logs = np.log(counts / counts.sum(1, keepdims=True))
    expected = -np.mean([logs[sample["tokens"], sample["labels"]] for sample in validation])
    assert loss == pytest.approx(expected, rel=1e-12)


def test_a_long_split_is_counted_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text(corpus(tmp_path), split="60,20,20")
    (whole,) = source.baselines(8, 0, [0]).values()
    monkeypatch.setattr("megatron_run_engine.builtin.data.text.BIGRAM_TOKENS", 16)
    (part,) = source.baselines(8, 0, [0]).values()
    assert whole < part, "fewer tokens taught it more"


def test_text_goes_there_and_back(tmp_path: Path) -> None:
    source = text(tmp_path)
    ids = source.encode("def f():\n    return 'ä'\n")
    assert ids is not None
    assert source.decode(ids) == "def f():\n    return 'ä'\n"


def described(source: Any) -> str:
    """Sizes and contents of its splits."""
    lines = ""
    for split in ("train", "validation", "test"):
        dataset = source.dataset(split, 64, 1)
        lines += f"{split} {len(dataset)} {sha256(dataset.pairs(range(len(dataset)))[1]).hexdigest()}\n"
    return lines


@pytest.mark.multiproc
def test_processes_agree_on_the_default_data() -> None:
    code = f"""
from __future__ import annotations
import sys
from hashlib import sha256
sys.modules["torch"] = object()  # what its import takes is most of such a process, and the data need none of it
from megatron_run_engine.builtin.data.text import Text, TextOptions
{getsource(described)}
print(described(Text(TextOptions())), end="")
"""
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # this process has a random one
    environment = {**os.environ, "PYTHONHASHSEED": other, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert len(asked.splitlines()) == 3
    assert asked == described(Text(TextOptions()))
