"""Imports and exports: the format follows from the files, and what fails leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from megatron_run.errors import CheckpointError, DataError
from megatron_run_engine.checkpoint.files import FileSystem
from megatron_run_engine.data.standalone_tokenizer import byte_tokenizer_json, files_for_transformers
from megatron_run_engine.data.tokenizer import open_tokenizer
from megatron_run_engine.formats import convert
from tests.support.small_models import GPT2, LLAMA, saved_network


def test_a_source_is_imported_by_its_files(tmp_path: Path) -> None:
    saved_network(tmp_path / "gpt2", GPT2)
    saved_network(tmp_path / "llama", LLAMA)
    for run, name in (("gpt2", "huggingface"), ("llama", "huggingface"), ("gpt2", "distributed")):
        convert.export_model(tmp_path / run, tmp_path / f"{run}-{name}", name)
        done = convert.import_model(tmp_path / f"{run}-{name}", tmp_path / f"{run}-{name}-back", trust_pickle=True)
        assert done.format == name


def test_the_chat_template_of_a_run_goes_where_its_tokenizer_goes(tmp_path: Path) -> None:
    saved_network(tmp_path / "run", LLAMA)
    files = {"tokenizer.json": byte_tokenizer_json(), "chat_template.jinja": b"{{ messages }}"}
    for name, content in files.items():
        (tmp_path / "run" / name).write_bytes(content)
    convert.export_model(tmp_path / "run", tmp_path / "hf", "huggingface")
    assert {name: (tmp_path / "hf" / name).read_bytes() for name in files} == files
    convert.import_model(tmp_path / "hf", tmp_path / "back")
    assert (tmp_path / "back" / "chat_template.jinja").read_bytes() == files["chat_template.jinja"]


def test_a_folder_of_links_is_imported_as_caches_have_them(tmp_path: Path) -> None:
    saved_network(tmp_path / "run", LLAMA)
    (tmp_path / "run" / "tokenizer.json").write_bytes(byte_tokenizer_json())
    convert.export_model(tmp_path / "run", tmp_path / "blobs", "huggingface")
    snapshot = tmp_path / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    for blob in (tmp_path / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    (tmp_path / "latest").symlink_to(snapshot)
    assert convert.import_model(tmp_path / "latest", tmp_path / "back").format == "huggingface"
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == byte_tokenizer_json()


def test_an_export_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_network(tmp_path / "run", GPT2)
    before = sorted(tmp_path.rglob("*"))

    def broken(files: FileSystem, source: Path, target: Path) -> None:
        raise OSError(5, "Input/output error", str(target))

    monkeypatch.setattr(FileSystem, "rename", broken)
    with pytest.raises(CheckpointError, match="could not be written: Input/output error"):
        convert.export_model(tmp_path / "run", tmp_path / "new" / "place" / "hf", "huggingface")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_step_is_not_exported(tmp_path: Path) -> None:
    saved_network(tmp_path / "run", GPT2)
    shard = tmp_path / "run" / "checkpoints" / "step7" / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        convert.export_model(tmp_path / "run", tmp_path / "hf", "huggingface")
    assert not list(tmp_path.glob("*hf*"))


@pytest.mark.parametrize(
    "link", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "source/config.json", "source"]
)
def test_an_export_copies_nothing_that_a_link_in_the_run_leads_to(tmp_path: Path, link: str) -> None:
    saved_network(tmp_path / "run", LLAMA)
    (tmp_path / "run" / "tokenizer.json").write_bytes(byte_tokenizer_json())
    home = tmp_path / "home"
    home.mkdir()
    (home / "generation_config.json").write_text('{"secret": 1}')
    (tmp_path / "run" / link).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / link).unlink(missing_ok=True)
    (tmp_path / "run" / link).symlink_to(home if link == "source" else home / "generation_config.json")
    with pytest.raises(CheckpointError, match=r"is not read: it is a symbolic link"):
        convert.export_model(tmp_path / "run", tmp_path / "hf", "huggingface")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json", "model.safetensors"]
)
def test_an_import_takes_nothing_from_outside_of_its_source(tmp_path: Path, name: str) -> None:
    """A model that somebody has prepared would carry off the file that its link names."""
    saved_network(tmp_path / "run", LLAMA)
    (tmp_path / "run" / "tokenizer.json").write_bytes(byte_tokenizer_json())
    (tmp_path / "run" / "chat_template.jinja").write_text("{{ messages }}")
    convert.export_model(tmp_path / "run", tmp_path / "hf", "huggingface")
    (tmp_path / "hf" / "generation_config.json").write_text("{}")
    (tmp_path / "hf" / name).rename(tmp_path / name)
    (tmp_path / "hf" / name).symlink_to(tmp_path / name)
    why = r"is not read: it is a symbolic link to .*; put the file itself there"
    with pytest.raises((CheckpointError, DataError), match=why):
        convert.import_model(tmp_path / "hf", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_bytes_are_exported_as_transformers_reads_them_for_every_family(tmp_path: Path) -> None:
    """Without ``tokenizer_config.json`` it would choose a class by the model's type: other ids, or none at all."""
    transformers = pytest.importorskip("transformers")
    tokenizer = open_tokenizer("bytes")
    for name, content in files_for_transformers("bytes").items():
        (tmp_path / name).write_bytes(content)
    for family in ("gemma2", "qwen3", "gpt_neox", "llama"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        read = transformers.AutoTokenizer.from_pretrained(tmp_path)
        text = "caf\u0065\u0301 <b>"
        assert read(text, add_special_tokens=False).input_ids == list(text.encode()), family
        assert read.eos_token_id == tokenizer.end_of_document, family


def test_the_recorded_end_is_the_one_that_an_export_names(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    made.add_special_tokens(["</s>", "<e>"])
    made.save(str(tmp_path / "t.json"))
    file = str(tmp_path / "t.json")
    named = [json.loads(files_for_transformers(file, end)["tokenizer_config.json"])["eos_token"] for end in (None, 3)]
    assert named == ["</s>", "<e>"]
