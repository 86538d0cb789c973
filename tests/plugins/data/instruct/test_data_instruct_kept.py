"""The template that a model learns travels with it: to who loads the run, and to who reads its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_run import load, load_config
from megatron_run.errors import DataError
from megatron_run_cli.main import main
from megatron_run_engine import train
from megatron_run_engine.checkpoint.kept_files import tokenizer_files
from megatron_run_engine.data.chat_template.template import PLAIN
from tests.support.hub_folders import FAMILIES, hub_tokenizer

OWN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
ASKED = [{"role": "user", "content": "a fox?"}]


@pytest.mark.parametrize("given", ["tokenizer", "file", "plain"])
def test_the_template_that_was_learned_is_kept_loaded_and_exported(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    hub_tokenizer("qwen").save_pretrained("tokenizer")
    sets: dict[str, Any] = {"data.use": "instruct", "data.paths": "chats.jsonl", "data.split": "1,0,0"}
    sets["data.tokenizer"] = "tokenizer"
    if given == "file":
        Path("own.jinja").write_text(OWN)
        sets["data.template"] = "own.jinja"
    if given == "plain":  # a file that knows of no template
        sets["data.tokenizer"] = str(Path("tokenizer/tokenizer.json").rename("tokenizer.json"))
    Path("chats.jsonl").write_text('{"prompt": "a fox?", "response": "It is."}\n')
    small = {"train.steps": 1, "train.global_batch_size": 2, "eval.interval": 0, "run.folder": "run"}
    train(load_config("preset:tiny", sets={**sets, **small}))
    Path("own.jinja").unlink(missing_ok=True)
    learned = {"tokenizer": FAMILIES["qwen"].template, "file": OWN, "plain": PLAIN}[given]
    model = load("run")
    assert model.data is not None
    assert model.data.chat_template() == model.data.chat_template(tools=True) == learned
    assert main(["export", "run", "out", "--to", "huggingface"]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    assert theirs.chat_template == learned
    ids = theirs.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert model.chat_tokens(ASKED) == load("out").chat_tokens(ASKED) == ids


OWN_WORDS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("given", ["beside", "file", "plain"])
def test_the_template_of_a_sentencepiece_model_is_kept_beside_it(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = {**sentencepiece_run(), "data.template": "auto" if given != "file" else "own.jinja"}
    if given != "plain":
        Path("given", "chat_template.jinja").write_text(OWN_WORDS if given == "beside" else "{{ messages }}")
    Path("own.jinja").write_text(OWN_WORDS)
    train(load_config("preset:tiny", sets=sets))
    Path("own.jinja").unlink()
    data = load("run").data
    assert data is not None
    learned = PLAIN if given == "plain" else OWN_WORDS
    assert data.chat_template() == data.chat_template(tools=True) == learned
    train(
        load_config(
            "preset:tiny", sets={**sets, "run.folder": "more", "data.tokenizer": "run", "data.template": "auto"}
        )
    )
    assert Path("more/chat_template.jinja").read_text() == learned


def test_a_template_that_was_not_kept_is_read_from_its_file_and_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older steps have recorded the model's file alone."""
    monkeypatch.chdir(tmp_path)
    Path("own.jinja").write_text(OWN_WORDS)
    with monkeypatch.context() as patch:
        patch.setattr("megatron_run_engine.training.state.keeping.tokenizer_files", without_template)
        train(load_config("preset:tiny", sets={**sentencepiece_run(), "data.template": "own.jinja"}))
    data = load("run").data
    assert data is not None
    assert data.chat_template() == OWN_WORDS
    Path("own.jinja").unlink()
    with pytest.raises(DataError, match=r"own\.jinja"):
        load("run").chat_tokens(ASKED)


def without_template(place: Path, end: int | None = None, *, configured: str | None, template: str | None) -> Any:
    return tokenizer_files(place, end, configured=configured)


def sentencepiece_run() -> dict[str, Any]:
    """A run of one step on a conversation, with the model ``given/words.model``, which is made."""
    sentencepiece: Any = pytest.importorskip("sentencepiece")
    Path("given").mkdir()
    Path("words.txt").write_text("a fox? It is. [user] [assistant]\n" * 9)
    sentencepiece.SentencePieceTrainer.train(
        input="words.txt", model_prefix="given/words", hard_vocab_limit=False, vocab_size=24, minloglevel=2
    )
    Path("chats.jsonl").write_text('{"prompt": "a fox?", "response": "It is."}\n')
    return {
        "data.use": "instruct",
        "data.paths": "chats.jsonl",
        "data.split": "1,0,0",
        "data.tokenizer": "given/words.model",
        "run.folder": "run",
        "eval.interval": 0,
        "train.steps": 1,
        "train.global_batch_size": 2,
    }
