"""A sweep: one training under two schedules. The losses agree, the speed need not."""

import json
from pathlib import Path

from megatron_run import load_config
from megatron_run_engine import train

for schedule in ("1f1b", "interleaved"):
    folder = Path("runs", schedule)
    sets = {"run.folder": folder, "observer.use": "jsonl"}
    train(load_config("preset:tiny", sets=sets, plugins=[f"schedule={schedule}"]))
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    print(f"{schedule}: loss {last['loss']:.4f}, {last['tokens_per_s']:.0f} tokens/s")
