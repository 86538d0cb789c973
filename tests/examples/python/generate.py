"""Train a small model on text, draw its curves, and let it write."""

from pathlib import Path

from megatron_run import load, load_config
from megatron_run_engine import train

Path("hello.txt").write_text("hello world. " * 900)
sets = {"data.use": "text", "data.paths": "hello.txt", "train.steps": 100, "train.lr": 1e-2, "observer.use": "jsonl"}
result = train(load_config("preset:tiny", sets=sets))
print(f"{result.steps} steps, loss {result.losses[0]:.2f} to {result.losses[-1]:.2f}")
result.plot().save("curves.svg")  # in a notebook: result.plot()

model = load(result.best)
print(model([[1, 2, 3]]).shape)  # logits after each token: [texts, tokens, vocabulary]
for text in model.generate(["hel", "a world"], max_new_tokens=20, top_k=5, num=2, seed=1):
    print(repr(str(text)), text.finish)
for piece in model.stream("hello ", max_new_tokens=20, temperature=0, stop="."):
    print(piece, end="", flush=True)
