"""Evaluate a model, train it by hand on another text, and evaluate it again."""

from pathlib import Path

from megatron_run import load, load_config
from megatron_run_engine import train

Path("hello.txt").write_text("hello world. " * 900)
sets = {"data.use": "text", "data.paths": "hello.txt", "train.steps": 40, "train.lr": 1e-2, "observer.use": "jsonl"}
model = load(train(load_config("preset:tiny", sets=sets)).folder)

Path("other.txt").write_text("bye, old world! " * 40)
for name in ("before", "after"):
    (found,) = model.evaluate("perplexity=other.txt", stride=8)
    print(f"{name}: perplexity {found.metrics['perplexity']:.2f} over {found.tokens} tokens")
    for _ in range(20):
        model.step(["bye, old world! bye, old world!"], lr=5e-3)
