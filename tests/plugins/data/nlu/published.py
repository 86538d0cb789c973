"""Small files in the published forms of the tasks, and a vocabulary for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "dog",
    "ran",
    "who",
    "where",
    "what",
    "home",
    ".",
    "?",
    "##s",
    "_",
    "yes",
    "no",
]


def vocabulary(path: Path) -> Path:
    """A vocabulary of WordPiece with one word a line."""
    path.write_text("\n".join(["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *WORDS]) + "\n")
    return path


def table(path: Path, header: str, *rows: str) -> Path:
    """A table as GLUE publishes it; ``|`` stands for a tab."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line.replace("|", "\t") + "\n" for line in (header, *rows)))
    return path


def mnli(folder: Path) -> Path:
    header = "index|sentence1|sentence2|gold_label"
    for name in ("train", "dev_matched", "dev_mismatched"):
        table(
            folder / f"{name}.tsv",
            header,
            "0|the cat sat .|the dog ran .|contradiction",
            '1|the "cat" sat on a mat|the cats sat|entailment',
            "2|the dog ran home|a cat|neutral",
            "3|the dog|a cat|-",
        )
    return folder


def qqp(folder: Path) -> Path:
    header = "id|qid1|qid2|question1|question2|is_duplicate"
    rows = ("0|1|2|who sat ?|who ran ?|0", "1|3|4|where is the cat ?|where the cat ?|1", "2|5|6|what ran|short")
    for name in ("train", "dev"):
        table(folder / f"{name}.tsv", header, *rows)
    return folder


CONTEXT = "The cat sat on a mat. The dog ran home."


def squad(folder: Path, version: str) -> Path:
    def asked(name: str, question: str, *answers: str) -> dict[str, Any]:
        found = [{"text": text, "answer_start": CONTEXT.index(text)} for text in answers]
        impossible = {"is_impossible": not answers} if version == "v2.0" else {}
        return {"id": name, "question": question, "answers": found, **impossible}

    questions = [asked("q1", "who ran ?", "The dog", "dog"), asked("q2", "where ?", "a mat")]
    questions += [asked("q3", "what cats ?")] if version == "v2.0" else []
    content = {"version": version, "data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": questions}]}]}
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "dev"):
        (folder / f"{part}-{version}.json").write_text(json.dumps(content))
    return folder


def race(folder: Path) -> Path:
    for part in ("train", "dev", "test"):
        for level, answer in (("middle", "A"), ("high", "D")):
            (folder / part / level).mkdir(parents=True, exist_ok=True)
            passage = {
                "article": "the cat sat on a mat . " * 3,
                "questions": ["who sat ?", "the _ ran home ."],
                "options": [["the cat", "a dog", "a mat", "no"], ["cat", "dog", "mat", "home"]],
                "answers": [answer, "B"],
                "id": f"{level}1.txt",
            }
            (folder / part / level / "1.txt").write_text(json.dumps(passage))
    return folder
