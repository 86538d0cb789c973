"""Every form of a tokenizer, against transformers and SentencePiece."""

from __future__ import annotations

import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import DataError, InputError
from megatron_run_engine.data.standalone_tokenizer import json_file
from megatron_run_engine.data.tokenizer import open_tokenizer
from megatron_run_engine.data.tokenizer_training import KINDS, train_tokenizer

#: Imported by the tests that ask it: collecting them in every worker would take a second of each.
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "A naïve café — 12,345 résumés at 9:30! 日本語の文 and emoji 🎉 too.",
    "def f(x):\n    return  x ** 2\t# squares\n\n\nNext paragraph",
    "the The THE dogs jumped; foxes are jumping  over   spaces ",
]
WORDS = "the quick brown fox jump over lazy dog do it a naive cafe e ' 1 2 3 , 日 本"
TRICKY = [*SENTENCES, "", " ", "<|endoftext|> is text here", "[SEP] and [MASK] too", "unseen: ẞ𝄞\u200b\x07 end"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of each kind, trained on the sentences."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for kind in KINDS:
        train_tokenizer(SENTENCES * 5, kind, 400, folder / f"{kind}.json")
    return folder


def ids(name: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = open_tokenizer(str(name))
    batch = [each.tolist() for each in tokenizer.encode_batch([("x", text.encode()) for text in texts])]
    assert batch == [tokenizer.encode(text.encode(), "x").tolist() for text in texts]
    return batch


def theirs(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def gpt2_files(made: Path, folder: Path, prefix: str = "") -> Path:
    model = json.loads((made / "bpe.json").read_text())["model"]
    vocabulary = folder / f"{prefix}vocab.json"
    vocabulary.write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / f"{prefix}merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    return vocabulary


@pytest.mark.parametrize("prefix", ["", "gpt2-"])
def test_gpt2s_two_files_are_read_as_transformers_reads_them(made: Path, tmp_path: Path, prefix: str) -> None:
    vocabulary = gpt2_files(made, tmp_path, prefix)
    merges = vocabulary.with_name(f"{prefix}merges.txt")
    from transformers import GPT2TokenizerFast

    model: Any = GPT2TokenizerFast(vocab=str(vocabulary), merges=str(merges))
    expected = theirs(model, TRICKY)
    assert ids(vocabulary, TRICKY) == ids(merges, TRICKY) == expected
    ours = open_tokenizer(str(vocabulary))
    assert ours.end_of_document == model.eos_token_id
    assert ours.vocab_size == len(model)
    assert [ours.decode(each) for each in ids(vocabulary, SENTENCES)] == SENTENCES


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_a_wordpiece_vocabulary_is_read_as_transformers_reads_it(tmp_path: Path, lower: bool, told: bool) -> None:
    """Without ``tokenizer_config.json`` the case follows from the vocabulary."""
    words = WORDS.split()
    words += ["##s", "##ed", "##ing", "##2", "##3"]
    words += [] if lower else ["The", "THE", "naïve"]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    if told:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    from transformers import BertTokenizerFast

    model: Any = BertTokenizerFast(vocab=str(vocabulary), do_lower_case=lower)
    assert ids(vocabulary, TRICKY) == ids(tmp_path, TRICKY) == theirs(model, TRICKY)
    assert open_tokenizer(str(tmp_path)).end_of_document == model.sep_token_id


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_hugging_face_is_read_as_transformers_reads_it(made: Path, tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    model: Any = PreTrainedTokenizerFast(tokenizer_file=str(made / f"{kind}.json"))
    model.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert ids(tmp_path, TRICKY) == theirs(loaded, TRICKY)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("name", ["mine.model", "tokenizer.model"])
def test_a_sentencepiece_model_gives_its_librarys_ids(tmp_path: Path, kind: str, name: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5),
        model_writer=content,
        vocab_size=330,
        model_type=kind,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path / name
    path.write_bytes(content.getvalue())
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = open_tokenizer(str(tmp_path if name == "tokenizer.model" else path))
    assert ids(path, TRICKY) == [model.encode(text) for text in TRICKY]
    assert (ours.vocab_size, ours.end_of_document) == (model.get_piece_size(), model.eos_id())
    text = TRICKY[1]
    found, starts, stops = ours.encode_places(text)
    assert found.tolist() == model.encode(text)
    assert (starts[1:] <= stops[:-1]).all() if len(starts) else False
    assert (starts[0], stops[-1]) == (0, len(text))
    emoji = "the \U0001f600 fox"  # in bytes, each of which is a token of that character
    found, starts, stops = ours.encode_places(emoji)
    bytes_ = [place for place, token in enumerate(found) if model.is_byte(int(token))]
    assert [(starts[place], stops[place]) for place in bytes_] == [(4, 5)] * 4
    assert ours.decode([*model.encode("the quick fox"), ours.end_of_document]) == "the quick fox"


@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_a_vocabulary_of_the_size_asked_for(made: Path, tmp_path: Path, kind: str) -> None:
    sizes = [train_tokenizer(SENTENCES * 5, kind, size, tmp_path / f"{size}.json") for size in (290, 300)]
    assert all(size <= asked for size, asked in zip(sizes, (290, 300), strict=True))
    tokenizer = open_tokenizer(str(tmp_path / "300.json"))
    assert tokenizer.vocab_size == sizes[1]  # so the end of a document is one of its ids


@pytest.mark.parametrize(("kind", "least"), [("bpe", 257), ("wordpiece", None), ("unigram", None)])
def test_a_vocabulary_that_does_not_hold_what_a_kind_begins_with_is_refused(
    tmp_path: Path, kind: str, least: int | None
) -> None:
    """The library would write more ids than it was asked for."""
    path = tmp_path / "t.json"
    with pytest.raises(InputError, match=f"a {kind} tokenizer has more than 10 ids") as caught:
        train_tokenizer(SENTENCES, kind, 10, path)
    assert not path.exists()
    if kind == "wordpiece":
        least = int(caught.value.fix.split()[2].rstrip(","))
    if least:
        assert train_tokenizer(SENTENCES, kind, least, path) == least
        with pytest.raises(InputError, match=f"--vocab-size {least}, or more"):
            train_tokenizer(SENTENCES, kind, least - 1, path)


def test_training_on_nothing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="texts are empty"):
        train_tokenizer([], "wordpiece", 300, tmp_path / "t.json")


def test_other_forms_have_a_json_file_in_the_cache(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a run keeps beside its weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert json_file("bytes") is None
    assert json_file(str(made / "bpe.json")) == made / "bpe.json"
    vocabulary = gpt2_files(made, tmp_path)
    converted = json_file(str(vocabulary))
    assert converted is not None
    assert converted.is_relative_to(tmp_path / "cache")
    assert ids(converted, TRICKY) == ids(vocabulary, TRICKY)
    (tmp_path / "cache" / "megatron-run").chmod(0o777)
    assert json_file(str(vocabulary)) is None


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({}, ".", "folder .* holds no tokenizer"),
        ({"vocab.json": "{}"}, ".", "has no merges.txt beside it"),
        ({"vocab.txt": "one\ntwo\n"}, ".", r"broken: it has no \[UNK\]"),
        ({"vocab.txt": "[UNK]\n", "tokenizer_config.json": "{"}, ".", "tokenizer_config.json is broken"),
        ({"vocab.json": "{", "merges.txt": ""}, "vocab.json", "vocab.json is broken"),
        ({"t.model": "no protocol buffer"}, "t.model", "t.model is broken"),
        ({"t.model": "IQ== 0\nIg== 1\n"}, "t.model", "t.model is no SentencePiece model: it has tiktoken's form"),
        ({"tekken.json": "{}"}, ".", "folder .* holds no tokenizer: tekken.json has a form of its own"),
        ({"qwen.tiktoken": "IQ== 0\n"}, ".", "folder .* holds no tokenizer: qwen.tiktoken has a form of its own"),
    ],
)
def test_what_is_no_tokenizer_is_one_line(tmp_path: Path, files: dict[str, str], name: str, message: str) -> None:
    if name.endswith(".model"):
        pytest.importorskip("sentencepiece")
    for each, content in files.items():
        (tmp_path / each).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        open_tokenizer(str(tmp_path / name))
    assert "\n" not in str(caught.value)
