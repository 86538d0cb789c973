"""The template that a model learns travels with it: to who loads the run, and to who reads its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_run import load, load_config
from megatron_run_cli.main import main
from megatron_run_engine import train
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
