"""A tokenizer's folder means what transformers says; the campaign ``folders`` compares hundreds of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_run.errors import DataError
from megatron_run_engine.data import tokenizer_folder
from megatron_run_engine.data.standalone_tokenizer import standalone_files
from megatron_run_engine.data.tokenizer import open_tokenizer
from megatron_run_engine.data.tokenizer_folder import exactly

TEXT = "the quick brown fox jumps over the lazy dog"
PLAIN: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}


def write(folder: Path, **files: object) -> Path:
    """A byte-level tokenizer whose ``<end>`` has id 1, and JSON files beside it by their stems."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["</s>", "<end>"]
    made.train_from_iterator([TEXT], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is not installed."""
    monkeypatch.setattr(tokenizer_folder, "_version", lambda library: None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("files", "field"),
    [
        ({"tokenizer_config": {"tokenizer_class": "LlamaTokenizer"}}, "tokenizer_class=LlamaTokenizer"),
        ({"tokenizer_config": PLAIN | {"add_prefix_space": True}}, "add_prefix_space=true"),
        ({"tokenizer_config": PLAIN | {"pad_token": "[PAD]"}}, r"pad_token=\[PAD\]"),
        ({"tokenizer_config": PLAIN | {"do_lower_case": True}}, "do_lower_case=true"),
        ({"tokenizer_config": PLAIN | {"extra_special_tokens": ["<tool>"]}}, "extra_special_tokens"),
        ({"tokenizer_config": PLAIN | {"added_tokens_decoder": {"900": {"content": "x"}}}}, "differs .* at id 900"),
        ({"tokenizer_config": PLAIN | {"auto_map": {"AutoTokenizer": ["a.b", None]}}}, "auto_map"),
        ({"tokenizer_config": PLAIN, "special_tokens_map": {"eos_token": "</s>"}}, "special_tokens_map.json says eos"),
        ({"tokenizer_config": PLAIN, "added_tokens": {"<new>": 900}}, "added_tokens.json says <new>=900"),
        ({"config": {"model_type": "qwen2"}}, "config.json says model_type=qwen2"),
        ({"tokenizer_config": PLAIN, "config": {"model_type": "phi3"}}, "model_type=phi3"),
    ],
)
def test_without_transformers_the_field_that_decides_is_named(
    tmp_path: Path, files: dict[str, object], field: str
) -> None:
    with pytest.raises(DataError, match=rf"needs transformers: .*{field}.*pip install 'transformers>="):
        open_tokenizer(str(write(tmp_path / "m", **files)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["m", "m/tokenizer.json"])
def test_the_end_is_the_folders_and_not_the_first_known_name(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "m", tokenizer_config=PLAIN)
    assert open_tokenizer(str(tmp_path / name)).end_of_document == 1
    (folder / "tokenizer_config.json").unlink()
    assert open_tokenizer(str(tmp_path / name)).end_of_document == 0


@pytest.mark.usefixtures("alone")
def test_gpt2s_class_is_read_where_the_file_has_its_parts(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    with pytest.raises(DataError, match="no such special token"):  # the class names <|endoftext|>
        open_tokenizer(str(folder))
    said = {"tokenizer_class": "GPT2Tokenizer", **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<end>")}
    assert open_tokenizer(str(write(folder, tokenizer_config=said))).end_of_document == 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"model": {"type": "Unigram", "vocab": [["</s>", 0.0], ["<end>", 0.0]], "unk_id": 1}},
        {"model": {"type": "BPE", "vocab": {"</s>": 0, "<end>": 1}, "merges": [], "ignore_merges": True}},
        {"decoder": {"type": "Fuse"}},
    ],
    ids=str,
)
def test_parts_that_gpt2s_class_replaces_are_not_taken_for_its_own(tmp_path: Path, parts: dict[str, Any]) -> None:
    said = {"tokenizer_class": "GPT2Tokenizer", **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<end>")}
    path = write(tmp_path / "m", tokenizer_config=said) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    with pytest.raises(DataError, match=r"needs transformers: .*has parts that GPT2Tokenizer replaces"):
        open_tokenizer(str(path.parent))


def test_what_is_kept_needs_transformers_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    said = PLAIN | {"pad_token": "[PAD]", "bos_token": "<begin>", "add_prefix_space": True}
    folder, kept = write(tmp_path / "m", tokenizer_config=said), tmp_path / "kept"
    ours = open_tokenizer(str(folder))
    kept.mkdir()
    for name, content in standalone_files(folder).items():
        (kept / name).write_bytes(content)
    monkeypatch.setattr(tokenizer_folder, "_version", lambda library: None)
    again = open_tokenizer(str(kept))
    assert again.special_tokens() == ours.special_tokens()
    assert set(again.special_tokens()) == {"bos", "eos", "pad"}
    assert again.encode_text(f"{TEXT}<begin>") == ours.encode_text(f"{TEXT}<begin>")


def test_types_of_models_keep_the_class_that_their_folders_name() -> None:
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    assert not exactly.KEEPS_CLASS & set(auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS)


def test_an_added_token_that_a_model_has_no_row_for_is_needed_by_no_text(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ours = open_tokenizer(str(write(tmp_path / "m", tokenizer_config=PLAIN | {"pad_token": "[PAD]"})))
    assert ours.encode_text("[PAD]") == [ours.vocab_size - 1]
    assert ours.rows == ours.vocab_size - 1
