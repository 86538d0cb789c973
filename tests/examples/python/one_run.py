"""One run, and the numbers it leaves behind."""

import json
from pathlib import Path

from megatron_run import load_config
from megatron_run.planning import describe
from megatron_run_engine import train

run = load_config("preset:tiny", sets={"train.lr": 2e-3})
print(describe(run))  # plugins and why, ranks and their layers, the pipeline
train(run)

lines = Path("runs/latest/eval.jsonl").read_text().splitlines()
for line in map(json.loads, lines):
    print(f"validation loss {line['loss']:.3f} after {line['step']} steps")
