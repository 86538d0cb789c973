"""Published files as samples, and logits as metrics by the definitions of the official scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_run.errors import DataError, InputError, RunError
from megatron_run.planning import load_config
from megatron_run_data_nlu import Nlu, NluOptions, recipes
from megatron_run_data_nlu import official_metrics as metrics
from megatron_run_data_nlu.rows import Spans
from tests.plugins.data.nlu import published

LENGTH = 24


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    published.vocabulary(folder / "vocab.txt")
    published.mnli(folder / "mnli")
    published.qqp(folder / "qqp")
    published.squad(folder / "squad1", "v1.1")
    published.squad(folder / "squad2", "v2.0")
    published.race(folder / "race")
    return folder


def source(home: Path, task: str, **options: Any) -> Nlu:
    given = {"task": task, "folder": str(home / task), "tokenizer": str(home / "vocab.txt"), **options}
    return Nlu(NluOptions.model_validate(given))


def text_of(made: Nlu, sample: Any, row: int = 0) -> str:
    """The tokens of one row as words, with special tokens, without padding."""
    names = {number: name for name, number in made.tokenizer.vocabulary.items()}
    first, stop = sample["documents"][2 * row : 2 * row + 2]
    return " ".join(names[token] for token in sample["tokens"][first:stop].tolist())


def test_a_pair_with_a_class_is_a_row(home: Path) -> None:
    made = source(home, "mnli")
    opened = made.dataset("train", LENGTH, 0)
    assert len(opened) == 3  # a pair without a gold label is left out
    assert text_of(made, opened[1]) == "[CLS] the [UNK] cat [UNK] sat on a mat [SEP] the cat ##s sat [SEP]"
    assert [int(opened[number]["labels"][0]) for number in range(3)] == [0, 1, 2]
    assert opened[1]["loss_mask"].tolist() == [1.0] + [0.0] * (LENGTH - 1)
    assert opened[1]["token_types"].tolist() == [0] * 10 + [1] * 5 + [0] * 9
    assert len(made.dataset("validation", LENGTH, 0)) == 6
    duplicates = source(home, "qqp").dataset("train", LENGTH, 0)
    assert [int(duplicates[number]["labels"][0]) for number in range(2)] == [0, 1]
    assert len(duplicates) == 2  # the line that ends early is left out


def test_of_a_long_pair_the_longer_text_is_cut(home: Path) -> None:
    made = source(home, "mnli")
    assert text_of(made, made.dataset("train", 12, 0)[1]) == "[CLS] the [UNK] cat [UNK] sat [SEP] the cat ##s sat [SEP]"
    assert text_of(made, made.dataset("train", 9, 0)[1]) == "[CLS] the [UNK] cat [SEP] the cat ##s [SEP]"


def test_choices_are_rows_of_one_sample(home: Path) -> None:
    made = source(home, "race")
    opened = made.dataset("train", 4 * LENGTH, 0)
    assert len(opened) == 4
    first, blank = opened[2], opened[3]  # of middle, which comes after high
    assert text_of(made, first, 0).endswith("[SEP] who sat ? the cat [SEP]")
    assert text_of(made, first, 3).endswith("[SEP] who sat ? no [SEP]")
    assert text_of(made, blank, 1).endswith("[SEP] the dog ran home . [SEP]")
    assert (int(first["labels"][0]), int(blank["labels"][0])) == (0, 1)
    assert first["documents"][::2].tolist() == [0, LENGTH, 2 * LENGTH, 3 * LENGTH, 4 * LENGTH]


@pytest.mark.parametrize("length", [24, 12], ids=["one window", "windows"])
def test_the_ends_of_a_span_are_its_first_and_last_token(home: Path, length: int) -> None:
    made = source(home, "squad2", stride=3)
    opened = made.dataset("train", length, 0)
    assert isinstance(opened, Spans)
    answers = dict[str, set[str]]()
    for number, window in enumerate(opened.windows):
        sample = opened[number]
        first, last = sample["labels"][:2].tolist()
        assert sample["loss_mask"][:3].tolist() == [1.0, 1.0, 0.0]
        words = text_of(made, sample).split()
        answers.setdefault(opened.questions[window.question].name, set()).add(" ".join(words[first : last + 1]))
    nothing = {"[CLS]"} if length == 12 else set()
    assert answers == {"q1": {"the dog"} | nothing, "q2": {"a mat"} | nothing, "q3": {"[CLS]"}}


def test_logits_at_the_right_places_are_right_answers(home: Path) -> None:
    nothing = dict[str, Mapping[str, float]]()
    for task, length in (("squad1", 24), ("squad2", 24), ("squad2", 12)):
        made = source(home, task, stride=3)
        opened = made.dataset("validation", length, 0)
        judge = made.judge("validation", length, 0)
        assert judge is not None
        logits = np.zeros((len(opened), length, 2), np.float32)
        logits[:, -3] = 1.0  # a span of which less is thought than of the right ends
        for number in range(len(opened)):
            for end, place in enumerate(opened[number]["labels"][:2].tolist()):
                logits[number, place, end] = 9.0
        assert judge(logits) == {"exact_match": 100.0, "f1": 100.0}
        nothing[task] = judge(np.zeros_like(logits))
    assert nothing["squad2"]["exact_match"] == pytest.approx(100 / 3)  # nothing is right for q3 alone


def test_accuracy_counts_groups_apart_and_f1_counts_class_one(home: Path) -> None:
    made = source(home, "mnli")
    judge = made.judge("validation", LENGTH, 0)
    assert judge is not None
    logits = np.zeros((6, 1, 3), np.float32)
    logits[[0, 1, 2, 3, 4, 5], 0, [0, 1, 2, 0, 0, 0]] = 1.0
    found = judge(logits)
    assert found == pytest.approx(
        {"accuracy": 400 / 6, "accuracy_dev_matched": 100, "accuracy_dev_mismatched": 100 / 3}
    )
    right = np.array([1, 1, 1, 0, 0])
    assert metrics.binary_f1(np.array([1, 0, 0, 1, 0]), right) == pytest.approx(40)  # precision 1/2, recall 1/3
    assert metrics.binary_f1(np.zeros(5, int), right) == 0


#: Answers, the right one, exact match and F1 by the definitions of SQuAD's evaluate-v2.0.py, computed by hand.
PAIRS = [
    ("The Dog!", "dog", 1, 1.0),
    ("a big dog", "the dog ran", 0, 1 / 2),
    ("dog dog cat", "dog cat cat", 0, 2 / 3),  # words in common count as often as in both
    ("", "", 1, 1.0),
    ("", "dog", 0, 0.0),
    ("the", "a", 1, 1.0),  # articles alone are nothing
    ("U.S.", "us", 1, 1.0),
    ("half-time", "halftime", 1, 1.0),
    ("1,000  men", "1000 men", 1, 1.0),
    ("theatre", "atre", 0, 0.0),  # an article within a word is none
]


@pytest.mark.parametrize(("found", "right", "exact", "f1"), PAIRS)
def test_exact_match_and_f1_are_those_of_the_official_script(found: str, right: str, exact: int, f1: float) -> None:
    assert metrics.exact_match(found, right) == exact
    assert metrics.word_f1(found, right) == pytest.approx(f1)


def test_scores_of_random_answers_are_those_that_the_official_scripts_gave() -> None:
    """Rows of the file: an answer, those that are right, and exact match and F1 of evaluate-v1.1.py and -v2.0.py."""
    rows = json.loads((Path(__file__).parent / "official_scores.json").read_text())
    assert sum(first != second for _, _, first, second in rows) >= 5, "the scripts differ in empty answers"
    for found, right, *scores in rows:
        for may_lack, (exact, f1) in zip((False, True), scores, strict=True):
            given = metrics.squad({"q": found}, {"q": right}, may_lack=may_lack)
            assert given == pytest.approx({"exact_match": exact, "f1": f1}), (found, right, may_lack)


def test_the_best_of_several_answers_counts() -> None:
    found = metrics.squad(
        {"a": "the dog", "b": "", "c": "cat"}, {"a": ["a cat", "dog"], "b": [], "c": ["the", "big cat"]}
    )
    assert found == pytest.approx({"exact_match": 200 / 3, "f1": 100 * (1 + 1 + 2 / 3) / 3})


def test_table_6_is_in_the_recipes() -> None:
    rows = {
        "mnli": (10, (128, 1e-5), (128, 1e-5), (128, 1e-5)),
        "qqp": (12, (128, 5e-5), (128, 3e-5), (256, 4e-5)),
        "squad1": (2, (64, 3e-5), (48, 3e-5), (48, 1e-5)),
        "squad2": (2, (48, 3e-5), (64, 3e-5), (48, 1e-5)),
        "race": (3, (32, 2e-5), (16, 1e-5), (32, 2e-5)),
    }
    sizes = {"336M": (24, 1024), "1.3B": (24, 2048), "3.9B": (48, 2560)}
    for task, (epochs, *by_model) in rows.items():
        for (name, size), expected in zip(sizes.items(), by_model, strict=True):
            found, row = recipes.published(task, *size)  # type: ignore[arg-type]  # a task's name
            assert (found, row.epochs, row.batch, row.lr) == (name, epochs, *expected)
            assert row.train(1000, 512)["samples"] // row.batch == 1000 * epochs // row.batch


def test_a_saved_model_is_fine_tuned_by_its_row_of_the_table(home: Path) -> None:
    saved = {"use": "bert", "num_layers": 24, "hidden_size": 2048, "choices": 1}
    found = source(home, "race").recipe(saved, 128)
    assert found.summary == "race by the recipe of the 1.3B model: 3 epochs"
    assert found.model == {"head": "choice", "choices": 4, "max_positions": 128}
    assert (found.train["sequence_length"], found.train["lr"]) == (4 * 128, 1e-5)
    assert found.train["samples"] == max(1, 3 * len(source(home, "race").dataset("train", 512, 0)) // 16) * 16
    longer = source(home, "mnli").recipe({**saved, "max_positions": 512}, 128)
    assert (longer.model["max_positions"], longer.train["sequence_length"]) == (512, 128)
    with pytest.raises(InputError, match=r"data\.task=mnli trains model=bert: the model is gpt"):
        source(home, "mnli").recipe({**saved, "use": "gpt"}, 128)


def test_files_that_are_not_of_the_task_are_told_with_their_place(home: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no train\.tsv"):
        source(home, "mnli", folder=str(tmp_path)).dataset("train", LENGTH, 0)
    published.table(tmp_path / "train.tsv", "sentence1|sentence2|gold_label", "a|b|maybe")
    with pytest.raises(DataError, match=r"train\.tsv: line 2"):
        source(home, "mnli", folder=str(tmp_path)).dataset("train", LENGTH, 0)
    with pytest.raises(InputError, match=r"\[CLS\], \[SEP\]"):
        source(home, "mnli", tokenizer="bytes").dataset("train", LENGTH, 0)


@pytest.mark.parametrize(
    ("task", "model", "wanted"),
    [
        ("mnli", "gpt", "classification"),
        ("qqp", "bert,head=masked", "classification"),
        ("squad2", "bert,head=classification", "span"),
        ("race", "bert,head=span", "choice"),
    ],
)
def test_a_model_without_the_head_of_the_task_is_refused_while_planned(task: str, model: str, wanted: str) -> None:
    plugins = [f"data=nlu,task={task},folder=none", f"model={model}"]
    with pytest.raises(RunError, match=f"model.head={wanted}"):
        load_config("preset:tiny", plugins=plugins)
    right = f"model=bert,head={wanted}" + (",choices=4" if wanted == "choice" else "")
    assert load_config("preset:tiny", plugins=[plugins[0], right]).config.model.options["head"] == wanted
