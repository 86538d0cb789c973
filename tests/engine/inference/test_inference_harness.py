"""lm-evaluation-harness gives our models the scores that it gives transformers' with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_run_engine.inference import load

pytestmark = [
    pytest.mark.nightly,  # the harness is not installed for `make test`
    pytest.mark.filterwarnings("ignore"),  # of the harness and what it needs
]

QUESTIONS = [
    ("the quick brown", ["fox", "dog sleeps", "lazy"], 0),
    ("jumps over the", ["fox", "lazy dog", "quick brown fox"], 1),
    ("a dog is not", ["a fox", "over", "the quick"], 0),
] * 5
TEXT = "the quick brown fox jumps over the lazy dog and a dog is not a fox"

TASKS = {
    "choose": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "roll": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "write": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["e"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def save_model(family: str, folder: Path) -> None:
    """A random model of transformers' with a tokenizer of its own."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    size = tokenizer.get_vocab_size()
    special = {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3}
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=size, n_positions=32, n_embd=32, n_layer=2, n_head=4, **special)
        made: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=size,
            max_position_embeddings=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **special,
        )
        made = transformers.LlamaForCausalLM(config)
    made.save_pretrained(folder)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_scores_equal_those_of_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from megatron_run_engine.inference.harness import run_harness

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    save_model(family, tmp_path / "model")
    rows = [
        {"question": text, "choices": [f" {each}" for each in choices], "answer": right, "text": TEXT, "target": " fox"}
        for text, choices, right in QUESTIONS
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    source = (
        f'dataset_path: json\ndataset_kwargs: {{data_files: {{test: "{tmp_path / "rows.jsonl"}"}}}}\ntest_split: test\n'
    )
    for name, rest in TASKS.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(f"task: {name}\n{source}{rest}")
    ours = run_harness(load(tmp_path / "model", device="cpu"), list(TASKS), folder=str(tmp_path / "tasks"), batch=4)
    theirs = lm_eval.simple_evaluate(
        HFLM(pretrained=str(tmp_path / "model"), device="cpu", batch_size=1, dtype="float32"),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
        bootstrap_iters=0,
    )["results"]
    for task, metrics in theirs.items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert numbers
        for name, value in numbers.items():
            assert ours[task][name] == pytest.approx(value, rel=1e-5), (task, name)
