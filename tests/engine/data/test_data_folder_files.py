"""The files of a tokenizer's folder: which may have their say, of what types, and when an answer is asked for again."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import DataError
from megatron_run_engine.data.standalone_tokenizer import standalone_files
from megatron_run_engine.data.tokenizer import open_tokenizer
from megatron_run_engine.data.tokenizer_folder import exactly, folder_files
from megatron_run_engine.data.tokenizer_folder.record import DECIDING, TEMPLATES, TOKENIZER, WRITTEN, FolderTokenizer
from megatron_run_engine.data.tokenizer_training import train_tokenizer

ADDED = {"id": 1, "content": "<end>", "special": True}
#: A folder in which every field that is read has the type that it must have.
FILES: dict[str, dict[str, Any]] = {
    "tokenizer.json": {
        "added_tokens": [ADDED],
        "padding": {"pad_token": "<end>"},
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {"type": "BPE"},
        "decoder": {"type": "ByteLevel"},
    },
    "tokenizer_config.json": {
        "tokenizer_class": "GPT2Tokenizer",
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<end>"),
        "additional_special_tokens": ["<end>"],
        "added_tokens_decoder": {"1": {"content": "<end>", "special": True}},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    },
    "special_tokens_map.json": {"eos_token": "<end>", "additional_special_tokens": [{"content": "<end>"}]},
    "added_tokens.json": {"<end>": 1},
    "config.json": {"model_type": "gpt2", "tokenizer_class": "GPT2Tokenizer"},
}


def write(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def changed(value: Any) -> Iterator[Any]:
    """``value`` with one of its parts replaced by something of each type."""
    yield from (None, True, 1, "x", [], ["x"], [1], {}, {"x": 1}, {"x": ["y"]})
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, part in parts:
        for other in changed(part):
            made = copy.deepcopy(value)
            made[place] = other
            yield made


def test_the_folder_is_read_here(tmp_path: Path) -> None:
    assert exactly.read_exactly(write(tmp_path, FILES)).special["eos_token"] == "<end>"


@pytest.mark.parametrize("name", FILES)
def test_a_field_of_another_type_is_a_fault_of_its_file(tmp_path: Path, name: str) -> None:
    """Else it ends in a TypeError, which names the wrong file or none."""
    write(tmp_path, FILES)
    faults = []
    for content in changed(FILES[name]):
        write(tmp_path, {name: content})
        try:
            exactly.read_exactly(tmp_path)
        except exactly.NotExact:
            pass
        except ValueError as error:
            faults.append(str(error))
    assert faults
    assert [fault for fault in faults if name not in fault] == []


def test_the_file_that_is_broken_is_blamed(tmp_path: Path) -> None:
    folder = write(tmp_path, FILES | {"tokenizer_config.json": {"added_tokens_decoder": ["x"]}})
    with pytest.raises(DataError, match=r"tokenizer_config\.json says added_tokens_decoder, which is no object"):
        open_tokenizer(str(folder))
    (folder / "tokenizer_config.json").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not UTF-8 at byte 0"):
        open_tokenizer(str(folder))


def test_all_files_that_transformers_reads_are_known() -> None:
    transformers = pytest.importorskip("transformers")
    root = Path(transformers.__file__).parent
    names: set[str] = set()
    for source in [*root.glob("models/*/tokenization_*.py"), *root.glob("tokenization_*.py")]:
        text = source.read_text(encoding="utf-8")
        for table in re.findall(r"^VOCAB_FILES_NAMES\b[^{]*\{(.*?)\}", text, re.DOTALL | re.MULTILINE):
            names.update(re.findall(r':\s*"([^"]+)"', table))
        names.update(re.findall(r'^[A-Z_]+_FILE = "([^"]+)"', text, re.MULTILINE))
    known = (*folder_files.VOCABULARIES, *DECIDING)
    assert "vocab.json" in names
    assert [name for name in names if not any(fnmatchcase(name, pattern) for pattern in known)] == []


def test_other_files_have_no_say_and_cost_nothing(tmp_path: Path) -> None:
    write(tmp_path, FILES | {"model.safetensors.index.json": {}, "train.json": {}})
    (tmp_path / "corpus.txt").write_text("a text")
    (tmp_path / TEMPLATES).mkdir()
    (tmp_path / TEMPLATES / "tool_use.jinja").write_text("{{ tools }}")
    found = {path.relative_to(tmp_path).as_posix() for path in folder_files.read_files(tmp_path)}
    assert found == {*FILES, f"{TEMPLATES}/tool_use.jinja"}


def test_a_file_that_is_too_large_for_a_tokenizers_is_refused_unread(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    with (tmp_path / "lm.model").open("wb") as file:
        file.truncate(folder_files.LARGEST + 1)
    with pytest.raises(DataError, match=r"lm\.model is not read: it has 268435457 bytes, and at most 268435456 are"):
        folder_files.read_files(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", f"{TEMPLATES}/a.jinja"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_link_out_of_the_folder_brings_nothing_along(tmp_path: Path, name: str, whole: bool) -> None:
    """A file of the user's would be copied into a run, and published by an export."""
    folder, secret = tmp_path / "given", tmp_path / "secret"
    folder.mkdir()
    train_tokenizer(["some words"], "bpe", 300, folder / "tokenizer.json")
    write(folder, {"tokenizer_config.json": {"eos_token": "<|endoftext|>"}})
    secret.mkdir()
    (secret / "a.jinja").write_text("a secret")
    (folder / TEMPLATES).mkdir()
    assert standalone_files(folder)
    if whole and "/" in name:
        (folder / TEMPLATES).rmdir()
        (folder / TEMPLATES).symlink_to(secret)
    else:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret / "a.jinja")
    for take in (open_tokenizer, standalone_files):
        with pytest.raises(DataError, match=r"is not read: it is a symbolic link to .*secret/a\.jinja, outside"):
            take(str(folder))


