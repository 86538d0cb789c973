"""``config from-megatron`` and ``import`` of Megatron's checkpoints: words, output, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run_cli.main import main
from tests.support.megatron_checkpoints import GPT, random_state, save_sharded

SCRIPT = """
torchrun pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --train-iters 2 \\
    --global-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --quick-geglu
"""
Output = pytest.CaptureFixture[str]


def test_the_yaml_of_a_script_configures_a_run(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    assert main(["config", "from-megatron", str(tmp_path / "train.sh")]) == 0
    said = capsys.readouterr()
    assert said.err == "megatron-run: --quick-geglu: its sigmoid form of GeLU is none of model.activation\n"
    (tmp_path / "mine.yaml").write_text(said.out)
    assert main(["config", "show", str(tmp_path / "mine.yaml"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model.vocab_size"]["value"] == 61
    assert shown["train.lr_shape"]["value"] == "linear"
    assert "mine.yaml line" in shown["train.lr"]["origin"]


@pytest.mark.parametrize(
    ("text", "why"), [("echo hello", "starts no training"), (None, "cannot be read: No such file or directory")]
)
def test_what_is_no_script_is_one_line(text: str | None, why: str, tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "train.sh"
    if text is not None:
        path.write_text(text)
    assert main(["config", "from-megatron", str(path)]) == 2
    said = capsys.readouterr()
    assert why in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_a_checkpoint_is_recognised_and_imported_without_trust(tmp_path: Path, capsys: Output) -> None:
    save_sharded(random_state(GPT), {**GPT, "pipeline_model_parallel_size": 2}, tmp_path / "theirs", 12)
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["format"], said["step"]) == ("megatron", 12)
    assert main(["checkpoint", "verify", str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    sets = ("train.steps=1", "train.global_batch_size=1", "data.use=mock", "data.vocab_size=61")
    words = [word for key in sets for word in ("--set", key)]
    assert main([str(tmp_path / "ours" / "config.yaml"), *words, "--dry-run"]) == 0
    assert f"parameters of the model: {said['parameters']:,}" in capsys.readouterr().out
