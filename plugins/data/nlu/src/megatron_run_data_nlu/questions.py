"""The published files of the tasks, read into questions: MNLI, QQP, SQuAD 1.1 and 2.0, RACE.

A file that is not what its task publishes raises :class:`DataError` with its name and place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from megatron_run.errors import DataError
from megatron_run.files.safe_folder import parse_json
from megatron_run_engine.data.user_files import json_line, read_text, text_lines

TaskName = Literal["mnli", "qqp", "squad1", "squad2", "race"]
Part = Literal["train", "validation", "test"]

#: The classes of MNLI in the order of their numbers.
ENTAILMENT = ("contradiction", "entailment", "neutral")
#: The names of the files of each task, as published; the first that exist are read, patterns in order of names.
FILES: Mapping[str, Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "mnli": {
            "train": ("train.tsv", "multinli_1.0_train.jsonl"),
            "validation": ("dev_*matched.tsv", "multinli_1.0_dev_*matched.jsonl"),
        },
        "qqp": {"train": ("train.tsv",), "validation": ("dev.tsv",)},
        "squad1": {"train": ("train-v1.1.json",), "validation": ("dev-v1.1.json",)},
        "squad2": {"train": ("train-v2.0.json",), "validation": ("dev-v2.0.json",)},
        "race": {"train": ("train/**/*.txt",), "validation": ("dev/**/*.txt",), "test": ("test/**/*.txt",)},
    }
)


@dataclass(frozen=True)
class Choice:
    """A question with one answer among classes or choices: the ``rows`` of texts to read, and the right number.

    Classes have one row for all of them, choices one each. ``group`` is a part of the task with a metric of its own.
    """

    rows: tuple[tuple[str, str], ...]
    answer: int
    group: str = ""


@dataclass(frozen=True)
class Question:
    """A question on ``context``, answered by any of ``answers``, (text, first character); by none where it is empty."""

    name: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


def files_of(task: TaskName, part: Part, folder: Path) -> list[Path]:
    """The files of ``part`` in ``folder``, none where the task publishes none. Raises DataError where they lack."""
    patterns = FILES[task].get(part, ())
    for pattern in patterns:
        if found := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return found
    if patterns:
        raise DataError(
            f"{folder} has no {' and no '.join(patterns)}",
            why=f"{task} is published so",
            origin="data.folder",
            fix="unpack the task's archive, and name the folder in which these files are",
        )
    return []


def read_choices(task: TaskName, path: Path) -> Iterator[Choice]:
    """The questions of one file of MNLI, QQP or RACE; pairs without a gold label are left out."""
    if task == "race":
        yield from _race(path)
    elif path.suffix == ".jsonl":
        for number, line in text_lines(path):
            with _place(path, f"line {number}"):
                yield from _entailment(json_line(line), path.stem)
    else:
        yield from _TABLES[task](path)


def read_questions(path: Path) -> Iterator[Question]:
    """The questions of a file of SQuAD."""
    with _place(path, "it"):
        for article in parse_json(read_text(path))["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    given = () if asked.get("is_impossible") else asked["answers"]
                    answers = tuple((str(each["text"]), int(each["answer_start"])) for each in given)
                    yield Question(str(asked["id"]), asked["question"], paragraph["context"], answers)


def _entailment(row: Mapping[str, str], group: str) -> Iterator[Choice]:
    if row["gold_label"] != "-":  # the annotators did not agree
        yield Choice(((row["sentence1"], row["sentence2"]),), ENTAILMENT.index(row["gold_label"]), group)


def _mnli(path: Path) -> Iterator[Choice]:
    for row, place in _rows(path):
        with _place(path, place):
            yield from _entailment(row, path.stem)


def _qqp(path: Path) -> Iterator[Choice]:
    """The pairs of a file; its few published lines that end early are left out, as by GLUE's own readers."""
    for row, place in _rows(path):
        if "question2" in row and "is_duplicate" not in row:
            continue
        with _place(path, place):
            yield Choice(((row["question1"], row["question2"]),), ("0", "1").index(row["is_duplicate"]))


_TABLES: Mapping[str, Callable[[Path], Iterator[Choice]]] = MappingProxyType({"mnli": _mnli, "qqp": _qqp})


def _race(path: Path) -> Iterator[Choice]:
    """A passage with its questions; a blank of a question is filled with each option, which else follows it."""
    with _place(path, "it"):
        passage = parse_json(read_text(path))
        group = path.parent.name if path.parent.name in ("middle", "high") else ""
        for asked, options, answer in zip(passage["questions"], passage["options"], passage["answers"], strict=True):
            filled = [asked.replace("_", option) if "_" in asked else f"{asked} {option}" for option in options]
            rows = tuple((passage["article"], each) for each in filled)
            yield Choice(rows, "ABCD".index(answer), group)


def _rows(path: Path) -> Iterator[tuple[dict[str, str], str]]:
    """The rows of a table with a header, and where each is; a quotation mark is a character like others."""
    lines = text_lines(path)
    header = next(lines, (1, ""))[1].split("\t")
    for number, line in lines:
        if line:
            yield dict(zip(header, line.split("\t"), strict=False)), f"line {number}"


@contextmanager
def _place(path: Path, place: str) -> Iterator[Any]:
    """Name file and place for content that is not what the task publishes."""
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError) as cause:
        said = f"it has no {cause}" if isinstance(cause, KeyError) else str(cause)
        raise DataError(f"{path}: {place} is not of this task", why=said, origin="data.folder") from cause