def test_links_of_the_hubs_cache_into_its_blobs_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "models--a" / "blobs", tmp_path / "models--a" / "snapshots" / "1"
    for each in (blobs, folder / TEMPLATES):
        each.mkdir(parents=True)
    train_tokenizer(["some words"], "bpe", 300, blobs / "0")
    (blobs / "1").write_text("{{ messages }}")
    (folder / "tokenizer.json").symlink_to("../../blobs/0")
    (folder / "chat_template.jinja").symlink_to("../../blobs/1")
    (folder / TEMPLATES / "tool_use.jinja").symlink_to("../../../blobs/1")
    assert any(b"{{ messages }}" in content for content in standalone_files(folder).values())
    assert open_tokenizer(str(folder)).template(tools=True) == "{{ messages }}"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "config.json"])
def test_a_pipe_and_a_hole_among_its_files_are_named(tmp_path: Path, name: str) -> None:
    train_tokenizer(["some words"], "bpe", 300, tmp_path / "tokenizer.json")
    write(tmp_path, {"tokenizer_config.json": {}})
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}.*it is not a file|it is not a file.*{name}"):
        open_tokenizer(str(tmp_path))
    (tmp_path / name).unlink()
    with (tmp_path / name).open("wb") as file:
        file.truncate(40 << 30)
    with pytest.raises(DataError, match=f"{name} is not read: it has 42949672960 bytes"):
        open_tokenizer(str(tmp_path))


def test_an_answer_is_kept_for_files_libraries_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, code = write(tmp_path / "m", FILES), tmp_path / "code"
    code.mkdir()
    (code / "exactly.py").write_text("one = 1")
    monkeypatch.setattr(folder_files, "__file__", str(code / "folder_files.py"))
    keys = [folder_files.key(folder, ["sentencepiece 1"])]
    assert folder_files.key(folder, ["sentencepiece 1"]) == keys[0]
    keys.append(folder_files.key(folder, ["sentencepiece 2"]))
    (code / "exactly.py").write_text("one = 2")
    keys.append(folder_files.key(folder, ["sentencepiece 2"]))
    write(folder, {"added_tokens.json": {}})
    keys.append(folder_files.key(folder, ["sentencepiece 2"]))
    assert len(set(keys)) == 4


@pytest.mark.parametrize("templates", [{}, {"default": "x"}, {"default": "x", "tool_use": "y"}])
def test_a_tokenizer_writes_no_more_than_the_names_by_which_it_is_known(templates: dict[str, str]) -> None:
    """A run's home refuses the other names that decide."""
    assert set(FolderTokenizer("{}", templates=templates).files()) <= {TOKENIZER, *WRITTEN} <= {TOKENIZER, *DECIDING}
