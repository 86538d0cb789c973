"""Every reader of users' texts and JSON lines takes a file as another program has written it, and all take it alike."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zstandard

from megatron_run_data_indexed.preparation.inputs import blocks, find_inputs
from megatron_run_data_indexed.preparation.records import Reading, read_records, texts
from megatron_run_data_instruct.conversations import conversation, lines_of
from megatron_run_data_nlu.questions import read_choices
from megatron_run_engine.data.documents import find_documents
from megatron_run_engine.evaluation.tasks import _passages
from megatron_run_inference.commands.generate import _read_prompts

#: Texts with all that Python's splitlines takes for the end of a line, but not as such.
TEXTS = ["one two", "a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\u2029i \rj", "日本 語", "last words"]
MARK = "\ufeff"


def lambada(path: Path) -> Sequence[str]:
    return _passages(path)


def prompts(path: Path) -> Sequence[str]:
    return _read_prompts(path)


def prepared(path: Path) -> Sequence[str]:
    return list(texts(find_inputs([str(path)])[0], Reading(separator=b"\n")))


def records(path: Path) -> Sequence[str]:
    found = find_inputs([str(path)])[0]
    return [each.text.decode() for block in blocks(found, None, 16) for each in read_records(block, Reading())]


def compared(path: Path) -> Sequence[str]:
    return [text for document in find_documents([str(path)]) for text in document.texts()]


def learned(path: Path) -> Sequence[str]:
    found = lines_of(find_documents([str(path)]))
    return [conversation(line.content).messages[0]["content"] for line in found]


def entailed(path: Path) -> Sequence[str]:
    return [choice.rows[0][0] for choice in read_choices("mnli", path)]


def record(text: str) -> str:
    """A line that means the text to each reader of JSON lines."""
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
    pair = {"sentence1": text, "sentence2": "", "gold_label": "neutral"}
    return json.dumps({"text": text, "messages": turns, **pair}, ensure_ascii=False)


LINES: list[Callable[[Path], Sequence[str]]] = [lambada, prompts, prepared]
RECORDS: list[Callable[[Path], Sequence[str]]] = [lambada, records, compared, learned, entailed]
#: How other programs write lines: each as what stands before all, between two, and after the last.
FORMS = {"unix": ("", "\n", "\n"), "no last end": ("", "\n", ""), "windows": (MARK, "\r\n", "\r\n")}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("read", LINES, ids=lambda read: read.__name__)
def test_lines_of_text_are_the_same_to_every_reader(tmp_path: Path, form: str, read: Callable[..., object]) -> None:
    before, between, after = FORMS[form]
    path = tmp_path / "a.txt"
    path.write_text(before + between.join(TEXTS) + after, newline="")
    assert read(path) == TEXTS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("read", RECORDS, ids=lambda read: read.__name__)
def test_json_lines_are_the_same_to_every_reader(tmp_path: Path, form: str, read: Callable[..., object]) -> None:
    before, between, after = FORMS[form]
    path = tmp_path / "a.jsonl"
    path.write_text(before + between.join(map(record, TEXTS)) + after, newline="")
    assert read(path) == TEXTS


@pytest.mark.parametrize("read", [lambada, prompts, prepared], ids=lambda read: read.__name__)
@pytest.mark.parametrize(("end", "pack"), [("gz", gzip.compress), ("zst", zstandard.compress)])
def test_what_is_compressed_is_unpacked_or_refused_where_it_breaks_off(
    tmp_path: Path, read: Callable[[Path], Sequence[str]], end: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"a.txt.{end}"
    whole = pack((MARK + "\n".join(TEXTS) + "\n").encode())
    path.write_bytes(whole)
    assert read(path) == TEXTS
    path.write_bytes(whole[:-4])
    with pytest.raises(Exception, match="cannot be unpacked"):
        read(path)
