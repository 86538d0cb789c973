"""Pairs of texts get the tokens around and between them that transformers gives them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megatron_run.errors import DataError, InputError
from megatron_run_data_nlu.rows import RowMaker
from megatron_run_engine.data.tokenizer import open_tokenizer

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "did", "not", "sit", "with", "it"]
LENGTH = 17


def byte_level(processor: Callable[[Tokenizer], Any], folder: Path, **said: Any) -> Path:
    """A folder with RoBERTa's kind of vocabulary, whose configuration says ``said``."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "[CLS]", "[SEP]", "[PAD]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [" ".join(WORDS)] * 3, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    made.post_processor = processor(made)
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **said}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def wordpiece(folder: Path, **config: Any) -> Path:
    """A folder of BERT's, of before ``tokenizer.json``."""
    folder.mkdir(parents=True)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS)), "##s"]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **config}))
    return folder


def around(single: str, pair: str) -> Callable[[Tokenizer], Any]:
    def made(tokenizer: Tokenizer) -> Any:
        ids = [(text, tokenizer.token_to_id(text)) for text in ("<s>", "</s>", "[CLS]", "[SEP]")]
        return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)

    return made


def robertas(tokenizer: Tokenizer) -> Any:
    end, begin = (tokenizer.token_to_id(text) for text in ("</s>", "<s>"))
    assert end is not None
    assert begin is not None
    return processors.RobertaProcessing(("</s>", end), ("<s>", begin))


ROBERTA = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
FOLDERS: Mapping[str, Callable[[Path], Path]] = {
    "BERT's": wordpiece,
    "RoBERTa's": lambda folder: byte_level(robertas, folder, **ROBERTA),
    "begin and end": lambda folder: byte_level(
        around("<s> $A </s>", "<s> $A </s> $B:1 </s>:1"), folder, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ),
    "Llama's": lambda folder: byte_level(around("<s> $A", "<s> $A <s>:1 $B:1"), folder, pad_token="<pad>"),
    "two kinds between": lambda folder: byte_level(
        around("[CLS] $A [SEP]", "[CLS] $A </s> [SEP]:0 $B:2 [SEP]:2"), folder, pad_token="[PAD]"
    ),
}


def texts(seed: int) -> tuple[str, str]:
    chosen = random.Random(seed)
    return tuple(" ".join(chosen.choices(WORDS, k=chosen.randrange(1, 16))) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("name", FOLDERS)
def test_pairs_are_laid_out_and_cut_as_by_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = FOLDERS[name](tmp_path / "folder")
    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for length in (LENGTH, LENGTH + 1):
        maker = RowMaker(open_tokenizer(str(folder)), length)
        for seed in range(40):
            pair = texts(seed)
            expected = theirs(
                *pair, truncation=True, max_length=length, padding="max_length", return_token_type_ids=True
            )
            found = maker.pair(*pair)
            assert found["tokens"].tolist() == expected["input_ids"], (pair, length)
            used = sum(expected["attention_mask"])
            assert found["used"] == used
            assert found["token_types"].tolist()[:used] == expected["token_type_ids"][:used], pair


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        ("$A $B:1 </s>:1", "no token before two texts"),
        ("<s> $A $B:1", "no token between two texts"),
        ("<s> $B $A </s>", "does not put the second text after the first one"),
    ],
)
def test_rows_that_no_task_can_be_answered_from_are_refused(pair: str, why: str, tmp_path: Path) -> None:
    folder = byte_level(around("$A", pair), tmp_path / "folder", pad_token="<pad>")
    with pytest.raises((InputError, DataError), match=why):
        RowMaker(open_tokenizer(str(folder)), LENGTH)


def test_a_folder_without_a_layout_is_refused_and_a_vocabulary_alone_is_berts(tmp_path: Path) -> None:
    folder = byte_level(lambda _: None, tmp_path / "folder", pad_token="[PAD]")
    with pytest.raises(InputError, match="no token before two texts"):
        RowMaker(open_tokenizer(str(folder)), LENGTH)
    alone = wordpiece(tmp_path / "bert") / "vocab.txt"
    row = RowMaker(open_tokenizer(str(alone)), 9).pair("the cat", "a mat")
    names = alone.read_text().split("\n")
    assert " ".join(names[token] for token in row["tokens"]) == "[CLS] the cat [SEP] a mat [SEP] [PAD] [PAD]"


def test_a_tokenizer_without_a_token_to_fill_rows_is_refused(tmp_path: Path) -> None:
    made = byte_level(around("<s> $A", "<s> $A </s> $B </s>"), tmp_path / "folder")
    content = json.loads((made / "tokenizer.json").read_text())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] != "[PAD]"]
    del content["model"]["vocab"]["[PAD]"]
    (made / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"the tokenizer has no \[PAD\]"):
        RowMaker(open_tokenizer(str(made)), LENGTH)
